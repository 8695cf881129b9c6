"""Folders for temporary files, which the next process sweeps up where their own was killed before it could."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def make_folder(prefix: str) -> Path:
    """For this user's eyes only, and named after this process; those of processes that are no more are removed."""
    _sweep(prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def _sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another swept it up; another's process
            if pid.isdecimal() and folder.stat().st_uid == os.getuid():
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    shutil.rmtree(folder, ignore_errors=True)
