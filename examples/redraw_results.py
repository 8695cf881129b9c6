"""Draw the figures in docs/results again from the CSV files in the same folder.

    python examples/redraw_results.py [FOLDER]

Most of the curves were smoothed with centred windows by version 0.1. They cannot be smoothed in the present way,
because the games are not stored. The captions of these figures name the old method.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.evaluation.curve_plots import curve_caption, plot_checkpoint_curves
from bestiary.evaluation.figure_helpers import format_axes, import_pyplot, panel_grid, save_figure
from bestiary.evaluation.learning_curves import DEFAULT_SMOOTH
from bestiary.evaluation.results import TaskResult
from bestiary.rollout import Episode
from bestiary.runs.csv_tables import read_rows

CURVES = ("classic", "lunarlander")
CENTRED_CURVES = ("breakout", "pong-aaa", "pong-minutes", "pong-steps", "popart", "procgen", "transfer")
CENTRED_CAPTION = (
    "Lines: mean over seeds. Bands: lowest to highest return over seeds. Curves of version 0.1: windows are centred,\n"
    "so a point also contains games that ended later, by up to about 10 times the mean number of steps per finished "
    "game."
)


def draw_learning_curves(path: Path, caption: str) -> None:
    """Draw the curves of a CSV file of `bestiary compare`: one panel per task, one line per group."""
    rows = read_rows(path)
    axis = "minutes" if "minutes" in rows[0] else "steps"
    tasks = list(dict.fromkeys(row.get("task", "") for row in rows))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    plt = import_pyplot()
    figure, all_axes = panel_grid(plt, tasks)
    lines: dict[str, Any] = {}
    for axes, task in zip(all_axes, tasks, strict=True):
        for k, group in enumerate(groups):
            own = [
                row for row in rows if row.get("task", "") == task and row["group"] == group and row["mean"] != "nan"
            ]
            if not own:
                continue
            x, mean, low, high = (
                np.array([float(row[key]) for row in own]) for key in (axis, "mean", "lowest", "highest")
            )
            seeds = int(own[0]["seeds"])
            label = f"{group} ({seeds} seed{'s' if seeds > 1 else ''})"
            (line,) = axes.plot(x, mean, color=f"C{k}", linewidth=1.6, label=label)
            axes.fill_between(x, low, high, color=f"C{k}", alpha=0.2, linewidth=0)
            lines.setdefault(group, line)
        steps_label = "steps of the task" if task else "steps"
        format_axes(axes, task, steps_label if axis == "steps" else axis, axis == "steps")
        axes.set_ylabel("return of a game")
    save_figure(plt, figure, path.with_suffix(".png"), legend=list(lines.values()), caption=caption)


def draw_checkpoints(path: Path) -> None:
    """Draw the returns of several checkpoints. `path` is a CSV file of `bestiary eval` with one episode per row."""
    games: dict[tuple[str, int], list[Episode]] = {}
    for row in read_rows(path):
        value, length = float(row["return"]), int(row["length"])
        whole = float(row["game_return"]), int(row["game_length"]), row["game_over"] == "1"
        episode = Episode(0, row["task"], value, length, *whole, int(row["env"]), {}, {})
        games.setdefault((row["task"], int(row["checkpoint"])), []).append(episode)
    results = [TaskResult(task, episodes, checkpoint) for (task, checkpoint), episodes in games.items()]
    plot_checkpoint_curves(results, path.with_suffix(".png"))


if __name__ == "__main__":
    results_folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "results"
    for name in CURVES:
        draw_learning_curves(results_folder / f"{name}.csv", curve_caption(DEFAULT_SMOOTH))
    for name in CENTRED_CURVES:
        draw_learning_curves(results_folder / f"{name}.csv", CENTRED_CAPTION)
    draw_checkpoints(results_folder / "forgetting.csv")
