"""Aggregate statistics over tasks and runs: rliable's own output on random matrices, and values computed by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bestiary.evaluation.aggregates import (
    average_performance_profile,
    interquartile_mean,
    mean_score,
    median_score,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)

# Written by make_rliable_reference.py, which names the command and the versions.
REFERENCE = json.loads(Path(__file__).with_name("rliable_reference.json").read_text())
THRESHOLDS = np.array(REFERENCE["thresholds"])
NAN = float("nan")


@pytest.fixture(params=REFERENCE["cases"], ids=lambda case: "{}x{}".format(len(case["x"]), len(case["x"][0])))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**request.param, "x": np.array(request.param["x"]), "y": np.array(request.param["y"])}


def test_statistics_equal_rliable(case: dict[str, Any]) -> None:
    x, y = case["x"], case["y"]
    found = {
        "mean": mean_score(x),
        "median": median_score(x),
        "iqm": interquartile_mean(x),
        "optimality_gap": optimality_gap(x),
        "optimality_gap_half": optimality_gap(x, gamma=0.5),
        "improvement": probability_of_improvement(x, y),
        "profile": performance_profile(x, THRESHOLDS),
        "average_profile": average_performance_profile(x, THRESHOLDS),
    }
    assert set(found) == set(case["points"])
    for name, value in found.items():
        np.testing.assert_allclose(value, case["points"][name], atol=1e-12, err_msg=name)


def test_intervals_equal_rliable_up_to_the_error_of_the_bootstrap(case: dict[str, Any]) -> None:
    """Both sides are random: 4,000 resamples each. The tolerance is a tenth of the width of the interval, or the
    smallest step of a statistic that has only few different values."""
    x, y = case["x"], case["y"]
    step = 1 / min(len(x), len(y)) / x.shape[1]
    found = {
        "iqm": stratified_bootstrap(interquartile_mean, x, resamples=4_000),
        "mean": stratified_bootstrap(mean_score, x, resamples=4_000),
        "optimality_gap": stratified_bootstrap(optimality_gap, x, resamples=4_000),
        "improvement": stratified_bootstrap(probability_of_improvement, x, y, resamples=4_000),
        "profile": stratified_bootstrap(lambda s: performance_profile(s, THRESHOLDS), x, resamples=4_000),
    }
    assert set(found) == set(case["intervals"])
    for name, interval in found.items():
        assert interval is not None
        expected = np.array(case["intervals"][name])
        tolerance = 0.1 * np.max(expected[1] - expected[0])
        if name in ("improvement", "profile"):
            tolerance = max(tolerance, step)
        np.testing.assert_allclose(interval, expected, atol=tolerance + 1e-9, err_msg=name)


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert interquartile_mean(np.array([[8.0, 1, 2, 3, 4, 5, 6, 700]]).T) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert interquartile_mean(np.array([[1.0], [2], [9]])) == pytest.approx(4)  # a quarter of three is less than one
    assert interquartile_mean(np.array([[1.0], [2], [3], [100], [5]])) == pytest.approx((2 + 3 + 5) / 3)
    # Scores of all tasks are sorted together, so 0 and 4 are removed.
    assert interquartile_mean(np.array([[0.0, 2], [4, 3]])) == pytest.approx(2.5)


def test_missing_runs_do_not_count() -> None:
    """The second task has one run less. Each task has the same weight, except in the IQM of all scores."""
    scores = np.array([[0.0, 1.0], [1.0, 3.0], [2.0, NAN]])
    assert mean_score(scores) == pytest.approx((1 + 2) / 2)
    assert median_score(scores) == pytest.approx((1 + 2) / 2)
    assert interquartile_mean(scores) == pytest.approx((1 + 1 + 2) / 3)  # of 0, 1, 1, 2, 3
    assert optimality_gap(scores) == pytest.approx(1 - (2 / 3 + 1) / 2)
    np.testing.assert_allclose(performance_profile(scores, [0.5, 1.5]), [(2 / 3 + 1) / 2, (1 / 3 + 1 / 2) / 2])
    np.testing.assert_allclose(average_performance_profile(scores, [0.5, 1.5]), [1, 0.5])
    other = np.array([[1.0, 0.0]])
    assert probability_of_improvement(scores, other) == pytest.approx(((0.5 + 1) / 3 + 1) / 2)
    assert probability_of_improvement(other, scores) == pytest.approx(1 - ((0.5 + 1) / 3 + 1) / 2)
    interval = stratified_bootstrap(mean_score, scores)
    assert interval is not None
    assert interval[0] < mean_score(scores) < interval[1]


def test_runs_of_each_task_are_resampled_separately() -> None:
    # If all four scores were resampled together, a sample could consist of ones only.
    low, high = stratified_bootstrap(interquartile_mean, np.array([[0.0, 1.0], [0.0, 1.0]])) or (None, None)
    assert (low, high) == (0.5, 0.5)


def test_whole_runs_are_resampled_together() -> None:
    """A multi-task agent that is good in one task is good in all. The mean score is then as uncertain as one task's."""
    scores = np.repeat(np.array([[0.0], [1.0], [2.0], [3.0]]), 20, axis=1)  # 4 runs, 20 equal tasks
    whole = stratified_bootstrap(mean_score, scores, whole_runs=True)
    separate = stratified_bootstrap(mean_score, scores)
    one_task = stratified_bootstrap(mean_score, scores[:, :1])
    assert whole is not None
    assert separate is not None
    assert one_task is not None
    np.testing.assert_allclose(whole, one_task, atol=0.26)  # the means of four runs are multiples of 1/4
    assert whole[1] - whole[0] > 3 * (separate[1] - separate[0])
    with pytest.raises(ValueError, match="no score"):
        stratified_bootstrap(mean_score, np.array([[1.0, NAN], [2.0, 3.0], [2.0, 3.0]]), whole_runs=True)


def test_one_run_per_task_has_no_interval() -> None:
    assert stratified_bootstrap(interquartile_mean, np.array([[0.3, 0.7, 0.2]])) is None
    assert stratified_bootstrap(mean_score, np.array([[0.3, 0.7], [0.4, NAN]])) is None
    assert stratified_bootstrap(probability_of_improvement, np.ones((3, 2)), np.ones((1, 2))) is None


def test_interval_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).normal(size=(5, 3))
    large = stratified_bootstrap(interquartile_mean, scores, resamples=3_000)
    monkeypatch.setattr("bestiary.evaluation.aggregates.MAX_BLOCK_SIZE", 100)
    small = stratified_bootstrap(interquartile_mean, scores, resamples=3_000)
    assert small is not None
    assert large is not None
    np.testing.assert_allclose(small, large, atol=0.06)


def test_interval_of_20_runs_covers_the_true_mean_at_about_the_stated_rate() -> None:
    rng = np.random.default_rng(3)
    found = [stratified_bootstrap(interquartile_mean, rng.normal(size=(20, 1)), resamples=500) for _ in range(200)]
    assert 0.85 < np.mean([interval is not None and interval[0] <= 0 <= interval[1] for interval in found]) < 0.99
