"""Log file of a trial (a run of a study): the output of its commands, with a line before and after each output.

    study: 2031-05-04 10:12:00 bestiary train --config ...
    recall-lstm  64k of 100k steps · ...
    study: exit status 1

The line before the output of a command is called the header, the line after it the footer. If the last command has no
footer, it is still running, or it was killed together with the `bestiary study` process.
"""

import os
import re
import signal
import time
from pathlib import Path
from typing import IO

from bestiary.utils import safe_files

HEADER_START = "study: 20"  # start of a header; 20: first two digits of the year
EXIT_STATUS = "study: exit status "
STOPPED = "study: stopped"
ERROR_PREFIX = "bestiary: "
TAIL_BYTES = 65_536  # number of bytes at the end of a log that are read


def open_log(path: Path, command: list[str]) -> IO[str]:
    """Open a log, append the header of a command, and return the open file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a")
    log.write(f"study: {time.strftime('%Y-%m-%d %H:%M:%S')} bestiary {' '.join(command)}\n")
    log.flush()
    return log


def close_log(path: Path, status: int | None, error: str = "") -> None:
    """Append the footer of a command, which states its exit status.

    `status` is None if the study stopped the command. If the command ended because of an event outside the command, for
    example the loss of its machine, `error` describes this event. It is logged before the footer.
    """
    with path.open("a") as log:
        if error:
            log.write(f"{ERROR_PREFIX}{error}\n")
        log.write(f"{STOPPED if status is None else f'{EXIT_STATUS}{status}'}\n")


def last_output(path: Path) -> list[str]:
    """Return the lines after the last header: the output of the last command and, if it has ended, the footer.

    Empty lines are left out.
    """
    try:
        descriptor = safe_files.open_file(path, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as log:
            log.seek(max(0, os.fstat(descriptor).st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    headers = [number for number, line in enumerate(lines) if line.startswith(HEADER_START)]
    first = headers[-1] + 1 if headers else 0
    return [line.rstrip() for line in lines[first:] if line.strip()]


def failure_reason(path: Path) -> str:
    """Return the reason why the last command failed. If it did not fail, or is still running, return "".

    The reason is the last error message of the command or, if there is none, its last line of output. If a signal
    killed the command, the reason is the signal.
    """
    *output, footer = last_output(path) or [""]
    status = int(footer.removeprefix(EXIT_STATUS)) if re.fullmatch(rf"{EXIT_STATUS}-?[0-9]{{1,3}}", footer) else 0
    if status == 0:
        return ""
    if status < 0:
        names = {known.value: known.name for known in signal.Signals}
        return f"killed by {names.get(-status, f'signal {-status}')}"
    errors = [line.removeprefix(ERROR_PREFIX) for line in output if line.startswith(ERROR_PREFIX)]
    return (errors or output or [f"exit status {status}"])[-1]
