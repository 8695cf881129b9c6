"""The disk to which the soak test writes its runs. The test can fill it for some time."""

import contextlib
import resource
import subprocess
from pathlib import Path

DISK_MB = 48
FILL_BLOCK = b"\0" * 65536


class SoakDisk:
    """Context manager that mounts a small file system in memory at `folder`, if this is permitted.

    If it is not permitted, `folder` is an ordinary folder. Then `fill` limits the size of the files that a process may
    write, so that all writes of the process fail, as on a full disk.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.mounted = False
        self.limited_pid = 0  # process whose file size is limited; 0: none

    def __enter__(self) -> "SoakDisk":
        self.folder.mkdir(parents=True)
        options = f"size={DISK_MB}m"
        with contextlib.suppress(OSError):  # OSError: there is no command `mount`
            command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    @property
    def kind(self) -> str:
        """How the disk is filled, as text for the report."""
        return f"tmpfs of {DISK_MB} MB" if self.mounted else "limit of the file size"

    def fill(self, pid: int) -> None:
        """Let all further writes of the process `pid` to this disk fail."""
        if self.mounted:
            with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(FILL_BLOCK)
        else:
            self.limited_pid = pid
            self._limit(1)

    def free(self) -> None:
        """Let writes succeed again."""
        (self.folder / "filler").unlink(missing_ok=True)
        if self.limited_pid:
            self._limit(resource.RLIM_INFINITY)
            self.limited_pid = 0

    def _limit(self, size: int) -> None:
        with contextlib.suppress(OSError):  # OSError: the process has ended
            hard = resource.prlimit(self.limited_pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(self.limited_pid, resource.RLIMIT_FSIZE, (size if size == 1 else hard, hard))
