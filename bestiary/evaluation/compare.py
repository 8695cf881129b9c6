"""Comparison of runs: learning curves, final returns, and scores over tasks, as figures, CSV files and tables."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.evaluation.curve_plots import plot_curves, plot_popart_scales, popart_tasks, true_groups
from bestiary.evaluation.learning_curves import (
    DEFAULT_SMOOTH,
    CurveGroup,
    group_runs,
    note_first_games,
    panels_by_task,
)
from bestiary.evaluation.media import FIGURE_SUFFIXES
from bestiary.evaluation.multitask_scores import (
    ScoreComparison,
    compare_groups,
    plot_profiles,
    score_tables,
    scores_to_csv,
)
from bestiary.evaluation.run_groups import list_names, short_label, unique_runs
from bestiary.evaluation.statistics import describe_interval, format_interval, summarise
from bestiary.runs.run import Run
from bestiary.utils.console import TextTable, note, print_table, warn
from bestiary.utils.errors import UserError


def compare_runs(
    runs: Sequence[Run],
    out: Path,
    *,
    axis: str = "steps",
    by_task: bool = False,
    zoom: tuple[float, float] | None = None,
    smooth: int = DEFAULT_SMOOTH,
    names: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, list[CurveGroup]]:
    """Draw the learning curves of runs in the figure `out`, and print a table of their final returns.

    Runs that differ only in their seed form a group, which is drawn as one curve. `names` are the labels of the groups.
    The groups are in the order of their first runs in `runs`. If `by_task` is True or a run has several tasks, the
    figure has one panel for each task.

    The curves are also written to a CSV file with the same name as the figure. If `smooth` is 0, the figure and the CSV
    file contain single games instead of curves. If a run uses PopArt, a second figure shows PopArt's mu and sigma.

    If there are several groups or tasks, aggregate scores over tasks are printed and written to OUT-scores.csv. If the
    scores can be normalised, OUT-profiles.png shows performance profiles.

    Return {task: groups of runs in the panel of this task}. A single panel for all tasks has the key "".
    """
    runs = unique_runs(runs)
    if out.suffix not in FIGURE_SUFFIXES:
        raise UserError(f"--out {out}: figures are .png, .svg or .pdf files; choose one of these suffixes")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; create it first")
    by_task = by_task or any(len(run.raw_config["env"]) > 1 for run in runs)
    rewards = dict.fromkeys(str(run.raw_config.get("reward", "the environment's own")) for run in runs)
    if len(rewards) > 1:
        warn(
            f"these runs were trained on different rewards ({' / '.join(rewards)}), so their returns are not comparable"
        )
    if by_task:
        panels = panels_by_task(runs, axis=axis, smooth=smooth, names=names)
    else:
        panels = {"": group_runs(runs, axis=axis, smooth=smooth, names=names)}
    for run in runs:
        note_first_games(run)
    comparison = compare_groups(panels)
    paths = _output_paths(out, runs, comparison)
    _check_paths(out, paths, overwrite)
    plot_curves(panels, out, axis, zoom=zoom, x_label="steps of the task" if by_task else "steps", raw=smooth == 0)
    _write_csv(panels, paths["csv"], axis, raw=smooth == 0)
    if "popart" in paths:
        plot_popart_scales(list(runs), paths["popart"])
    print_table(_final_returns_table(panels))
    if comparison is not None:
        for table in score_tables(comparison):
            print_table(table)
        paths["scores"].write_text(scores_to_csv(comparison))
    if comparison is not None and comparison.normalised:
        plot_profiles(comparison, paths["profiles"])
    note(f"written: {' and '.join(map(str, paths.values()))}")
    return panels


def _output_paths(out: Path, runs: Sequence[Run], comparison: ScoreComparison | None) -> dict[str, Path]:
    """Return the paths of all files that will be written, for example {"curves": a.png, "csv": a.csv}."""
    paths = {"curves": out, "csv": out.with_suffix(".csv")}
    if any(popart_tasks(run) for run in runs):
        paths["popart"] = out.with_stem(f"{out.stem}-popart")
    if comparison is not None:
        paths["scores"] = out.with_name(f"{out.stem}-scores.csv")
    if comparison is not None and comparison.normalised:
        paths["profiles"] = out.with_stem(f"{out.stem}-profiles")
    return paths


def _check_paths(out: Path, paths: Mapping[str, Path], overwrite: bool) -> None:
    """Raise UserError if an output file exists and `overwrite` is False."""
    existing = [str(path) for path in paths.values() if os.path.lexists(path)]
    if existing and not overwrite:
        raise UserError(f"--out {out}: {' and '.join(existing)} exist; choose another name or add --overwrite")


# --- CSV file of the curves ---


def _write_csv(panels: Mapping[str, Sequence[CurveGroup]], path: Path, axis: str, raw: bool) -> None:
    """Write a CSV file with one row per point of each curve or, if `raw` is True, one row per game."""
    task_column = [] if "" in panels else ["task"]
    has_true = any(map(true_groups, panels.values()))
    make_rows = _game_rows if raw else _curve_rows
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        for number, (task, groups) in enumerate(panels.items()):
            header, rows = make_rows(groups, axis, has_true)
            if number == 0:
                writer.writerow([*task_column, *header])
            writer.writerows([*([task] if task_column else []), *row] for row in rows)


def _curve_rows(groups: Sequence[CurveGroup], axis: str, has_true: bool) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the CSV file.

    There is one row per point of each curve, with the mean, lowest and highest return over the seeds.
    """
    limits = ("mean", "lowest", "highest")
    header = ["group", axis, *limits, "seeds", "smooth", *(f"true_{name}" for name in limits if has_true)]
    rows = []
    for group in groups:
        columns = [group.x, *(getattr(group, name) for name in limits)]
        true_columns = [getattr(group.true_group, name) for name in limits] if group.true_group is not None else []
        for k, seeds in enumerate(group.seeds):
            row = [group.label, *(f"{column[k]:.6g}" for column in columns), seeds, group.smooth]
            true_values = [f"{column[k]:.6g}" for column in true_columns] or [""] * 3
            rows.append([*row, *(true_values if has_true else [])])
    return header, rows


def _game_rows(groups: Sequence[CurveGroup], axis: str, has_true: bool) -> tuple[list[str], list[list[Any]]]:
    """Return the header and the rows of the CSV file: one row per game."""
    rows = []
    for group in groups:
        true_games = group.true_group.games if group.true_group is not None else [(None, None)] * len(group.runs)
        for run, (positions, returns), (_, true_returns) in zip(group.runs, group.games, true_games, strict=True):
            for k, position in enumerate(positions):
                true_value = "" if true_returns is None else f"{true_returns[k]:.6g}"
                values = [f"{position:.8g}", f"{returns[k]:.6g}", *([true_value] if has_true else [])]
                rows.append([group.label, run.name, run.raw_config["seed"], *values])
    return ["group", "run", "seed", axis, "return", *(["true_return"] if has_true else [])], rows


# --- table ---


def _final_returns_table(panels: Mapping[str, Sequence[CurveGroup]]) -> TextTable:
    """Return the table of final returns, with one row for each task and group of runs."""
    has_tasks = "" not in panels
    has_true = any(map(true_groups, panels.values()))
    header = [
        *(["task"] if has_tasks else []),
        "group",
        "run names",
        "seeds",
        "mean",
        "95% interval",
        "lowest",
        "highest",
    ]
    header += ["true return"] if has_true else []
    rows = []
    for task, groups in panels.items():
        for group in groups:
            summary = summarise(group.final_returns(), "seeds")
            cells = [task] if has_tasks else []
            cells += [group.label if group.is_named else short_label(group.label), list_names(group.runs)]
            cells += [f"{summary['n']}", f"{summary['mean']:.2f}", format_interval(summary)]
            cells += [f"{summary['min']:.2f}", f"{summary['max']:.2f}"]
            if has_true:
                true_group = group.true_group
                cells.append(f"{np.mean(true_group.final_returns()):.2f}" if true_group is not None else "")
            rows.append(cells)
    return TextTable(
        "mean return of the games in the last tenth of training", header, rows, [describe_interval("seeds")]
    )
