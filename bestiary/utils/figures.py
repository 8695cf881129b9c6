"""Matplotlib figures that functions of the Python API return."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def new_figure() -> "Iterator[tuple[Figure, Any]]":
    """Context that yields a new figure and its axes.

    Names of runs, tasks and columns may contain dollar signs. Texts that are created in this context are therefore not
    parsed as formulas. This also holds for the title and the axis labels if they are set later.
    """
    from matplotlib import rc_context  # here, because importing matplotlib is slow
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        yield figure, figure.subplots()
