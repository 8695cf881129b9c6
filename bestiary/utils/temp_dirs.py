"""Temporary directories whose names contain the ID of the process that created them.

If this process is killed before it removes its directories, a later process removes them.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


def make_temp_dir(prefix: str) -> Path:
    """Create a temporary directory that only this user can read.

    First remove the directories of this user that have the same prefix and whose process no longer exists.
    """
    _remove_stale(prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))


def _remove_stale(prefix: str) -> None:
    """Remove directories of this user that have this prefix and whose process no longer exists."""
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = directory.name.removeprefix(prefix).partition("-")[0]
        # FileNotFoundError: another process has removed the directory at the same time. PermissionError: the process
        # has ended, and a process of another user now has its ID.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if pid.isdecimal() and directory.stat().st_uid == os.getuid():
                try:
                    os.kill(int(pid), 0)
                except ProcessLookupError:
                    shutil.rmtree(directory, ignore_errors=True)
