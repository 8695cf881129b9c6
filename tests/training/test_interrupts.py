"""Signals: the first requests a stop, a later one stops immediately, and a duplicate is ignored."""

import signal

import pytest

from bestiary.training import interrupts
from bestiary.training.interrupts import Interrupted, Interrupts


def test_later_signal_stops_immediately_and_duplicate_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as handler:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # `timeout` signals the process and its group
        assert handler.received == signal.SIGINT
        now[0] += 1.1
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
