"""Measure how often 95 % intervals contain the true value, and how often a reward audit finds drops that do not exist.

    python examples/interval_coverage.py

All values are drawn from a normal distribution. There are three tables:

1. Intervals of the mean of n values, computed with Student's t (Bestiary uses it for n < 20) and with the percentile
   bootstrap.
2. Intervals of the mean and the interquartile mean (IQM) over K tasks with R runs each, computed with the stratified
   bootstrap.
3. How often the reward audit finds a significant drop of the true return in random curves without a trend.
"""

import numpy as np

from bestiary.evaluation.aggregates import interquartile_mean, mean_score, stratified_bootstrap
from bestiary.evaluation.statistics import BOOTSTRAP, STUDENT_T, bootstrap_interval, mean_interval
from bestiary.reward_audit.curves import CurvePoint, find_true_return_drop


def coverage_of_means(rng: np.random.Generator) -> None:
    print("mean of n values: coverage of Student's t and of the percentile bootstrap (2,000 samples each)")
    for n in (2, 3, 5, 10, 20, 50):
        samples = rng.normal(size=(2_000, n))
        boots = [bootstrap_interval((sample,), lambda x, axis=-1: x.mean(axis)) for sample in samples]
        bootstrap = np.mean([b.low <= 0 <= b.high for b in boots if b.low is not None and b.high is not None])
        used = [mean_interval(sample) for sample in samples]
        covered = np.mean([i.low <= 0 <= i.high for i in used if i.low is not None and i.high is not None])
        method = {STUDENT_T: "Student's t", BOOTSTRAP: "bootstrap"}[used[0].method]
        print(f"  n = {n:2d}: used ({method}) {covered:.1%}, percentile bootstrap {bootstrap:.1%}")


def coverage_of_aggregates(rng: np.random.Generator) -> None:
    print("R runs in each of K tasks: coverage of the stratified bootstrap for the mean and the IQM (500 samples each)")
    for runs in (2, 3, 5, 10, 20):
        texts = []
        for tasks in (1, 6, 26):
            covered = np.zeros(2)
            for _ in range(500):
                scores = rng.normal(size=(runs, tasks))
                for k, statistic in enumerate((mean_score, interquartile_mean)):
                    interval = stratified_bootstrap(statistic, scores, resamples=500)
                    covered[k] += interval is not None and interval[0] <= 0 <= interval[1]
            texts.append(f"K = {tasks}: {covered[0] / 500:.0%}, {covered[1] / 500:.0%}")
        print(f"  R = {runs:2d}: {'; '.join(texts)}")


def marked_curves(rng: np.random.Generator) -> None:
    print("constant curves in which a drop of the true return is found (1,000 curves each)")
    for seeds in (2, 3, 5):
        texts = []
        for points in (5, 10, 30):
            marked = 0
            for _ in range(1_000):
                returns = rng.normal(size=(points, 2, seeds))
                curve = [CurvePoint(x, training, true) for x, (training, true) in enumerate(returns)]
                marked += find_true_return_drop(curve) is not None
            texts.append(f"{points} points {marked / 1_000:.1%}")
        print(f"  {seeds} seeds: {', '.join(texts)}")


if __name__ == "__main__":
    generator = np.random.default_rng(0)
    coverage_of_means(generator)
    coverage_of_aggregates(generator)
    marked_curves(generator)
