"""Scores of groups of runs over several tasks: aggregate scores, probability of improvement, performance profiles.

The command `bestiary compare` and reports of studies use this module. aggregates.py computes the statistics, and
docs/statistics.md explains them.
"""

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.envs import lookup_score_range
from bestiary.envs.episode_stats import short_name
from bestiary.evaluation.aggregates import (
    STRATIFIED_BOOTSTRAP,
    WHOLE_RUN_BOOTSTRAP,
    interquartile_mean,
    mean_score,
    median_score,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)
from bestiary.evaluation.figure_helpers import import_pyplot, save_figure
from bestiary.evaluation.learning_curves import CurveGroup
from bestiary.evaluation.run_groups import short_label
from bestiary.evaluation.statistics import NO_INTERVAL, format_interval
from bestiary.utils.console import TextTable

AGGREGATES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "IQM": interquartile_mean,
    "median": median_score,
    "mean": mean_score,
    "optimality gap": optimality_gap,
}
NUM_THRESHOLDS = 101  # number of thresholds of a performance profile
MIN_SEEDS = 10  # with fewer seeds per task, bootstrap intervals are clearly too narrow (examples/interval_coverage.py)
PROFILE = "performance profile"
COLUMNS = "statistic group other_group threshold value ci_low ci_high tasks seeds interval".split()


@dataclass(frozen=True)
class ScoreMatrix:
    """The scores of one group of runs: R runs (seeds) in each of K tasks."""

    label: str
    tasks: tuple[str, ...]
    scores: np.ndarray  # [R,K]; nan if a task has fewer than R runs
    whole_runs: bool = False  # True: each row is one multi-task run; see `stratified_bootstrap`

    @property
    def seeds(self) -> str:
        """The number of runs per task, as text: "3", or "2 to 3" if it differs between tasks."""
        counts = np.isfinite(self.scores).sum(axis=0)
        return f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"

    @property
    def bootstrap(self) -> str:
        """The method with which the confidence intervals of this group are computed."""
        if (np.isfinite(self.scores).sum(axis=0) < 2).any():
            return NO_INTERVAL
        return WHOLE_RUN_BOOTSTRAP if self.whole_runs else STRATIFIED_BOOTSTRAP


@dataclass(frozen=True)
class ScoreComparison:
    """Scores of several groups in the same tasks."""

    raw: list[ScoreMatrix]  # returns, from which the probability of improvement is computed
    normalised: list[ScoreMatrix]  # normalised returns; empty if fewer than two tasks can be normalised
    scale: str = ""  # what the normalised scores 0 and 1 mean

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """All statistics: one dict with the keys COLUMNS for each row of the CSV file."""
        records = []
        for matrix in self.normalised:
            records += [_record(name, function, matrix) for name, function in AGGREGATES.items()]
        for x, y in itertools.combinations(self.raw, 2):
            records.append(_record("probability of improvement", probability_of_improvement, x, y))
        for matrix in self.normalised:
            records += _profile_records(matrix, self.thresholds)
        return records

    @property
    def thresholds(self) -> np.ndarray:
        """The positions on the x axis of performance profiles. They cover all normalised scores."""
        values = np.concatenate([matrix.scores.ravel() for matrix in self.normalised])
        return np.linspace(min(0.0, float(np.nanmin(values))), max(1.0, float(np.nanmax(values))), NUM_THRESHOLDS)


def pad_columns(columns: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    """Return a score matrix [R,K] of K columns, which may have different lengths. Missing scores are nan."""
    matrix = np.full((max(map(len, columns)), len(columns)), np.nan)
    for task, column in enumerate(columns):
        matrix[: len(column), task] = column
    return matrix


def compare_groups(panels: Mapping[str, Sequence[CurveGroup]]) -> ScoreComparison | None:
    """Compare groups of runs by the final returns of the runs.

    `panels` maps each task to the groups that have runs of this task. Groups that do not have all tasks are left out.
    If all runs have the same single task, its key may be "" instead of its name.

    Return None if a comparison is not possible:
    - The runs have different training rewards.
    - The key "" is used and the runs have different environments.
    - There is only one group, and fewer than two tasks have normalised scores.
    """
    runs = [run for groups in panels.values() for group in groups for run in group.runs]
    envs = {tuple(run.raw_config["env"]) for run in runs}
    rewards = {run.raw_config.get("reward") for run in runs}
    if len(rewards) > 1 or ("" in panels and len(envs) > 1):
        return None
    tasks = tuple(next(iter(envs)) if "" in panels else panels)
    by_label: dict[str, list[CurveGroup]] = {}
    for groups in panels.values():
        for group in groups:
            by_label.setdefault(group.label, []).append(group)
    raw = [
        ScoreMatrix(label, tasks, pad_columns([group.final_returns() for group in groups]), _are_multi_task(groups))
        for label, groups in by_label.items()
        if len(groups) == len(tasks)
    ]
    own_reward = rewards == {None}  # the score ranges apply only to the environment's own reward
    ranges = {task: r for task in tasks if own_reward and (r := lookup_score_range(task)) is not None}
    comparison = make_comparison(
        raw,
        {task: (r.low, r.high) for task, r in ranges.items()},
        " / ".join(dict.fromkeys(r.meaning for r in ranges.values())),
    )
    return comparison if len(raw) > 1 or comparison.normalised else None


def _are_multi_task(groups: Sequence[CurveGroup]) -> bool:
    """Return whether each row of the score matrix is one multi-task run.

    `groups` has one group for each task. The rows are multi-task runs if all these groups have the same runs.
    """
    first = [run.path for run in groups[0].runs]
    return len(groups) > 1 and all([run.path for run in group.runs] == first for group in groups)


def make_comparison(
    raw: list[ScoreMatrix], ranges: Mapping[str, tuple[float, float]], scale: str = ""
) -> ScoreComparison:
    """Return the comparison of groups, with normalised scores if at least two tasks are in `ranges`.

    `ranges` maps a task to two returns: the first is normalised to the score 0, the second to the score 1.
    """
    normalised = []
    for matrix in raw:
        columns = [k for k, task in enumerate(matrix.tasks) if task in ranges]
        if len(columns) > 1:
            tasks = tuple(matrix.tasks[k] for k in columns)
            low, high = np.array([ranges[task] for task in tasks]).T
            scores = (matrix.scores[:, columns] - low) / (high - low)
            normalised.append(ScoreMatrix(matrix.label, tasks, scores, matrix.whole_runs))
    return ScoreComparison(raw, normalised, scale)


# --- records ---


def _record(name: str, function: Callable[..., np.ndarray], *matrices: ScoreMatrix) -> dict[str, Any]:
    """Return one row of the CSV file: a statistic of one group, or a statistic that compares two groups."""
    x = matrices[0]
    scores = [matrix.scores for matrix in matrices]
    interval = stratified_bootstrap(function, *scores, whole_runs=[matrix.whole_runs for matrix in matrices])
    return {
        "statistic": name,
        "group": x.label,
        "other_group": matrices[1].label if len(matrices) > 1 else "",
        "threshold": "",
        "value": float(function(*scores)),
        "ci_low": None if interval is None else float(interval[0]),
        "ci_high": None if interval is None else float(interval[1]),
        "tasks": len(x.tasks),
        "seeds": " / ".join(matrix.seeds for matrix in matrices),
        "interval": NO_INTERVAL if interval is None else _join({matrix.bootstrap for matrix in matrices}),
    }


def _profile_records(matrix: ScoreMatrix, thresholds: np.ndarray) -> list[dict[str, Any]]:
    """Return the rows of the CSV file for the performance profile of a group: one row per threshold."""
    function = partial(performance_profile, thresholds=thresholds)
    interval = stratified_bootstrap(function, matrix.scores, whole_runs=[matrix.whole_runs])
    low, high = (itertools.repeat(None),) * 2 if interval is None else (interval[0].tolist(), interval[1].tolist())
    values = function(matrix.scores).tolist()
    return [
        {
            "statistic": PROFILE,
            "group": matrix.label,
            "other_group": "",
            "threshold": threshold,
            "value": value,
            "ci_low": ci_low,
            "ci_high": ci_high,
            "tasks": len(matrix.tasks),
            "seeds": matrix.seeds,
            "interval": matrix.bootstrap,
        }
        for threshold, value, ci_low, ci_high in zip(thresholds.tolist(), values, low, high, strict=False)
    ]


def _join(texts: Iterable[str]) -> str:
    return " / ".join(sorted(set(texts)))


def scores_to_csv(comparison: ScoreComparison) -> str:
    """Return all statistics as the text of a CSV file with the columns COLUMNS."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in comparison.records:
        numbers = {k: f"{v:.6g}" for k, v in record.items() if isinstance(v, float)}
        writer.writerow({**record, **numbers})
    return text.getvalue()


# --- tables ---


def score_tables(comparison: ScoreComparison) -> list[TextTable]:
    """Return the tables of aggregate scores and of probabilities of improvement. A table without values is left out."""
    records = comparison.records
    tables = []
    if comparison.normalised:
        tables.append(_aggregate_table(comparison, records))
    pairs = [record for record in records if record["other_group"]]
    if pairs:
        tables.append(_improvement_table(comparison, pairs))
    return tables


def _aggregate_table(comparison: ScoreComparison, records: Sequence[dict[str, Any]]) -> TextTable:
    rows = []
    for matrix in comparison.normalised:
        own = {r["statistic"]: r for r in records if r["group"] == matrix.label and not r["other_group"]}
        cells = [f"{own[name]['value']:.2f} ({format_interval(own[name])})" for name in AGGREGATES]
        rows.append([short_label(matrix.label), matrix.seeds, *cells])
    tasks = comparison.normalised[0].tasks
    all_tasks = comparison.raw[0].tasks
    left_out = [short_name(task) for task in all_tasks if task not in tasks]
    captions = [f"scores: normalised final returns ({comparison.scale or 'scale of the study file'})"]
    if left_out:
        captions.append(f"tasks without a known score range are left out: {', '.join(left_out)}")
    methods = _join(matrix.bootstrap for matrix in comparison.normalised)
    captions.append(f"seeds: runs per task; in brackets: 95 % interval over seeds ({methods})")
    captions += _warn_of_few_seeds(comparison.normalised)
    return TextTable(f"scores over {len(tasks)} tasks", ["group", "seeds", *AGGREGATES], rows, captions)


def _warn_of_few_seeds(matrices: Sequence[ScoreMatrix]) -> list[str]:
    """Return [caption] if a group has so few seeds that its bootstrap intervals are too narrow, otherwise []."""
    with_interval = [matrix for matrix in matrices if matrix.bootstrap != NO_INTERVAL]
    if not any((np.isfinite(matrix.scores).sum(axis=0) < MIN_SEEDS).any() for matrix in with_interval):
        return []
    return [f"fewer than {MIN_SEEDS} seeds per task: these intervals are too narrow (see docs/statistics.md)"]


def _improvement_table(comparison: ScoreComparison, pairs: Sequence[dict[str, Any]]) -> TextTable:
    rows = [
        [
            short_label(record["group"]),
            short_label(record["other_group"]),
            f"{record['value']:.2f}",
            format_interval(record),
            str(record["tasks"]),
            record["seeds"],
        ]
        for record in pairs
    ]
    methods = _join(record["interval"] for record in pairs)
    captions = [
        "probability that a run of X has a higher final return than a run of Y, averaged over tasks",
        f"95% interval: over seeds ({methods})",
    ]
    if any(record["ci_low"] is not None for record in pairs):
        captions += _warn_of_few_seeds(comparison.raw)
    return TextTable(
        "probability of improvement",
        ["X", "Y", "P(X > Y)", "95% interval", "tasks", "seeds of X / Y"],
        rows,
        captions,
    )


# --- figure ---


def plot_profiles(comparison: ScoreComparison, path: Path) -> None:
    """Draw the performance profile of each group: the fraction of runs whose score is above a threshold."""
    plt = import_pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    lines = []
    for k, matrix in enumerate(comparison.normalised):
        own = [r for r in comparison.records if r["statistic"] == PROFILE and r["group"] == matrix.label]
        # With one run per task, there is no interval: both limits are None and become nan, so no band is drawn.
        keys = ("threshold", "value", "ci_low", "ci_high")
        thresholds, values, low, high = (np.array([record[key] for record in own], float) for key in keys)
        seeds = "1 seed" if matrix.seeds == "1" else f"{matrix.seeds} seeds"
        legend = f"{short_label(matrix.label)} ({seeds} per task)"
        lines += axes.plot(thresholds, values, color=f"C{k}", linewidth=1.6, label=legend)
        axes.fill_between(thresholds, low, high, color=f"C{k}", alpha=0.2, linewidth=0)
    axes.set_xlabel("normalised score τ")
    axes.set_ylabel("fraction of runs with score > τ")
    axes.set_ylim(-0.02, 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    tasks = len(comparison.normalised[0].tasks)
    methods = _join(matrix.bootstrap for matrix in comparison.normalised)
    caption = f"Performance profiles over {tasks} tasks; scores: {comparison.scale or 'scale of the study file'}.\n"
    caption += f"Bands: pointwise 95 % intervals over seeds ({methods})."
    save_figure(plt, figure, path, legend=lines, caption=caption)
