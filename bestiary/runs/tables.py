"""The tables of a run (metrics.csv, episodes.csv, ...) in Python and in notebooks."""

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.runs.csv_tables import read_columns
from bestiary.utils.errors import UserError
from bestiary.utils.figures import new_figure
from bestiary.utils.options import suggest

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

MAX_DRAWN = 1e300  # values with a larger absolute value are not drawn, because Matplotlib cannot draw them
ROWS_SHOWN = 6  # number of rows in the HTML representation of a table: the first three and the last three
COLUMNS_SHOWN = 12  # number of columns in the HTML representation of a table


class Table(dict[str, np.ndarray]):
    """The columns of a CSV file by name. All columns are arrays [R] of numbers or text; R is the number of rows."""

    def __init__(self, columns: Mapping[str, np.ndarray], name: str):
        """Create a table. `name` is the name of the file without suffix, for messages."""
        super().__init__(columns)
        self.name = name

    @classmethod
    def read(cls, path: Path) -> "Table":
        """Read a CSV file (see `read_columns`). If the file does not exist, the table is empty."""
        return cls(read_columns(path), path.stem)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()))) if self else 0

    def __repr__(self) -> str:
        return f"Table({self.name}: {self.num_rows} rows, columns {', '.join(self) or 'none'})"

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the table as a pandas DataFrame. Raise UserError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas: pandas is not installed; run: pip install 'bestiary[pandas]'") from error
        return pandas.DataFrame(dict(self))

    def plot(self, *columns: str, x: str = "step") -> "Figure":
        """Return a matplotlib figure with one line per column over the column `x`.

        By default, all columns of returns are drawn: `return`, or `TASK/return` for each of several tasks.

        Raises:
            UserError: a column does not exist or contains no numbers.
        """
        names = columns or tuple(name for name in self if name == "return" or name.endswith("/return"))
        if not names:
            raise UserError(f"plot: {self.name} has no column `return`; give a column, for example plot('loss')")
        positions = self._numbers(x)
        with new_figure() as (figure, axes):
            for name in names:
                values = self._numbers(name)
                known = np.abs(values) < MAX_DRAWN  # False for nan
                axes.plot(positions[known], values[known], label=name)
            axes.set_xlabel(x)
            axes.spines[["top", "right"]].set_visible(False)
            if len(names) > 1:
                axes.legend(frameon=False)
            else:
                axes.set_ylabel(names[0])
        return figure

    def _numbers(self, name: str) -> np.ndarray:
        if name not in self:
            raise UserError(f"plot: {self.name} has no column {name}{suggest(name, self)}")
        if self[name].dtype.kind != "f":
            raise UserError(f"plot: column {name} of {self.name} contains text")
        return self[name]

    def _repr_html_(self) -> str:
        """Return the first and last rows and the first columns as an HTML table, for notebooks."""
        names = list(self)[:COLUMNS_SHOWN]
        more = ["…"] if len(names) < len(self) else []
        rows: list[list[str]] = []
        indices = range(self.num_rows)
        shown = list(indices)
        if self.num_rows > ROWS_SHOWN:
            shown = [*indices[: ROWS_SHOWN // 2], *indices[-ROWS_SHOWN // 2 :]]
        for k, row in enumerate(shown):
            if k and row != shown[k - 1] + 1:
                rows.append(["…"] * (len(names) + len(more)))
            rows.append([_cell(self[name][row]) for name in names] + more)
        caption = f"{self.name}: {self.num_rows} rows, {len(self)} columns"
        return html_table(caption, rows, header=names + more)


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def html_table(caption: str, rows: list[list[str]], header: list[str] | None = None) -> str:
    """Return an HTML table for notebooks. All texts are escaped."""
    lines = [f"<table><caption>{html.escape(caption)}</caption>"]
    for tag, cells_of_rows in (("th", [header] if header else []), ("td", rows)):
        for cells in cells_of_rows:
            lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
