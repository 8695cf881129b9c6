"""Aggregate statistics over tasks and runs, as in rliable (R. Agarwal et al., "Deep reinforcement learning at the edge
of the statistical precipice", 2021), and their stratified bootstrap intervals.

All functions take score matrices of shape [R,K]: the scores of R runs in each of K tasks. A missing score is nan; each
task needs at least one score. All tasks must have the same scale of scores, for example normalised scores. Only
`probability_of_improvement` also accepts tasks with different scales.

Each statistic also accepts an array [...,R,K] of many matrices and returns one result per matrix. In this way, the
bootstrap computes a statistic for many resamples at once.

    scores = np.array([[0.9, 0.4], [1.1, 0.6], [1.0, 0.2]])     # three runs, two tasks
    interquartile_mean(scores), stratified_bootstrap(interquartile_mean, scores)
"""

from collections.abc import Callable, Sequence

import numpy as np

from bestiary.evaluation.statistics import LEVEL

NUM_RESAMPLES = 2000  # number of bootstrap resamples for an interval
STRATIFIED_BOOTSTRAP = f"stratified percentile bootstrap, {NUM_RESAMPLES} resamples"
WHOLE_RUN_BOOTSTRAP = f"percentile bootstrap of whole runs, {NUM_RESAMPLES} resamples"
MAX_BLOCK_SIZE = 2**21  # approximate maximum number of resampled scores that the bootstrap holds in memory at once


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half of all scores: [...,R,K] (R runs, K tasks) -> [...].

    The scores are sorted, and a quarter of the scores, rounded down, is removed at each end. If there are fewer than
    four scores, none is removed.
    """
    ranked = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # nan is sorted to the end
    count = np.isfinite(ranked).sum(axis=-1, keepdims=True)
    cut = count // 4
    position = np.arange(ranked.shape[-1])
    kept = (position >= cut) & (position < count - cut)
    return np.where(kept, ranked, 0.0).sum(axis=-1) / kept.sum(axis=-1)


def mean_score(scores: np.ndarray) -> np.ndarray:
    """Return the mean over tasks of each task's mean over runs: [...,R,K] (R runs, K tasks) -> [...]."""
    return np.nanmean(scores, axis=-2).mean(axis=-1)


def median_score(scores: np.ndarray) -> np.ndarray:
    """Return the median over tasks of each task's mean over runs: [...,R,K] (R runs, K tasks) -> [...]."""
    return np.median(np.nanmean(scores, axis=-2), axis=-1)


def optimality_gap(scores: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """Return gamma minus the mean of min(score, gamma): [...,R,K] (R runs, K tasks) -> [...].

    The gap is 0 if all scores are at least gamma.
    """
    return gamma - mean_score(np.minimum(scores, gamma))


def performance_profile(scores: np.ndarray, thresholds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return, for each of T thresholds, the fraction of runs whose score is above it: [...,R,K] -> [...,T].

    The fraction is computed separately for each task, and then averaged over tasks.
    """
    runs = np.isfinite(scores).sum(axis=-2)  # [...,K]
    # The loop saves memory: comparing with all thresholds at once would need an array [...,R,K,T]. A comparison with
    # nan is False, so missing runs are not counted.
    fractions = [((scores > threshold).sum(axis=-2) / runs).mean(axis=-1) for threshold in thresholds]
    return np.stack(fractions, axis=-1)


def average_performance_profile(scores: np.ndarray, thresholds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return, for each of T thresholds, the fraction of tasks whose mean score is above it: [...,R,K] -> [...,T]."""
    return (np.nanmean(scores, axis=-2)[..., None] > np.asarray(thresholds)).mean(axis=-2)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the probability that a run of `x` has a higher score than a run of `y`, averaged over tasks.

    The score matrices `x` and `y` have the same tasks, but may have different numbers of runs. Equal scores count as
    one half (Mann-Whitney U). Shapes: [...,Rx,K] and [...,Ry,K] -> [...].
    """
    pairs = x[..., :, None, :], y[..., None, :, :]  # [...,Rx,Ry,K]
    wins = (pairs[0] > pairs[1]).sum(axis=(-3, -2)) + 0.5 * (pairs[0] == pairs[1]).sum(axis=(-3, -2))
    counts = np.isfinite(x).sum(axis=-2) * np.isfinite(y).sum(axis=-2)
    return (wins / counts).mean(axis=-1)


def stratified_bootstrap(
    statistic: Callable[..., np.ndarray],
    *matrices: np.ndarray,
    whole_runs: bool | Sequence[bool] = False,
    resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the lower and the upper limit of the 95 % percentile bootstrap interval of `statistic(*matrices)`.

    Runs are resampled with replacement, separately for each task and each matrix (stratified). If `whole_runs` is True,
    whole rows of a matrix are resampled instead, and no score may be missing. Use `whole_runs` if each row is one
    multi-task agent: the scores of one agent in different tasks are not independent. `whole_runs` may also be a
    sequence with one value per matrix.

    Return None if a task has only one run: one run does not show how much the scores of runs vary.
    """
    if any((np.isfinite(scores).sum(axis=0) < 2).any() for scores in matrices):
        return None
    by_row = [whole_runs] * len(matrices) if isinstance(whole_runs, bool) else whole_runs
    for scores, rows in zip(matrices, by_row, strict=True):
        if rows and np.isnan(scores).any():
            raise ValueError("whole_runs: a run has no score in one of the tasks")
    rng = np.random.default_rng(seed)
    block = max(1, MAX_BLOCK_SIZE // sum(scores.size for scores in matrices))
    values: list[np.ndarray] = []
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        values.append(statistic(*(_resample(s, size, rows, rng) for s, rows in zip(matrices, by_row, strict=True))))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(np.concatenate(values), [tail, 100 - tail], axis=0)
    return low, high


def _resample(scores: np.ndarray, count: int, whole_runs: bool, rng: np.random.Generator) -> np.ndarray:
    """Return `count` resamples of a score matrix [R,K], as an array [count,R,K]."""
    if whole_runs:
        return scores[rng.integers(0, len(scores), (count, len(scores)))]
    resampled = np.full((count, *scores.shape), np.nan)
    for task, column in enumerate(scores.T):
        present = column[np.isfinite(column)]
        resampled[:, : len(present), task] = present[rng.integers(0, len(present), (count, len(present)))]
    return resampled
