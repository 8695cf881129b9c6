"""Means with 95 % confidence intervals, and Welch's test with Holm's correction. docs/statistics.md has the formulas.

The interval of a mean is computed with Student's t for fewer than T_INTERVAL_BELOW values, otherwise with a percentile
bootstrap. A single value has no interval. The values are independent repetitions: the games of one agent, or the runs
(seeds) of one configuration. The field `unit` of a summary says what the values are, for example "games" or "seeds".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.95  # confidence level of all intervals
# The percentile bootstrap interval of few values is too narrow. For normally distributed values, it contains the true
# mean in 51 % of cases for n = 2, in 85 % for n = 5 and in 92 % for n = 20 (examples/interval_coverage.py).
T_INTERVAL_BELOW = 20
NUM_RESAMPLES = 2000  # number of bootstrap resamples for an interval

# Names of the methods with which intervals are computed (`Interval.method`).
STUDENT_T = "Student's t"
STUDENT_T_OF_TASKS = "Student's t with Satterthwaite's degrees of freedom"
BOOTSTRAP = f"percentile bootstrap, {NUM_RESAMPLES} resamples"
NO_INTERVAL = "none, because n = 1"
# Text for captions: how `mean_interval` computes the interval of n values.
MEAN_INTERVAL_METHODS = f"Student's t if n < {T_INTERVAL_BELOW}, otherwise percentile bootstrap"


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval, and the method that computed it. Both limits are None if there is no interval."""

    low: float | None
    high: float | None
    method: str


def mean_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the 95 % confidence interval of the mean of independent values."""
    array = np.asarray(values, np.float64)
    if len(array) == 1:
        return Interval(None, None, NO_INTERVAL)
    if len(array) < T_INTERVAL_BELOW:
        half_width = _t_quantile(len(array) - 1) * float(array.std(ddof=1)) / np.sqrt(len(array))
        return Interval(float(array.mean() - half_width), float(array.mean() + half_width), STUDENT_T)
    return bootstrap_interval((array,), lambda x, axis=-1: x.mean(axis))


def interval_over_tasks(scores: Sequence[np.ndarray]) -> Interval:
    """Return the 95 % confidence interval of a mean over K tasks. The value of a task is its mean score.

    `scores` has one array [R] per task: the scores of independent runs. The variances of the tasks may differ, so the
    degrees of freedom are those of Satterthwaite (1946). There is no interval if a task has only one run.
    """
    if any(len(own) < 2 for own in scores):
        return Interval(None, None, NO_INTERVAL)
    mean = float(np.mean([own.mean() for own in scores]))
    variances = np.array([own.var(ddof=1) / len(own) for own in scores])  # variance of each task's mean
    if variances.sum() == 0:
        return Interval(mean, mean, STUDENT_T_OF_TASKS)
    df = _satterthwaite_df(variances, [len(own) for own in scores])
    half_width = _t_quantile(df) * float(np.sqrt(variances.sum())) / len(scores)
    return Interval(mean - half_width, mean + half_width, STUDENT_T_OF_TASKS)


def summarise(values: Sequence[float] | Sequence[int] | np.ndarray, unit: str = "games") -> dict[str, Any]:
    """Return a dict of statistics of values: mean with its 95 % interval, standard deviation, median ...

    `unit` says what the `n` values are, for example games or seeds. `ci_low` and `ci_high` are None if n is 1.
    `interval` is the method of the interval. `distinct` is the number of different values.
    """
    array = np.asarray(values, np.float64)
    interval = mean_interval(array)
    return {
        "n": len(array),
        "unit": unit,
        "mean": float(array.mean()),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "interval": interval.method,
        "sd": float(array.std(ddof=1)) if len(array) > 1 else 0.0,
        "median": float(np.median(array)),
        "min": float(array.min()),
        "max": float(array.max()),
        "distinct": len(np.unique(array)),
    }


def mean_reward_per_step(returns: np.ndarray, lengths: np.ndarray) -> float:
    """Return the total return of all games divided by their total number of steps. Each step has the same weight."""
    return float(returns.sum() / lengths.sum())


def summarise_reward_per_step(returns: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    """Return statistics of the reward per step. The mean is `mean_reward_per_step`.

    The interval of the mean treats games as independent repetitions. Standard deviation, median, minimum and maximum
    are those of the games: each game has one value, its return divided by its number of steps.
    """
    mean = mean_reward_per_step(returns, lengths)
    if len(returns) < T_INTERVAL_BELOW:
        # Delta method for the ratio mean(returns) / mean(lengths). The values below have one entry per game. Their mean
        # is equal to the ratio, and the variance of this mean is approximately the variance of the ratio.
        interval = mean_interval(mean + (returns - mean * lengths) / lengths.mean())
    else:
        interval = bootstrap_interval((returns, lengths), lambda r, n, axis=-1: r.sum(axis) / n.sum(axis))
    summary = summarise(returns / lengths)
    return summary | {"mean": mean, "ci_low": interval.low, "ci_high": interval.high, "interval": interval.method}


def format_interval(summary: Mapping[str, Any], digits: int = 2) -> str:
    """Return the interval of a summary as text, for example "1.20 to 3.40"; "none" if there is no interval."""
    if summary["ci_low"] is None:
        return "none"
    return f"{summary['ci_low']:.{digits}f} to {summary['ci_high']:.{digits}f}"


def describe_interval(unit: str) -> str:
    """Return a caption that explains the column n and the 95 % intervals. `unit` is what n counts, such as "games"."""
    return f"n: number of {unit}; 95 % interval of their mean: {MEAN_INTERVAL_METHODS}; none if n = 1"


# --- comparison of two means ---


def welch_drop_test(before: np.ndarray, after: np.ndarray) -> float:
    """Return the one-sided p-value of Welch's t test of whether the mean of `after` is lower than that of `before`.

    The two samples may have different variances and sizes. The result is nan if the test is not defined: a sample has
    fewer than two values, or both samples are constant.
    """
    if len(before) < 2 or len(after) < 2:
        return float("nan")
    # Estimated variances of the two sample means.
    variances = np.array([before.var(ddof=1) / len(before), after.var(ddof=1) / len(after)])
    if variances.sum() == 0:
        return float("nan")
    t = (before.mean() - after.mean()) / np.sqrt(variances.sum())
    df = _satterthwaite_df(variances, [len(before), len(after)])
    from scipy.special import stdtr  # imported here because training does not need it

    return float(stdtr(df, -t))


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are corrected for the number of tests by the method of Holm (1979).

    Reject a null hypothesis if its corrected p-value is at most alpha. The probability of rejecting at least one true
    null hypothesis is then at most alpha.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted


def _satterthwaite_df(variances: np.ndarray, counts: Sequence[int]) -> float:
    """Return Satterthwaite's degrees of freedom of a sum of independent means.

    `variances[k]` is the variance of mean k. Mean k is computed from `counts[k]` values.
    """
    return float(variances.sum() ** 2 / (variances**2 / (np.array(counts) - 1)).sum())


def _t_quantile(df: float) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `df` degrees of freedom, for a 95 % interval."""
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + LEVEL) / 2))


def bootstrap_interval(samples: tuple[np.ndarray, ...], statistic: Any) -> Interval:
    """Return the percentile bootstrap interval of a statistic of one or more samples.

    All samples have the same length and are resampled with the same indices (paired). `statistic` is called with the
    samples and the argument `axis`.
    """
    if all(len(np.unique(sample)) == 1 for sample in samples):
        value = float(statistic(*samples))
        return Interval(value, value, BOOTSTRAP)
    import scipy.stats  # imported here because it takes a second, and training does not need it

    interval = scipy.stats.bootstrap(
        samples,
        statistic,
        paired=True,
        n_resamples=NUM_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(interval.low), float(interval.high), BOOTSTRAP)
