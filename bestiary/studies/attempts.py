"""The log of a run: what its commands printed, each attempt between two lines of the study's own.

    study: 2031-05-04 10:12:00 bestiary train --config ...
    recall-lstm  64k of 100k steps · ...
    study: exit status 1

A log whose last attempt has no closing line belongs to a command that is still at work, or that was killed with the study.
"""

import re
import signal
import time
from pathlib import Path
from typing import IO

OPENING, CLOSING, STOPPED = "study: 20", "study: exit status ", "study: stopped"


def open_log(path: Path, command: list[str]) -> IO[str]:
    """The log, open for a command to append to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a")
    log.write(f"study: {time.strftime('%Y-%m-%d %H:%M:%S')} bestiary {' '.join(command)}\n")
    log.flush()
    return log


def close_log(path: Path, status: int | None, lost: str = "") -> None:
    """Say how the attempt ended; None: it was stopped, by the study or by `lost`: what went wrong around it."""
    with path.open("a") as log:
        if lost:
            log.write(f"bestiary: {lost}\n")
        log.write(f"{STOPPED if status is None else f'{CLOSING}{status}'}\n")


def last_attempt(path: Path) -> list[str]:
    """What the last command printed, and its closing line if it has one; of a long log only the end is read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 65_536))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    openings = [number for number, line in enumerate(lines) if line.startswith(OPENING)]
    return [line.rstrip() for line in lines[openings[-1] + 1 if openings else 0 :] if line.strip()]


def failure(path: Path) -> str:
    """Why the last attempt failed: its last error line; nothing where it did not fail."""
    *printed, closing = last_attempt(path) or [""]
    status = int(closing.removeprefix(CLOSING)) if re.fullmatch(rf"{CLOSING}-?\d+", closing) else 0
    if status == 0:
        return ""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    errors = [line.removeprefix("bestiary: ") for line in printed if line.startswith("bestiary: ")]
    return (errors or printed or [f"exit status {status}"])[-1]
