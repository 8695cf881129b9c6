"""Measurement of the training time and the training speed of a run."""

import time
from collections import deque

SPEED_WINDOW = 60.0  # the training speed is the mean over this time, in seconds
SAMPLE_INTERVAL = 0.5  # minimum time between two samples, in seconds
MIN_ESTIMATE_SECONDS = 5.0  # the remaining time is estimated only after the speed was measured for this time


class TrainingClock:
    """Measures the training time of a run over all its sessions, and the training speed over the last minute.

    A session is the time from a start or resume of the run until it stops. In each session, the measurement of the
    speed starts after the first learn call, so that it does not include the time to start environments and threads.

    Args:
        seconds_before: training time of earlier sessions of the run, in seconds.
    """

    def __init__(self, seconds_before: float = 0.0):
        self.seconds_before = seconds_before
        self.started = time.monotonic()
        self.samples: deque[tuple[float, int]] = deque()  # pairs (time, step count) from the last minute
        self.previous_sps = 0.0  # speed before the measurement was restarted

    @property
    def seconds(self) -> float:
        """Return the training time of the run in seconds, including its earlier sessions."""
        return self.seconds_before + time.monotonic() - self.started

    @property
    def sps(self) -> float:
        """Return the training speed over the last minute, in steps per second.

        After a restart of the measurement, this is the speed before the restart until a new speed is known.
        """
        measured = self._measured_seconds()
        return (self.samples[-1][1] - self.samples[0][1]) / measured if measured > 0 else self.previous_sps

    def remaining_seconds(self, steps: int) -> float | None:
        """Return the estimated time for `steps` more steps, in seconds. Return None if the speed is not yet known."""
        if steps <= 0:
            return 0.0
        if self._measured_seconds() < MIN_ESTIMATE_SECONDS or self.sps == 0:
            return None
        return steps / self.sps

    def record(self, steps: int) -> None:
        """Add a sample (current time, `steps`) to the speed measurement. `steps` is the step count of the run."""
        now = time.monotonic()
        if len(self.samples) > 1 and now - self.samples[-2][0] < SAMPLE_INTERVAL:
            self.samples.pop()
        self.samples.append((now, steps))
        while len(self.samples) > 2 and self.samples[1][0] < now - SPEED_WINDOW:
            self.samples.popleft()

    def restart_speed(self, steps: int) -> None:
        """Start a new measurement of the speed, so that a pause of the training does not lower the measured speed."""
        self.previous_sps = self.sps
        self.samples.clear()
        self.record(steps)

    def _measured_seconds(self) -> float:
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0
