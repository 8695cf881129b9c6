"""Figures of a reward audit: training return and true return, and distances from a trusted policy.

The x axis is the network size, the number of training steps, or an option of the environment.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bestiary.evaluation.figure_helpers import import_pyplot
from bestiary.evaluation.statistics import T_INTERVAL_BELOW, mean_interval
from bestiary.reward_audit.curves import SIGNIFICANCE, AuditRow, Curve, make_curves
from bestiary.reward_audit.policy_distances import DISTANCES
from bestiary.utils.console import format_count

SIZE_AXES = ("parameters", "fc_parameters")
AXIS_LABELS = {
    "parameters": "parameters",
    "fc_parameters": "parameters of the fully connected layers",
    "steps": "steps",
}
CAPTION = (
    "Lines: means over the n values of a point. Bands: 95 % intervals of these means "
    f"(Student's t if n < {T_INTERVAL_BELOW}, otherwise percentile bootstrap). "
    "Dashed line: the true return drops significantly, but the training return does not (Welch's t test over seeds, "
    f"Holm's correction, p ≤ {SIGNIFICANCE:g})."
)


def draw_figures(rows: Sequence[AuditRow], out: Path) -> list[Path]:
    """Draw all figures for which there is enough data, and return their paths.

    size.png needs several network sizes, steps.png several checkpoints, env-OPTION.png several values of the option,
    and distances.png a trusted run.
    """
    figures: dict[str, list[Curve]] = {}
    for curve in make_curves(rows):
        name = "size" if curve.axis in SIZE_AXES else curve.axis.replace(".", "-")
        figures.setdefault(name, []).append(curve)
    paths = []
    for name, curves in figures.items():
        paths.append(out / f"{name}.png")
        draw_curves(curves, paths[-1])
    if any(row.distances for row in rows):
        paths.append(out / "distances.png")
        _draw_distances(rows, paths[-1])
    return paths


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """Draw one panel per curve. The left y axis is the training return, the right y axis the true return.

    Lines are means. Bands are 95 % intervals of the means. A vertical dashed line marks the drop of the true return.
    """
    from matplotlib.ticker import EngFormatter

    plt = import_pyplot()
    columns = min(3, len(curves))
    grid_rows = -(-len(curves) // columns)
    figure, grid = plt.subplots(grid_rows, columns, figsize=(5.5 * columns, 3.9 * grid_rows), dpi=150, squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    for axes, curve in zip(grid.flat, curves, strict=False):
        is_log = curve.axis in SIZE_AXES
        x = np.array([point.x for point in curve.points])
        for side, name, color in ((axes, "training", "C0"), (axes.twinx(), "true", "C3")):
            returns = [getattr(point, name) for point in curve.points]
            side.plot(x, [v.mean() for v in returns], color=color, marker="o", markersize=3.5, linewidth=1.6)
            intervals = [mean_interval(v) for v in returns]
            low, high = ([getattr(interval, limit) for interval in intervals] for limit in ("low", "high"))
            # A point with only one value has no interval: both limits are None and become nan. The band has a gap here.
            side.fill_between(x, np.array(low, float), np.array(high, float), color=color, alpha=0.15, linewidth=0)
            side.set_ylabel(f"{name} return of a game", color=color)
            side.tick_params(axis="y", labelcolor=color)
            side.spines["top"].set_visible(False)
        if (drop := curve.true_return_drop) is not None:
            ends = (drop.before, drop.after)
            middle = np.sqrt(ends[0] * ends[1]) if is_log else sum(ends) / 2
            axes.axvline(middle, color="gray", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if is_log:
            axes.set_xscale("log")
            axes.minorticks_off()
            # Put a tick at each network size: the default ticks are powers of ten, which may all lie outside the axis.
            axes.set_xticks(x, [format_count(size) for size in x])
        elif curve.axis != "steps":
            axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.set_xlabel(AXIS_LABELS.get(curve.axis, curve.axis.removeprefix("env.").replace("_", " ")))
        axes.set_title(f"{_panel_title(curve, curves)}\n{_describe_sample(curve)}", fontsize="medium")
    figure.tight_layout()
    figure.text(0.01, 0, textwrap.fill(CAPTION, 72 * columns), fontsize="small", va="top")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _describe_sample(curve: Curve) -> str:
    """Return a text that says over how many seeds or games each point is averaged, for example "n = 5 seeds"."""
    texts = []
    for unit in dict.fromkeys(point.unit for point in curve.points):
        counts = [len(point.true) for point in curve.points if point.unit == unit]
        n = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        texts.append(f"n = {n} seeds" if unit == "seeds" else f"n = {n} games of one run, drops are not tested")
    return "; ".join(texts)


def _panel_title(curve: Curve, curves: Sequence[Curve]) -> str:
    """Return the title of the panel of `curve`: its training reward and its true reward.

    If several curves would have the same title, the title starts with the label of the curve.
    """
    fixed = "".join(f", {value:,} {name}" for name, value in curve.fixed.items())
    title = f"training: {curve.rewards.training or 'reward=1'}, true: {curve.true_reward}{fixed}"
    same = [c for c in curves if (c.rewards, c.channel, c.fixed) == (curve.rewards, curve.channel, curve.fixed)]
    return f"{curve.label}\n{title}" if len(same) > 1 else title


def _draw_distances(rows: Sequence[AuditRow], path: Path) -> None:
    """Draw, for each row, bars with the mean distances between its policy and the trusted policy.

    The KL divergences are left out, because they are not bounded.
    """
    plt = import_pyplot()
    bounded = [name for name in DISTANCES if not name.endswith("kl")]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * len(rows)), dpi=150)
    height = 0.8 / len(bounded)
    for k, name in enumerate(bounded):
        y = np.arange(len(rows)) + (k - (len(bounded) - 1) / 2) * height
        means = [row.distances[f"{name}_mean"] for row in rows]
        axes.barh(y, means, height, color=f"C{k}", label=name.replace("_", " "))
    axes.set_yticks(np.arange(len(rows)), [f"{row.run} at step {row.steps:,}" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("mean distance from the trusted policy over all steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
