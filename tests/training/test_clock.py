"""Training time and speed of a run."""

import pytest

from bestiary.training import clock
from bestiary.training.clock import TrainingClock


def test_time_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    training_clock = TrainingClock(seconds_before=40.0)
    assert training_clock.sps == 0.0
    now = 102.0  # the start of environments and threads does not count
    training_clock.record(500)
    assert training_clock.sps == 0.0
    now = 104.0
    training_clock.record(600)
    assert training_clock.sps == 50.0
    assert training_clock.seconds == 44.0
    now = 1_000.0  # after a pause, for example a validation
    training_clock.restart_speed(600)
    assert training_clock.sps == 50.0  # until the new speed is known
    now = 1_001.0
    training_clock.record(620)
    assert training_clock.sps == 20.0


def test_speed_is_measured_over_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    training_clock = TrainingClock()
    for update in range(1, 2_001):
        now = 0.1 * update
        training_clock.record(10 * update if now <= 130 else 13_000 + 30 * (update - 1_300))
    assert training_clock.sps == pytest.approx(300.0, rel=0.02)
    assert len(training_clock.samples) < 200


def test_the_remaining_time_is_not_estimated_from_the_first_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    training_clock = TrainingClock()
    for second, expected in ((1.0, None), (4.0, None), (11.0, 90.0)):
        now = second
        training_clock.record(int(10 * second))
        assert training_clock.remaining_seconds(900) == expected
