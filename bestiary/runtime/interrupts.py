"""Ctrl-C and SIGTERM: the first asks the run to stop at its next update, a later one stops it at once.

Later by a second: who signals a process and its group, as `timeout` does, means one signal.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from bestiary.console import note


class Interrupted(KeyboardInterrupt):
    """A run stopped because it was asked to."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """While in this context, signals set `received` instead of raising."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.when = 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self.previous[signum] = signal.signal(signum, self._receive)
        return self

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and time.monotonic() > self.when + 1:
            raise Interrupted(signum)
        if self.received is not None:
            return
        self.received, self.when = signum, time.monotonic()
        note(f"{signal.Signals(signum).name}: saving after this update (once more to stop at once)")

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)
