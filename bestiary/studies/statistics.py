"""How good a variant is, from few runs: the interquartile mean and its interval, as rliable defines them.

R. Agarwal and others, "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021. Scores come as one array
an environment, each with a score a run.
"""

from collections.abc import Sequence

import numpy as np
import scipy.stats

Scores = Sequence[np.ndarray]  # one array [R] an environment


def iqm(scores: Scores) -> float:
    """The mean of the middle half of all scores. Of fewer than four scores nothing is cut: it is their mean."""
    return float(scipy.stats.trim_mean(np.concatenate(scores), 0.25))


def interval(scores: Scores, resamples: int = 10_000) -> tuple[float, float]:
    """95 % of the interquartile means of studies like this one: the runs of each environment drawn anew, with replacement."""
    rng = np.random.default_rng(0)
    drawn = [runs[rng.integers(0, len(runs), (resamples, len(runs)))] for runs in scores]  # each [resamples,R]
    low, high = np.percentile(scipy.stats.trim_mean(np.concatenate(drawn, axis=1), 0.25, axis=1), [2.5, 97.5])
    return float(low), float(high)
