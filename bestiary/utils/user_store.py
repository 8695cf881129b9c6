"""Files in which Bestiary stores what the user trusts: $XDG_CONFIG_HOME/bestiary/*.json.

If XDG_CONFIG_HOME is not set, the folder is ~/.config/bestiary. Only the user may write to these files: the folder has
mode 0700, and the files have mode 0600. A file is ignored, with a warning, if it is a link, if it belongs to another
user, or if other users can write to it.
"""

import contextlib
import functools
import json
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from bestiary.utils.console import warn

LOCK_SECONDS = 30  # maximum time to wait until no other process writes to the file
MAX_BYTES = 64 * 2**20  # maximum size of a file


class UnsafeFile(Exception):
    """Raised if a file of the store must not be used, for example because other users can write to it."""


@functools.cache  # each warning is printed once
def _warn_once(text: str) -> None:
    warn(text)


def store_folder() -> Path:
    """Return the folder of the files (see the module docstring). Tests set XDG_CONFIG_HOME to use another folder."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "bestiary"


@dataclass(frozen=True)
class UserStore:
    """A JSON file that maps keys to records."""

    file: str  # name of the file
    max_records: int  # if there are more records, the oldest ones are removed

    @property
    def path(self) -> Path:
        return store_folder() / self.file

    def read(self) -> dict[str, dict[str, Any]]:
        """Return all records, from the oldest to the newest. If the file must not be used, warn and return {}."""
        try:
            return self._read()
        except (UnsafeFile, OSError) as error:
            _warn_once(f"{self.path} is ignored: {error}")
            return {}

    def update(self, key: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Replace the record of a key by `change(record)`. If the key has no record yet, call `change({})`.

        If the file cannot be written, print a warning.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private_folder(self.path.parent)
            lock = filelock.FileLock(self.path.with_suffix(".lock"), timeout=LOCK_SECONDS, mode=0o600)
            with lock:
                records = self._read()
                old = records.pop(key, {})
                records[key] = change(old)
                kept = dict(list(records.items())[-self.max_records :])
                self._write(json.dumps(kept, indent=1).encode())
        except (UnsafeFile, OSError, filelock.Timeout) as error:
            _warn_once(f"{self.path} is not changed: {error}")

    def _read(self) -> dict[str, dict[str, Any]]:
        if not os.path.lexists(self.path):
            return {}
        check_private_folder(self.path.parent)
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UnsafeFile(
                "it is a link; replace it by a regular file" if self.path.is_symlink() else error
            ) from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise UnsafeFile(f"it is not a regular file of at most {MAX_BYTES} bytes; remove it")
            _check_owner(status, self.path, "600")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                content = file.read()
        finally:
            os.close(descriptor)
        try:
            records = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnsafeFile(f"it is not a valid JSON file ({error}); remove it") from error
        if not isinstance(records, dict) or not all(isinstance(record, dict) for record in records.values()):
            raise UnsafeFile("it was not written by Bestiary; remove it")
        return records

    def _write(self, content: bytes) -> None:
        temporary = self.path.with_name(f".tmp-{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def check_private_folder(folder: Path) -> None:
    """Raise UnsafeFile if another user owns a folder, or may write to it."""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFile(f"{folder} is not a folder")
    _check_owner(status, folder, "700")


def _check_owner(status: os.stat_result, path: Path, mode: str) -> None:
    """Raise UnsafeFile if another user owns a file or folder, or may write to it."""
    if status.st_uid != os.geteuid():
        raise UnsafeFile(f"{path} belongs to another user; remove it")
    if status.st_mode & 0o022:
        raise UnsafeFile(f"other users can write to {path}; check its content, then run: chmod {mode} {path}")
