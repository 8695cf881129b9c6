"""Unfinished remote calls, each with a callback that runs when the call finishes."""

import time
from collections.abc import Callable
from typing import Any


class PendingCalls:
    """Maps the object reference of each running remote call to the callback for its result."""

    def __init__(self, ray: Any):
        self.ray = ray
        self.callbacks: dict[Any, Callable[[Any], None]] = {}  # object reference -> callback

    def on_done(self, reference: Any, callback: Callable[[Any], None]) -> None:
        """Register a callback. After the remote call has finished or failed, `poll` calls `callback(reference)`."""
        self.callbacks[reference] = callback

    def poll(self, timeout: float = 0.5) -> None:
        """Wait at most `timeout` seconds for a call to finish. Then run the callbacks of all finished calls."""
        pending = list(self.callbacks)
        if not pending:
            time.sleep(0.01)
            return
        finished, _ = self.ray.wait(pending, num_returns=1, timeout=timeout)
        if finished:
            finished, _ = self.ray.wait(pending, num_returns=len(pending), timeout=0)
        for reference in finished:
            self.callbacks.pop(reference)(reference)
