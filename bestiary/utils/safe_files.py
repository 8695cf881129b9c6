"""Access to files in run folders, which may come from another person.

A run folder must contain only regular files and folders. The functions of this module refuse symbolic links, pipes,
devices and files that are too large. So a manipulated run folder cannot make a command read or write files outside this
folder, or wait for ever. The check covers every part of a path below the folder `root`: each subfolder is opened
relative to its parent folder. The folder `root` itself may be a link, for example runs/latest.

All errors are OSError, with a message that names the problem. `read_text` may also raise UnicodeDecodeError.
"""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_MEMORY_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MAX_TEXT_BYTES = 64 * 2**20  # maximum size of a JSON or TOML file
# Files can be much larger than the data that was downloaded, because blocks of zeros need no space (sparse files).
# Therefore the limits of files that are read completely depend on the memory of the machine. Readers of tables need
# several times the size of the file.
MAX_TABLE_BYTES = _MEMORY_BYTES // 16  # maximum size of a CSV table
MAX_TENSOR_BYTES = _MEMORY_BYTES // 4  # maximum size of a file with tensors or recorded actions
MAX_DEPTH = 50  # maximum number of folders inside each other
TEMPORARY_PREFIX = ".tmp-"  # prefix of temporary files, which are renamed when they are complete

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


def read_bytes(path: Path, root: Path | None = None, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file. Refuse links below the folder `root` (default: the folder of the file)."""
    with os.fdopen(open_file(path, os.O_RDONLY, root, max_bytes), "rb") as file:
        return file.read()


def read_text(path: Path, root: Path | None = None, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the content of a regular file as text. Raise UnicodeDecodeError (a ValueError) if it is not UTF-8."""
    return read_bytes(path, root, max_bytes).decode()


def open_table(path: Path, root: Path | None = None, max_bytes: int | None = MAX_TABLE_BYTES) -> IO[str]:
    """Open a CSV file for reading. `max_bytes` is None if the caller does not keep the whole table in memory."""
    descriptor = open_file(path, os.O_RDONLY, root, max_bytes)
    return io.TextIOWrapper(os.fdopen(descriptor, "rb"), encoding="utf-8", newline="")


def append_text(path: Path, text: str, root: Path | None = None) -> None:
    """Append text to an existing file. If the text cannot be written completely, remove the part that was written."""
    descriptor = open_file(path, os.O_WRONLY, root)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            _write_all(descriptor, text.encode())
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replace_file(path: Path, root: Path | None = None) -> Iterator[IO[bytes]]:
    """Context that yields a file for writing. At its end, the file replaces the file `path` atomically.

    The content is written to a new temporary file, which is then renamed, so readers see either the old or the new
    content. After an exception, the old file remains. If `path` is a link, the link is replaced.
    """
    with open_parent(path, root) as parent:
        temporary = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{path.name}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666, dir_fd=parent)
            with os.fdopen(descriptor, "wb") as file:
                yield file
            os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise


def write_bytes(path: Path, content: bytes, root: Path | None = None) -> None:
    """Write a file atomically. See `replace_file`."""
    with replace_file(path, root) as file:
        file.write(content)


def write_new(name: str, content: bytes, folder: int) -> None:
    """Create a file in the folder with the descriptor `folder`, and wait until the file is on disk."""
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666, dir_fd=folder)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, root: Path | None = None) -> None:
    """Write a text file atomically. See `replace_file`."""
    write_bytes(path, text.encode(), root)


def make_folder(path: Path, root: Path) -> None:
    """Create a folder below `root`, and all missing folders between `root` and it.

    None of these folders may be a link.
    """
    made = root
    for part in _parts(path, root):
        made = made / part
        with open_parent(made, root) as parent:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=parent)
            try:
                os.close(os.open(part, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=parent))
            except OSError as error:
                raise _explained(error, made) from error


def make_new_folder(path: Path, parents: bool = False, exist_ok: bool = True) -> None:
    """Create a folder that is not inside a run folder, for example the run folder itself.

    If the umask lets other users write to new folders, the new folder gets the mode 0700. Other users then cannot
    access the files in the folder, even if the modes of the files allow it.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()] if parents else [path]
    # The umask can be read only by setting a new umask. The new umask (0o077) is safe: until the old umask is restored,
    # other users cannot access new files.
    umask = os.umask(0o077)
    os.umask(umask)
    mode = 0o777 if umask & 0o002 else 0o700
    for folder in reversed(missing):
        folder.mkdir(mode, exist_ok=exist_ok)


def list_files(folder: Path, root: Path) -> list[Path]:
    """Return the regular files in a folder, sorted by name. If the folder is missing or a link, the list is empty."""
    try:
        with open_parent(folder / "x", root) as descriptor, os.scandir(descriptor) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return []


def list_folders(folder: Path, root: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name. If the folder is missing or a link, the list is empty."""
    try:
        with open_parent(folder / "x", root) as descriptor, os.scandir(descriptor) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def walk(folder: Path) -> Iterator[Path]:
    """Yield all files, folders and links below a folder, sorted within each folder. Links are not followed.

    Folders that cannot be read, and the content of folders inside more than MAX_DEPTH other folders, are left out.
    """
    pending = [folder]
    while pending:
        current = pending.pop()
        try:
            with os.scandir(current) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        except OSError:
            continue
        yield from (current / name for name, _ in found)
        if len(current.parts) - len(folder.parts) < MAX_DEPTH:
            pending += [current / name for name, is_folder in reversed(found) if is_folder]


def open_file(path: Path, flags: int, root: Path | None = None, max_bytes: int | None = None) -> int:
    """Open an existing regular file and return its file descriptor.

    A file with several names (hard links) is not opened for writing, because one of the names may be outside the run
    folder.
    """
    with open_parent(path, root) as parent:
        try:
            # Without O_NONBLOCK, opening a pipe would wait for its other end.
            descriptor = os.open(path.name, flags | _FLAGS | os.O_NONBLOCK, dir_fd=parent)
        except OSError as error:
            raise _explained(error, path) from error
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = OSError(errno.EINVAL, "this is not a regular file", str(path))
    elif flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
        problem = OSError(errno.EMLINK, "this is a hard link; replace it by a copy of the file", str(path))
    elif max_bytes is not None and status.st_size > max_bytes:
        problem = OSError(errno.EFBIG, f"the file has {status.st_size} bytes; at most {max_bytes} are read", str(path))
    if problem is not None:
        os.close(descriptor)
        raise problem
    return descriptor


@contextmanager
def open_parent(path: Path, root: Path | None) -> Iterator[int]:
    """Open the folder that contains `path` and yield its file descriptor. Links below `root` are refused.

    `path` need not exist: to open a folder itself, pass any name in this folder, for example `folder / "x"`.
    """
    root = path.parent if root is None else root
    parts = _parts(path, root)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=descriptor)
            except OSError as error:
                raise _explained(error, root / part) from error
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _parts(path: Path, root: Path) -> tuple[str, ...]:
    """Return the parts of `path` below `root`. Raise OSError if the path leaves this folder."""
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts or any("\0" in part for part in parts):
        raise OSError(errno.EINVAL, f"the path is not inside {root}", str(path))
    return parts


def _explained(error: OSError, path: Path) -> OSError:
    """Return a copy of an error whose message contains the path.

    If the path is a symbolic link, the message says so.
    """
    # The operating system reports a link as ELOOP or, if a folder is expected, as ENOTDIR.
    if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
        return OSError(
            errno.ELOOP, "this is a symbolic link; a run folder must contain only files and folders", str(path)
        )
    return type(error)(error.errno, error.strerror, str(path))


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
