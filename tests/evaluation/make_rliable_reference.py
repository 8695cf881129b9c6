"""Compute the statistics of random score matrices with rliable, and write them to rliable_reference.json.

    python -m venv /tmp/rliable && /tmp/rliable/bin/pip install rliable 'pandas<3' numpy==2.4.6 scipy==1.17.1
    /tmp/rliable/bin/python tests/evaluation/make_rliable_reference.py

The file records the versions of the packages. rliable is archived: it needs arch < 8, whose import fails with pandas 3.
The tests therefore use the file and do not import rliable. The script takes about five minutes.
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np

PATH = Path(__file__).with_name("rliable_reference.json")
PACKAGES = ("rliable", "arch", "pandas", "numpy", "scipy")
RESAMPLES = 4_000
THRESHOLDS = [0.0, 0.25, 0.5, 1.0, 2.0]
SHAPES = [(3, 1), (2, 4), (5, 3), (10, 6), (4, 26)]  # runs, tasks


def make_matrices(rng: np.random.Generator, runs: int, tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random scores of two agents X and Y in the same tasks. Some scores are equal (ties)."""
    level = rng.exponential(size=tasks)
    x = level + 0.5 * rng.normal(size=(runs, tasks))
    y = 0.8 * level + 0.5 * rng.normal(size=(runs + 1, tasks))
    return x.round(1), y.round(1)


def point_estimates(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Return rliable's statistics of X, and of X against Y."""
    from rliable import library, metrics

    return {
        "mean": float(metrics.aggregate_mean(x)),
        "median": float(metrics.aggregate_median(x)),
        "iqm": float(metrics.aggregate_iqm(x)),
        "optimality_gap": float(metrics.aggregate_optimality_gap(x)),
        "optimality_gap_half": float(metrics.aggregate_optimality_gap(x, gamma=0.5)),
        "improvement": float(metrics.probability_of_improvement(x, y)),
        "profile": library.score_distributions(x, THRESHOLDS).tolist(),
        "average_profile": library.average_score_distributions(x, THRESHOLDS).tolist(),
    }


def interval_estimates(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Return rliable's 95 % intervals, each as [low, high]."""
    from rliable import library, metrics

    np.random.seed(0)  # noqa: NPY002, because rliable draws from the global generator

    def interval(function: Any, scores: Any) -> Any:
        _, found = library.get_interval_estimates({"x": scores}, function, reps=RESAMPLES)
        return found["x"]

    aggregates = interval(
        lambda s: np.array([metrics.aggregate_iqm(s), metrics.aggregate_mean(s), metrics.aggregate_optimality_gap(s)]),
        x,
    )
    improvement = interval(lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), [x, y])
    profile = interval(lambda s: library.score_distributions(s, THRESHOLDS), x)
    return {
        "iqm": aggregates[:, 0].tolist(),
        "mean": aggregates[:, 1].tolist(),
        "optimality_gap": aggregates[:, 2].tolist(),
        "improvement": improvement[:, 0].tolist(),
        "profile": profile.tolist(),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for shape in SHAPES:
        x, y = make_matrices(rng, *shape)
        cases.append({"x": x.tolist(), "y": y.tolist(), "points": point_estimates(x, y)})
        cases[-1]["intervals"] = interval_estimates(x, y)
    content = {
        "command": "python tests/evaluation/make_rliable_reference.py",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "resamples": RESAMPLES,
        "thresholds": THRESHOLDS,
        "cases": cases,
    }
    PATH.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
