"""Figures of an audit: trained and true return along each axis, and distances from a trusted run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bestiary.analysis.audit_curves import Curve, Finding, curves
from bestiary.analysis.distances import DISTANCES
from bestiary.analysis.figures import pyplot
from bestiary.console import short

AXES = {
    "parameters": "parameters",
    "fully_connected": "parameters of the fully connected layers",
    "steps": "steps (agent decisions)",
}


def draw(findings: Sequence[Finding], out: Path) -> list[Path]:
    """size.png, steps.png and env-OPTION.png, where there are several sizes, times or values of an option; distances.png, where
    there is a trusted run."""
    figures: dict[str, list[Curve]] = {}
    for curve in curves(findings):
        name = {"parameters": "size", "fully_connected": "size"}.get(curve.axis, curve.axis.replace(".", "-"))
        figures.setdefault(name, []).append(curve)
    made = []
    for name, panels in figures.items():
        made.append(out / f"{name}.png")
        _draw_pairs(panels, made[-1])
    if any(f.distances for f in findings):
        made.append(out / "distances.png")
        _draw_distances(findings, made[-1])
    return made


def _draw_pairs(panels: Sequence[Curve], path: Path) -> None:
    """A panel a curve: trained on the left axis, true on the right, means as lines, two standard errors as bands; a dashed line
    at a transition."""
    from matplotlib.ticker import EngFormatter

    plt = pyplot()
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, places = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.8 * rows), dpi=150, squeeze=False)
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, curve in zip(places.flat, panels, strict=False):
        found, logarithmic = curve.levels, curve.axis in ("parameters", "fully_connected")
        x = np.array([level.x for level in found])
        for side, name, color in ((axes, "trained", "C0"), (axes.twinx(), "true", "C3")):
            values = [getattr(level, name) for level in found]
            means = np.array([v.mean() for v in values])
            errors = np.array([v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else 0.0 for v in values])
            side.plot(x, means, color=color, marker="o", markersize=3.5, linewidth=1.6)
            side.fill_between(x, means - 2 * errors, means + 2 * errors, color=color, alpha=0.15, linewidth=0)
            side.set_ylabel(f"{name} return of a game", color=color)
            side.tick_params(axis="y", labelcolor=color)
            side.spines["top"].set_visible(False)
        if (mark := curve.transition) is not None:
            middle = np.sqrt(mark[0] * mark[1]) if logarithmic else sum(mark) / 2
            axes.axvline(middle, color="gray", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(x, [short(size) for size in x])  # tens and hundreds may well be none of them
        elif curve.axis != "steps":
            axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.set_xlabel(AXES.get(curve.axis, curve.axis.removeprefix("env.").replace("_", " ")))
        size = "".join(f", {value:,} {name}" for name, value in curve.at.items())
        title = f"{curve.rewards.trained or 'reward=1'} for {curve.true}{size}"
        several = [c for c in panels if (c.rewards, c.channel, c.at) == (curve.rewards, curve.channel, curve.at)]
        axes.set_title(f"{curve.label}\n{title}" if len(several) > 1 else title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw_distances(findings: Sequence[Finding], path: Path) -> None:
    """Of every run and checkpoint from the trusted run: bars at the means over steps."""
    plt = pyplot()
    bounded = [name for name in DISTANCES if not name.endswith("kl")]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * len(findings)), dpi=150)
    height = 0.8 / len(bounded)
    for k, name in enumerate(bounded):
        places = np.arange(len(findings)) + (k - (len(bounded) - 1) / 2) * height
        means = [finding.distances[f"{name}_mean"] for finding in findings]
        axes.barh(places, means, height, color=f"C{k}", label=name.replace("_", " "))
    axes.set_yticks(np.arange(len(findings)), [f"{f.run} at {f.steps:,}" for f in findings], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("distance from the trusted run's decisions, mean over steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
