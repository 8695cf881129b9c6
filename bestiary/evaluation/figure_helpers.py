"""Matplotlib functions that several figures use: import, panels, axes, saving, and the check of the output path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bestiary.evaluation.media import FIGURE_SUFFIXES, check_output
from bestiary.utils import local_config
from bestiary.utils.errors import UserError

MAX_PANELS = 240  # maximum number of panels of a figure: 4 panels for each of 60 tasks


def check_figure_path(out: str | Path, overwrite: bool) -> Path:
    """Return `out` as the path of a figure.

    Raise UserError if the figure, or the CSV file beside it, may not be written (see `check_output`).
    """
    path = check_output(out, overwrite, FIGURE_SUFFIXES, "figures")
    check_output(path.with_suffix(".csv"), overwrite, (".csv",))
    return path


def import_pyplot() -> Any:
    """Import and return matplotlib.pyplot, with a backend that draws into files and opens no window."""
    with local_config.hidden(local_config.MATPLOTLIB_FILE):
        import matplotlib

    matplotlib.use("Agg")
    # Without this setting, the name of a run or environment that contains dollar signs would be drawn as a formula.
    matplotlib.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt

    return plt


def panel_grid(plt: Any, panels: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a new figure and a list with the Axes object of each panel. A row has at most three panels.

    Raise UserError if there are more than MAX_PANELS panels: drawing them would take minutes.
    """
    if len(panels) > MAX_PANELS:
        raise UserError(f"the figure would have {len(panels)} panels, the maximum is {MAX_PANELS}; choose fewer tasks")
    if len(panels) == 1:
        figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
        return figure, [axes]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), dpi=150, squeeze=False)
    all_axes = list(grid.flat)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    return figure, all_axes[: len(panels)]


def format_axes(axes: Any, title: str, x_label: str, steps: bool) -> None:
    """Set the title and the label of the x axis, and remove the lines at the top and right.

    If `steps` is True, the numbers on the x axis are written as 1M, 2M ...
    """
    import matplotlib.ticker

    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(x_label)
    axes.spines[["top", "right"]].set_visible(False)
    if steps:
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))


def save_figure(plt: Any, figure: Any, path: Path, legend: Sequence[Any] = (), caption: str = "") -> None:
    """Save and close a figure.

    If `legend` contains lines, a legend for them is drawn below the panels. The caption is above the legend.
    """
    figure.tight_layout()
    if legend:
        box = figure.legend(
            handles=legend,
            title=caption or None,
            title_fontsize="x-small",
            alignment="left",
            frameon=False,
            fontsize="small",
            loc="upper left",
            bbox_to_anchor=(0.02, 0.02),
        )
        box.get_title().set_color("dimgray")
    elif caption:
        figure.text(0.02, 0, caption, fontsize="x-small", color="dimgray", va="top")
    figure.savefig(path, bbox_inches="tight" if legend or caption else None)
    plt.close(figure)
