"""Figures of learning curves, of PopArt's mu and sigma, and of the results of several evaluated checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.evaluation.figure_helpers import format_axes, import_pyplot, panel_grid, save_figure
from bestiary.evaluation.learning_curves import GAME_TRUE_RETURN, CurveGroup
from bestiary.evaluation.results import TaskResult
from bestiary.evaluation.statistics import T_INTERVAL_BELOW
from bestiary.runs.run import Run


def plot_curves(
    panels: dict[str, list[CurveGroup]],
    out: Path,
    axis: str = "steps",
    flat: Sequence[str] = (),
    zoom: tuple[float, float] | None = None,
    x_label: str = "steps",
    raw: bool = False,
    published: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draw one panel for each task, with a line and a band for each group of runs. A caption explains lines and bands.

    If runs have a true reward (`--true-reward`), a second panel of the task shows their true returns. A group whose
    label is in `flat` is drawn as a horizontal dashed line at its final return, without a curve. If `zoom` is (low,
    high), each panel is followed by a second panel, which shows only the part of the x axis from low to high. If `raw`
    is True, the panels show one point per game instead of lines and bands. `published` has published curves, which are
    dotted: {label of a group: points (steps, return)}.
    """
    plt = import_pyplot()
    with_true = [(task, own) for task, groups in panels.items() for own in (groups, true_groups(groups)) if own]
    windows = [None, zoom] if zoom else [None]
    cells = [(task, groups, window) for task, groups in with_true for window in windows]
    figure, all_axes = panel_grid(plt, cells)
    all_groups = [group for groups in panels.values() for group in groups]
    colours = {label: f"C{k}" for k, label in enumerate(dict.fromkeys(group.label for group in all_groups))}
    lines: dict[str, Any] = {}
    for axes, (task, groups, window) in zip(all_axes, cells, strict=True):
        for group in groups:
            if group.label in flat:
                final = np.mean(group.final_returns())
                line = axes.axhline(final, color=colours[group.label], linewidth=1.4, linestyle="--")
            elif raw:
                line = _draw_games(axes, group, colours[group.label], window)
            else:
                line = _draw_curve(axes, group, colours[group.label], window)
            if group.label not in lines:
                line.set_label(group.legend)
                lines[group.label] = line
        for label, points in (published or {}).items():
            x, y = np.array(points).T
            shown = np.full(len(x), True) if window is None else (x >= window[0]) & (x <= window[1])
            (line,) = axes.plot(x[shown], y[shown], ":.", color=colours.get(label, "gray"), linewidth=1.4)
            lines.setdefault(f"{label}, published", line).set_label(f"{label}, published")
        format_axes(axes, task, x_label if axis == "steps" else "minutes", axis == "steps")
        axes.set_ylabel(f"{_return_kind(groups)} of a game")
    caption = curve_caption(all_groups[0].smooth, bool(flat), raw)
    save_figure(plt, figure, out, legend=list(lines.values()), caption=caption)


def _draw_curve(axes: Any, group: CurveGroup, colour: str, window: tuple[float, float] | None) -> Any:
    """Draw the mean curve of a group and the band from its lowest to its highest run, and return the line.

    Only points whose x is inside `window` are drawn; None: all points.
    """
    shown = np.isfinite(group.mean)
    if window is not None:
        shown &= (group.x >= window[0]) & (group.x <= window[1])
    x = group.x[shown]
    marker = "o" if len(np.unique(x)) == 1 else None  # a line through one point is invisible
    (line,) = axes.plot(x, group.mean[shown], color=colour, linewidth=1.6, marker=marker)
    axes.fill_between(x, group.lowest[shown], group.highest[shown], color=colour, alpha=0.2, linewidth=0)
    return line


def _draw_games(axes: Any, group: CurveGroup, colour: str, window: tuple[float, float] | None) -> Any:
    """Draw one point for each game of a group, and return the points. `window` is as in `_draw_curve`."""
    x, y = (np.concatenate(arrays) for arrays in zip(*group.games, strict=True))
    shown = np.ones(len(x), bool) if window is None else (x >= window[0]) & (x <= window[1])
    (points,) = axes.plot(x[shown], y[shown], ".", color=colour, markersize=3, alpha=0.4, rasterized=True)
    return points


def curve_caption(smooth: int, has_dashed: bool = False, raw: bool = False) -> str:
    """Return the caption of a figure of learning curves: what lines and bands mean, and how they are smoothed."""
    if raw:
        text = "Each point is one game, at the step at which it ended."
    else:
        recent = "its last game" if smooth == 1 else f"the mean of its last {smooth} games"
        text = (
            f"Lines: mean over seeds. At each point, the return of a seed is {recent}, or "
            "of all games since the\nprevious point if these are more. Bands: lowest to highest return over seeds."
        )
    return f"{text} Dashed lines: final return." if has_dashed else text


def true_groups(groups: Sequence[CurveGroup]) -> list[CurveGroup]:
    """Return, for each group with a true reward, the curves of its true returns.

    If a group has several true rewards, the curves show the first true reward.
    """
    return [group.true_group for group in groups if group.true_group is not None]


def _return_kind(groups: Sequence[CurveGroup]) -> str:
    """Return the label of the y axis.

    It is "true return" for curves of true returns. For other curves, it is "training return" if there is a true reward,
    otherwise "return".
    """
    if groups[0].column == GAME_TRUE_RETURN:
        return "true return"
    return "training return" if true_groups(groups) else "return"


def plot_popart_scales(runs: list[Run], out: Path) -> None:
    """Draw one panel per task with PopArt's statistics of each run: mu as a line, and mu ± sigma as a band."""
    plt = import_pyplot()
    tasks = list(dict.fromkeys(task for run in runs for task in popart_tasks(run)))
    figure, all_axes = panel_grid(plt, tasks)
    lines: dict[str, Any] = {}
    for axes, task in zip(all_axes, tasks, strict=True):
        for k, run in enumerate(runs):
            if task not in popart_tasks(run):
                continue
            metrics = run.metrics
            mu = metrics[f"{task}/mu"]
            sigma = metrics[f"{task}/sigma"]
            x = metrics["step"] / len(run.raw_config["env"])
            (line,) = axes.plot(x, mu, f"C{k}{'o' if len(x) == 1 else '-'}", label=run.name, linewidth=1.4)
            lines.setdefault(run.name, line)
            axes.fill_between(x, mu - sigma, mu + sigma, color=f"C{k}", alpha=0.2, linewidth=0)
        format_axes(axes, task, "steps of the task", steps=True)
        axes.set_ylabel("mu ± sigma")
    save_figure(plt, figure, out, legend=list(lines.values()), caption="Lines: mu of a run. Bands: mu ± sigma.")


def popart_tasks(run: Run) -> list[str]:
    """Return the tasks for which the run's metrics contain PopArt's mu."""
    return [name.removesuffix("/mu") for name in run.metrics if name.endswith("/mu")]


def plot_checkpoint_curves(results: Sequence[TaskResult], path: Path) -> Path:
    """Draw the mean return of each evaluated checkpoint against its step count, and return the path.

    There is one panel per task and one line per range of levels. Bands are 95 % intervals of the mean over games.
    """
    plt = import_pyplot()
    tasks = list(dict.fromkeys(result.task for result in results))
    figure, all_axes = panel_grid(plt, tasks)
    for axes, task in zip(all_axes, tasks, strict=True):
        own = [result for result in results if result.task == task]
        for levels in dict.fromkeys(result.levels for result in own):
            line = sorted((r for r in own if r.levels == levels), key=lambda r: r.checkpoint or 0)
            x = [result.checkpoint for result in line]
            summaries = [result.statistics["game_return"] for result in line]
            label = None
            if levels is not None:
                label = f"levels {levels} ({line[0].role})" if line[0].role else f"levels {levels}"
            means = [summary["mean"] for summary in summaries]
            # With one game, there is no interval: both limits are None and become nan, so the band has a gap here.
            low, high = (np.array([summary[key] for summary in summaries], float) for key in ("ci_low", "ci_high"))
            (drawn,) = axes.plot(x, means, marker="o", markersize=3.5, linewidth=1.6, label=label)
            axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        format_axes(axes, task, "steps of the checkpoint", steps=True)
        axes.set_ylabel("return of a game")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
    counts = [int(result.statistics["game_return"]["n"]) for result in results]
    games = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    caption = f"Lines: mean of n = {games} games per checkpoint. Bands: 95 % interval of this mean over games\n"
    caption += f"(Student's t if n < {T_INTERVAL_BELOW}, otherwise percentile bootstrap)."
    save_figure(plt, figure, path, caption=caption)
    return path
