"""What the figures have in common: no window, as many panels as needed, axes without a frame."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bestiary.analysis.files import FIGURES, check_output


def figure_path(out: str | Path, overwrite: bool) -> Path:
    """Where a figure goes, with a table of the same name beside it; refuses what cannot be written or is there."""
    path = check_output(out, overwrite, FIGURES, "figures are")
    check_output(path.with_suffix(".csv"), overwrite, (".csv",))
    return path


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def panel_grid(plt: Any, tasks: Sequence[Any]) -> tuple[Any, list[Any]]:
    """One panel, or as many as there are tasks, three in a row."""
    if len(tasks) == 1:
        figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
        return figure, [axes]
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), dpi=150, squeeze=False)
    places = list(grid.flat)
    for axes in places[len(tasks) :]:
        axes.set_axis_off()
    return figure, places[: len(tasks)]


def finish(axes: Any, title: str, x_label: str, steps: bool) -> None:
    import matplotlib.ticker

    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.spines[["top", "right"]].set_visible(False)
    if steps:
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
