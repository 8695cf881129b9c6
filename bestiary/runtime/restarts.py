"""What is replaced on a cluster: how often, why, and whether that is too often.

A machine that is lost takes all of its players with it. Ray tells of them one by one, and until it has noticed it sends those
that replace them to the same machine: losses on one machine within half a minute are one restart.
"""

import time
from collections import deque

from bestiary.console import warn
from bestiary.errors import RunError

WINDOW = 600.0  # seconds in which --max-restarts are too many
TOGETHER = 30.0  # seconds in which what a machine loses is lost for one reason


class LearnersLost(Exception):
    """A process that learns is gone, and with it what was learnt since the last checkpoint."""


class Restarts:
    """How often something was replaced, and whether that is too often."""

    def __init__(self, most: int, before: int = 0):
        self.most, self.total = most, before
        self.times: deque[float] = deque()
        self.counted: dict[str, float] = {}  # when a loss on a machine was last counted

    def add(self, what: str, machine: str = "") -> None:
        """`machine`: that it was lost on, where others may have been lost for the same reason."""
        now = time.monotonic()
        if machine and now - self.counted.get(machine, -WINDOW) < TOGETHER:
            return warn(f"{what}; replaced, too")
        self.counted[machine] = now
        self.total += 1
        self.times.append(now)
        while now - self.times[0] > WINDOW:
            self.times.popleft()
        if len(self.times) > self.most:
            raise RunError(
                f"{what}; that was restart {len(self.times)} within ten minutes (--max-restarts {self.most})"
            )
        warn(f"{what}; replaced (restart {self.total})")
