"""Intervals of means: coverage by simulation and closed forms. Welch's test and Holm's correction against SciPy and by
hand."""

import json

import numpy as np
import pytest
import scipy.stats

from bestiary.evaluation.statistics import (
    describe_interval,
    format_interval,
    holm_adjust,
    interval_over_tasks,
    mean_interval,
    summarise,
    summarise_reward_per_step,
    welch_drop_test,
)


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_interval_of_few_values_covers_the_mean_in_95_percent_of_cases(n: int) -> None:
    """4,000 samples: the standard error of the measured coverage is 0.35 %."""
    samples = np.random.default_rng(n).normal(3.0, 2.0, (4_000, n))
    intervals = [mean_interval(sample) for sample in samples]
    covered = np.mean([i.low <= 3.0 <= i.high for i in intervals if i.low is not None and i.high is not None])
    assert 0.93 < covered < 0.97
    assert {interval.method for interval in intervals} == {"Student's t"}


@pytest.mark.parametrize("n", [20, 40])
def test_interval_of_many_values_is_a_percentile_bootstrap(n: int) -> None:
    rng = np.random.default_rng(n)
    values = rng.exponential(size=n)
    found = mean_interval(values)
    means = rng.choice(values, (50_000, n)).mean(axis=1)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=0.02)
    assert "bootstrap" in found.method


@pytest.mark.parametrize("runs", [2, 3, 5, 10])
@pytest.mark.parametrize("tasks", [2, 6])
def test_interval_over_tasks_covers_the_mean(runs: int, tasks: int) -> None:
    """The degrees of freedom are approximate, so the coverage is between 92 and 99 %. The variances of tasks differ."""
    rng = np.random.default_rng([runs, tasks])
    scale = np.linspace(0.5, 2.0, tasks)
    samples = 3.0 + scale[:, None] * rng.normal(size=(4_000, tasks, runs))
    intervals = [interval_over_tasks(list(sample)) for sample in samples]
    covered = np.mean([i.low <= 3.0 <= i.high for i in intervals if i.low is not None and i.high is not None])
    assert 0.92 < covered < 0.99


def test_interval_over_one_task_is_the_interval_of_the_mean() -> None:
    values = np.array([1.0, 3.0, 4.5])
    one, expected = interval_over_tasks([values]), mean_interval(values)
    assert [one.low, one.high] == pytest.approx([expected.low, expected.high])
    assert interval_over_tasks([values, values[:1]]).low is None
    assert interval_over_tasks([np.ones(3), np.zeros(2)]).high == 0.5


def test_interval_equals_the_formula() -> None:
    """Two values: the quantile of Student's t with one degree of freedom is tan(0.95 pi / 2) = 12.706."""
    found = mean_interval([1.0, 3.0])
    assert found.low == pytest.approx(2 - np.tan(0.95 * np.pi / 2) * 1.0)  # the standard error is 1
    assert found.high == pytest.approx(2 + np.tan(0.95 * np.pi / 2) * 1.0)


def test_one_value_has_no_interval() -> None:
    summary = summarise([5.0], "seeds")
    assert (summary["mean"], summary["n"], summary["unit"], summary["sd"]) == (5.0, 1, "seeds", 0.0)
    assert summary["ci_low"] is None
    assert summary["ci_high"] is None
    assert summary["interval"] == "none, because n = 1"
    assert format_interval(summary) == "none"
    assert json.loads(json.dumps(summary, allow_nan=False))["ci_low"] is None


def test_summary_states_unit_and_method() -> None:
    assert summarise([1.0, 2.0, 4.0], "seeds")["interval"] == "Student's t"
    assert "bootstrap" in summarise(list(range(20)))["interval"]
    assert summarise(list(range(20)))["unit"] == "games"
    assert format_interval({"ci_low": 1.234, "ci_high": 5.0}, digits=1) == "1.2 to 5.0"
    for word in ("seeds", "Student's t", "20", "bootstrap", "n = 1"):
        assert word in describe_interval("seeds")


@pytest.mark.parametrize("n", [3, 10])
def test_interval_of_the_reward_per_step_covers_the_true_ratio(n: int) -> None:
    rng = np.random.default_rng(n)
    covered = []
    for _ in range(2_000):
        lengths = rng.integers(50, 200, n).astype(float)
        summary = summarise_reward_per_step(0.3 * lengths + 10 * rng.normal(size=n), lengths)
        covered.append(summary["ci_low"] <= 0.3 <= summary["ci_high"])
    assert 0.93 < np.mean(covered) < 0.97


def test_interval_of_the_reward_per_step_of_many_games_is_a_bootstrap_over_games() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(50, 200, 30).astype(float)
    returns = 0.3 * lengths + 10 * rng.normal(size=30)
    picks = rng.integers(0, 30, (20_000, 30))
    ratios = returns[picks].sum(1) / lengths[picks].sum(1)
    found = summarise_reward_per_step(returns, lengths)
    np.testing.assert_allclose([found["ci_low"], found["ci_high"]], np.percentile(ratios, [2.5, 97.5]), atol=0.004)
    assert summarise_reward_per_step(returns[:1], lengths[:1])["ci_low"] is None


def test_welch_test_equals_scipy() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        before = rng.normal(rng.normal(), rng.uniform(0.1, 3), rng.integers(2, 7))
        after = rng.normal(rng.normal(), rng.uniform(0.1, 3), rng.integers(2, 7))
        expected = scipy.stats.ttest_ind(before, after, equal_var=False, alternative="greater").pvalue
        assert welch_drop_test(before, after) == pytest.approx(expected)


def test_welch_test_is_not_defined_without_variation() -> None:
    assert np.isnan(welch_drop_test(np.array([2.0, 2.0]), np.array([1.0, 1.0])))
    assert np.isnan(welch_drop_test(np.array([2.0]), np.array([1.0, 0.5])))
    assert welch_drop_test(np.array([2.0, 2.0]), np.array([1.0, 0.9])) < 0.05  # one sample varies


def test_holm_correction_by_hand() -> None:
    assert holm_adjust([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjust([0.2, 0.9]) == pytest.approx([0.4, 0.9])
    assert holm_adjust([0.6, 0.7]) == [1.0, 1.0]
    assert holm_adjust([]) == []
