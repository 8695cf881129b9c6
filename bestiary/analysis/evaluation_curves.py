"""A figure of how an agent's games went at every checkpoint: a panel a task, a line a range of levels."""

from collections.abc import Sequence
from pathlib import Path

from bestiary.analysis.evaluation import Part
from bestiary.analysis.figures import finish, panel_grid, pyplot


def draw_checkpoints(parts: Sequence[Part], path: Path) -> Path:
    """Mean return of a game against the steps of the checkpoint; bands are 95 % intervals over games."""
    plt = pyplot()
    tasks = list(dict.fromkeys(part.task for part in parts))
    figure, panels = panel_grid(plt, tasks)
    for axes, task in zip(panels, tasks, strict=True):
        own = [part for part in parts if part.task == task]
        for levels in dict.fromkeys(part.levels for part in own):
            line = sorted((part for part in own if part.levels == levels), key=lambda part: part.checkpoint or 0)
            x, games = [part.checkpoint for part in line], [part.statistics["game"] for part in line]
            label = f"levels {levels}{f' ({line[0].role})' if line[0].role else ''}" if levels is not None else None
            (drawn,) = axes.plot(x, [s["mean"] for s in games], marker="o", markersize=3.5, linewidth=1.6, label=label)
            low, high = [s["ci_low"] for s in games], [s["ci_high"] for s in games]
            axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        finish(axes, task, "steps of the checkpoint", steps=True)
        axes.set_ylabel("return of a game")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
