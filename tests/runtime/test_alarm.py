"""The hacking alarm: it fires where trained and true part, and on nothing else."""

import numpy as np
import pytest

from bestiary.runtime.alarm import Alarm, slope


def fired(trained: np.ndarray, true: np.ndarray, games: int = 25, windows: int = 4) -> int:
    alarm = Alarm(games, windows)
    for pair in zip(trained, true, strict=True):
        alarm.add(*pair)
    return alarm.fired


def test_it_fires_where_trained_and_true_part() -> None:
    rng, t = np.random.default_rng(0), np.arange(600)
    trained = t / 100 + rng.normal(size=600)
    true = np.where(t < 300, t, 600 - t) / 100 + rng.normal(size=600)  # together first, then not
    assert fired(trained[:300], true[:300]) == 0
    assert fired(trained, true) >= 1


@pytest.mark.parametrize("together", [0.0, 0.8, -0.8])
def test_it_does_not_fire_on_noise(together: float) -> None:
    """Returns without a trend, whether the two go together, apart or each its own way: 1,600 looks each."""
    rng, count = np.random.default_rng(1), 0
    for _ in range(40):
        trained = rng.normal(size=1_100)
        true = together * trained + np.sqrt(1 - together**2) * rng.normal(size=1_100)
        count += fired(trained, true)
    assert count <= 3  # of the last kind one in some thousand is expected


def test_it_does_not_fire_while_both_rise_or_both_fall() -> None:
    rng, t = np.random.default_rng(2), np.arange(800) / 100
    for sign in (1, -1):
        assert fired(sign * t + rng.normal(size=800), sign * t + rng.normal(size=800)) == 0
    assert fired(np.zeros(800), -t) == 0


def test_a_resumed_alarm_is_the_same() -> None:
    rng, t = np.random.default_rng(3), np.arange(330)
    pairs = np.stack([t / 15 + rng.normal(size=330), -t / 15 + rng.normal(size=330)], axis=1)
    whole, first = Alarm(20, 3), Alarm(20, 3)
    for pair in pairs:
        whole.add(*pair)
    for pair in pairs[:130]:
        first.add(*pair)
    second = Alarm(20, 3, **first.state())  # type: ignore[arg-type]
    for pair in pairs[130:]:
        second.add(*pair)
    assert second.state() == whole.state()
    assert whole.fired > 5


def test_slope_against_the_textbook() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(4).normal(size=50) + np.arange(50) / 30
    line = scipy_stats.linregress(np.arange(50), values)
    assert slope(values) == pytest.approx(line.slope / line.stderr)
    assert slope(np.ones(9)) == 0
