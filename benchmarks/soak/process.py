"""Start a training process of the soak test, measure its resources, and find what remains after its end."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.soak.mixture import PACE_VARIABLE

# Environment variable with a unique value for each training process. Child processes inherit it.
TAG_VARIABLE = "SOAK_PROCESS"
SLOW_DISK = """
import os, sys, time
from bestiary.cli.main import main

fsync = os.fsync


def slow_fsync(descriptor):
    time.sleep(0.3)
    fsync(descriptor)


os.fsync = slow_fsync
main(sys.argv[1:])
"""


class Sample(NamedTuple):
    """Resources that a process uses at one time."""

    seconds: float  # time since the start of the process
    rss_mb: float  # resident memory
    descriptors: int
    threads: int


class TrainingProcess:
    """A process of `bestiary train` or `bestiary resume`.

    Args:
        arguments: arguments of the command `bestiary`.
        tag: value of TAG_VARIABLE.
        temporary: folder for temporary files.
        log: file to which the output is appended.
        slow_disk: whether each call of `os.fsync` takes 0.3 s longer.
        seconds_per_update: pause after each update.
    """

    def __init__(
        self,
        arguments: list[str],
        tag: str,
        temporary: Path,
        log: Path,
        slow_disk: bool = False,
        seconds_per_update: float = 0.0,
    ):
        self.tag = tag
        self.temporary = temporary
        self.log = log
        self.log_start = log.stat().st_size if log.exists() else 0
        self.start = time.monotonic()
        self.samples: list[Sample] = []
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            TAG_VARIABLE: tag,
            PACE_VARIABLE: str(seconds_per_update),
        }
        program = ["-c", SLOW_DISK] if slow_disk else ["-m", "bestiary"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, signum: int) -> None:
        """Send a signal to the process, if it is still running."""
        if self.running:
            self.process.send_signal(signum)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process. Return its exit status, or None if it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def output(self) -> str:
        """Return the text that the process has printed so far."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def measure(self) -> None:
        """Append the current use of resources to `samples`."""
        folder = Path(f"/proc/{self.pid}")
        with contextlib.suppress(OSError, ValueError, IndexError):  # raised if the process has just ended
            pages = int((folder / "statm").read_text().split()[1])
            status = (folder / "status").read_text()
            threads = int(status.split("Threads:")[1].split()[0])
            descriptors = len(list((folder / "fd").iterdir()))
            rss_mb = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.samples.append(Sample(time.monotonic() - self.start, rss_mb, descriptors, threads))

    def leftovers(self) -> list[str]:
        """Return the names of temporary files of this process, and the processes with its tag that still run."""
        found = [path.name for path in self.temporary.iterdir()]
        wanted = f"{TAG_VARIABLE}={self.tag}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # raised if the process has ended or belongs to another user
                is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if wanted in (folder / "environ").read_bytes().split(b"\0") and not is_zombie:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"process {folder.name}: {command[:60]}")
        return found
