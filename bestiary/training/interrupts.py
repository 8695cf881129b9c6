"""Handling of Ctrl-C, SIGTERM and SIGHUP during training.

The first signal asks the run to stop after the current call of `Learner.learn` and to save a checkpoint. A second
signal stops the run immediately. A signal that arrives less than 1 s after the first signal is ignored. The reason is
that tools such as `timeout` send a signal to the process and to its process group, so the process receives the signal
twice.

SIGHUP is sent when the terminal is closed. If the process was started with `nohup`, SIGHUP stays ignored. SIGPIPE is
sent when a program writes to a closed connection, for example the connection of a logger. Python ignores SIGPIPE.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from bestiary.utils.console import note

SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP has stopped a run."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """Context manager in which the first signal of SIGNALS sets `received` instead of raising an exception."""

    def __init__(self) -> None:
        self.received: int | None = None  # number of the first signal, for example SIGINT
        self.received_time = 0.0
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                ignored_by_nohup = signum not in SIGNALS[:2] and signal.getsignal(signum) == signal.SIG_IGN
                if not ignored_by_nohup:
                    self.previous_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Store the first signal. Raise Interrupted at a later signal, unless it arrives within 1 s after the first."""
        if self.received is not None and time.monotonic() > self.received_time + 1:
            raise Interrupted(signum)
        if self.received is not None:
            return
        self.received = signum
        self.received_time = time.monotonic()
        name = signal.Signals(signum).name
        note(f"{name}: a checkpoint will be saved after this update; send the signal again to stop immediately")

    def __exit__(self, *_: object) -> None:
        for signum, handler in self.previous_handlers.items():
            signal.signal(signum, handler)
