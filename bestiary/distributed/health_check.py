"""Detection of remote processes that do not answer. Ray notices a lost process, but not a stopped process (SIGSTOP)."""

import time
from typing import Any

MAX_CALL_INTERVAL = 10.0  # maximum time between an answer and the next call of `answer`, in seconds
MAX_CHECK_INTERVAL = 1.0  # if the driver pauses between two checks, at most this many seconds count as silence


class HealthCheck:
    """Regularly calls the method `answer` of a remote process.

    The process must run `answer` in a separate thread, so that it also answers while another thread computes.

    Args:
        ray: the connected Ray module.
        worker: Ray handle of the process.
        timeout: time without an answer after which the caller replaces the process, in seconds.
    """

    def __init__(self, ray: Any, worker: Any, timeout: float):
        self.ray = ray
        self.worker = worker
        self.timeout = timeout
        self.call: Any = None  # object reference of the unanswered call; None if there is none
        self.seconds = 0.0  # age of the unanswered call or, if there is none, time since the last answer
        self.last_check_time = time.monotonic()

    def silent_seconds(self) -> float:
        """Return the time without an answer in seconds if it exceeds `timeout`, otherwise 0.

        Call this method several times per second.
        """
        now = time.monotonic()
        self.seconds += min(now - self.last_check_time, MAX_CHECK_INTERVAL)
        self.last_check_time = now
        if self.call is None:
            if self.seconds > min(self.timeout / 4, MAX_CALL_INTERVAL):
                self.call = self.worker.answer.remote()
                self.seconds = 0.0
        elif self.ray.wait([self.call], timeout=0)[0]:
            # The call may have failed because the process was lost. The loss is not handled here: other calls to the
            # process fail, too, and their callers handle the loss.
            self.call = None
            self.seconds = 0.0
        return self.seconds if self.call is not None and self.seconds > self.timeout else 0.0
