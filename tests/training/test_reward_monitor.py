"""Reward-hacking monitor: alerts if training and true return diverge, and only then."""

import numpy as np
import pytest

from bestiary.training.reward_monitor import RewardHackingMonitor, trend_t_statistic


def count_alerts(training: np.ndarray, true: np.ndarray, games: int = 25, windows: int = 4) -> int:
    monitor = RewardHackingMonitor(games, windows)
    for pair in zip(training, true, strict=True):
        monitor.add(*pair)
    return monitor.num_alerts


def test_alerts_if_training_and_true_return_diverge() -> None:
    rng, t = np.random.default_rng(0), np.arange(600)
    training = t / 100 + rng.normal(size=600)
    true = np.where(t < 300, t, 600 - t) / 100 + rng.normal(size=600)  # rises with the training return, then falls
    assert count_alerts(training[:300], true[:300]) == 0
    assert count_alerts(training, true) >= 1


@pytest.mark.parametrize("correlation", [0.0, 0.8, -0.8])
def test_does_not_alert_on_noise(correlation: float) -> None:
    """Returns without a trend: independent, correlated and anti-correlated, with 1,600 checks each."""
    rng, count = np.random.default_rng(1), 0
    for _ in range(40):
        training = rng.normal(size=1_100)
        true = correlation * training + np.sqrt(1 - correlation**2) * rng.normal(size=1_100)
        count += count_alerts(training, true)
    assert count <= 3  # anti-correlated returns raise about 1 false alert per 1,000 checks


def test_does_not_alert_while_both_rise_or_both_fall() -> None:
    rng, t = np.random.default_rng(2), np.arange(800) / 100
    for sign in (1, -1):
        assert count_alerts(sign * t + rng.normal(size=800), sign * t + rng.normal(size=800)) == 0
    assert count_alerts(np.zeros(800), -t) == 0


def test_restored_monitor_equals_an_uninterrupted_one() -> None:
    rng, t = np.random.default_rng(3), np.arange(330)
    pairs = np.stack([t / 15 + rng.normal(size=330), -t / 15 + rng.normal(size=330)], axis=1)
    uninterrupted, first = RewardHackingMonitor(20, 3), RewardHackingMonitor(20, 3)
    for pair in pairs:
        uninterrupted.add(*pair)
    for pair in pairs[:130]:
        first.add(*pair)
    second = RewardHackingMonitor(20, 3, **first.state())  # type: ignore[arg-type]
    for pair in pairs[130:]:
        second.add(*pair)
    assert second.state() == uninterrupted.state()
    assert uninterrupted.num_alerts > 5


def test_trend_equals_linear_regression_of_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(4).normal(size=50) + np.arange(50) / 30
    line = scipy_stats.linregress(np.arange(50), values)
    assert trend_t_statistic(values) == pytest.approx(line.slope / line.stderr)
    assert trend_t_statistic(np.ones(9)) == 0
