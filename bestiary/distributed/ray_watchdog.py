"""The watchdog of a private Ray instance: a process that cleans up after the driver has ended.

The watchdog kills the processes of the Ray instance and removes its folder. The driver cannot do this if it is killed
with SIGKILL. Without the watchdog, some processes of Ray would then run for about another minute, and the folder would
remain.

The driver holds the write end of a pipe, which is the standard input of the watchdog. When the driver ends, the
operating system closes the pipe, even if the driver was killed. The watchdog runs this file as a script. The file
imports only the standard library, so that the watchdog starts quickly and needs little memory.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_SECONDS = 10.0  # maximum time to kill all processes; a process of Ray may start others before it is killed
STOP_SECONDS = 30.0  # maximum time that the driver waits for the end of the watchdog


@contextmanager
def watch(folder: Path) -> Iterator[None]:
    """Context with a watchdog process, which runs this module.

    When the context ends or the current process ends, the watchdog kills all processes of the Ray instance that uses
    `folder`, and removes the folder.
    """
    # Start the watchdog in a new session, so that it does not receive signals of the terminal, for example after
    # Ctrl-C.
    watchdog = subprocess.Popen(
        [sys.executable, "-I", __file__, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    assert watchdog.stdin is not None
    try:
        yield
    finally:
        watchdog.stdin.close()
        try:
            watchdog.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            watchdog.kill()
            watchdog.wait()
        shutil.rmtree(folder, ignore_errors=True)  # necessary only if the watchdog was killed


def find_processes(folder: Path) -> list[int]:
    """Return the IDs of the processes that have an open file in a folder, or the folder in their command line.

    Each process of a Ray instance has an open log file in the folder of the instance. On systems without /proc, the
    list is empty.
    """
    found = []
    own = (os.getpid(), os.getppid())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if int(process.name) not in own and _uses(process, f"{folder}/"):
                found.append(int(process.name))
    return found


def _uses(process: Path, prefix: str) -> bool:
    """Return whether a process (a folder of /proc) uses a path that starts with `prefix`."""
    if prefix.encode() in (process / "cmdline").read_bytes():
        return True
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # the file was closed
            if os.readlink(descriptor).startswith(prefix):
                return True
    return False


def clean_up(folder: Path) -> None:
    """Kill all processes that use a folder, until there are none, and remove the folder."""
    deadline = time.monotonic() + MAX_SECONDS
    while (found := find_processes(folder)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # returns when the driver has closed the pipe or has ended
    clean_up(Path(sys.argv[1]))
