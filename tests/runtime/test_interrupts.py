"""Signals: the first asks, a later one insists, and one that was sent twice is one."""

import signal

import pytest

from bestiary.runtime import interrupts
from bestiary.runtime.interrupts import Interrupted, Interrupts


def test_a_later_signal_stops_at_once_and_the_same_one_twice_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as received:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # as `timeout` does: to the process, and to its group
        assert received.received == signal.SIGINT
        now[0] += 1.1
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
