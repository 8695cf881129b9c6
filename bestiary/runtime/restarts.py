"""What is replaced on a cluster: how often, why, and whether that is too often."""

import time
from collections import deque

from bestiary.console import warn
from bestiary.errors import RunError, UserError

WINDOW = 600.0  # seconds in which --max-restarts are too many


class LearnersLost(Exception):
    """A process that learns is gone, and with it what was learnt since the last checkpoint."""


class Restarts:
    """How often something was replaced, and whether that is too often."""

    def __init__(self, most: int, before: int = 0):
        self.most, self.total = most, before
        self.times: deque[float] = deque()

    def add(self, what: str) -> None:
        now = time.monotonic()
        self.total += 1
        self.times.append(now)
        while now - self.times[0] > WINDOW:
            self.times.popleft()
        if len(self.times) > self.most:
            raise RunError(
                f"{what}; that was restart {len(self.times)} within ten minutes (--max-restarts {self.most})"
            )
        warn(f"{what}; replaced (restart {self.total})")


def first_line(error: BaseException) -> str:
    """An error of Ray's, or a cause of one, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if isinstance(error, RunError | UserError) or lines == [] else f"{type(error).__name__}: {lines[0]}"
