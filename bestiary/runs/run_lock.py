"""The lock of a run folder: only one training process at a time may write to a run.

A process that writes to a run locks the file `lock` and writes its ID to lock_owner.json. The operating system releases
the lock when the process ends, even after a crash. After an error or a crash, lock_owner.json remains in the folder.
"""

import contextlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from bestiary.runs.checkpoints import BEST_LINKS
from bestiary.utils import safe_files
from bestiary.utils.console import note
from bestiary.utils.errors import UserError


def is_locked(path: Path) -> bool:
    """Return whether a training process is writing to the run folder now."""
    if not (path / "lock_owner.json").exists() or not _is_lock_file(path / "lock"):
        return False
    try:
        with filelock.FileLock(path / "lock").acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:
        return False


def was_killed(path: Path) -> bool:
    """Return whether the last process that wrote to the run folder was killed or crashed."""
    return (path / "lock_owner.json").exists() and not is_locked(path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context in which no other process writes to the run folder. Raise UserError if another process has locked it.

    If an error ends the context, the file lock_owner.json is kept, so that `was_killed` returns True. There are two
    exceptions. After KeyboardInterrupt, the file is removed. After UserError, the result of `was_killed` is the same as
    before the context, because nothing was done.
    """
    folder = path.absolute()  # an environment may change the working directory before the lock is released
    _check_links(path)
    lock = filelock.FileLock(folder / "lock", timeout=0)
    owner = folder / "lock_owner.json"
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"{path} is being written by another process{_describe_owner(owner)}; "
            "wait until this process ends, or stop it"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        killed_before = owner.exists()
        if killed_before:
            note(
                f"note: the last process that wrote {path}{_describe_owner(owner)} did not end cleanly: "
                "it was killed or crashed"
            )
        safe_files.write_text(owner, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        crashed = True
        try:
            yield
            crashed = False
        except KeyboardInterrupt:
            crashed = False
            raise
        except UserError:
            crashed = killed_before
            raise
        finally:
            if not crashed:
                # If removing the file fails, do not hide the error that ended the training.
                with contextlib.suppress(OSError):
                    owner.unlink(missing_ok=True)
    finally:
        lock.release()


def _check_links(path: Path) -> None:
    """Raise UserError if the run folder contains a symbolic link that was not created by a training.

    If training, or a logger, wrote through such a link, it could change files outside the run folder.
    """
    for entry in safe_files.walk(path):
        relative = entry.relative_to(path)
        if entry.is_symlink() and not _is_own_link(relative, os.readlink(entry)):
            raise UserError(f"{entry} is a symbolic link; remove it, or copy its target to this place")
        if len(relative.parts) > safe_files.MAX_DEPTH:
            raise UserError(f"{path} contains more than {safe_files.MAX_DEPTH} folders inside each other; remove them")
    if os.path.lexists(path / "lock") and not _is_lock_file(path / "lock"):
        raise UserError(f"{path / 'lock'} is not a regular file, or is a hard link; remove it")


def _is_own_link(path: Path, target: str) -> bool:
    """Return whether a link may be in a run folder. `path` is its path relative to the run folder.

    Bestiary creates links to checkpoints and replaces them. W&B creates links to files in its own folder and, for each
    session, a link debug-core.log to its cache folder.
    """
    if path.parent == Path("checkpoints"):
        # A process that was killed while it replaced such a link leaves a link with a temporary name.
        return path.name in ("latest", *BEST_LINKS) or path.name.startswith(safe_files.TEMPORARY_PREFIX)
    if path.parent == Path("wandb"):
        return not os.path.isabs(target) and ".." not in Path(target).parts
    return path.match("wandb/*/logs/debug-core.log")


def _is_lock_file(path: Path) -> bool:
    """Return whether a file can safely be used as the lock.

    Some versions of filelock empty the lock file. Therefore it must be a regular file without further hard links: a
    hard link could be another file of the user.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _describe_owner(path: Path) -> str:
    """Describe the process that holds or held the lock, for example " (pid 17 on host)". Return "" if it is unknown."""
    try:
        owner = json.loads(safe_files.read_text(path, max_bytes=10_000))
        return f" (pid {int(owner['pid'])} on {str(owner['host'])[:100]})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
