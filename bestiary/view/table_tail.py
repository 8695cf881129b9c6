"""Read the CSV tables of running trainings incrementally: a refresh reads only the rows that were added."""

import csv
import os
from pathlib import Path

import numpy as np

from bestiary.utils import safe_files

MAX_READ = 2**24  # maximum number of bytes that one refresh reads
LAST_ROW_BYTES = 2**16  # number of bytes at the end of a table in which `read_last_row` searches the last row
MAX_CELL = 10_000  # maximum number of characters of a cell
# Maximum number of columns that are kept. Each column has space for FIRST_CAPACITY rows, so a short file with very many
# columns would fill the memory.
MAX_COLUMNS = 10_000
FIRST_CAPACITY = 256  # number of rows for which a new column has space


class Column:
    """A growing array of numbers, or of text if a cell is not a number."""

    def __init__(self) -> None:
        self.numbers = np.empty(FIRST_CAPACITY)
        self.texts: list[str] | None = None  # None: all cells are numbers
        self.length = 0

    def append(self, cells: list[str]) -> None:
        """Append cells. An empty cell is NaN in a column of numbers."""
        if self.texts is None:
            try:
                added = np.array([float(cell) if cell else np.nan for cell in cells])
            except ValueError:
                self.texts = ["" if np.isnan(x) else f"{x:g}" for x in self.numbers[: self.length]]
            else:
                while self.length + len(added) > len(self.numbers):
                    self.numbers = np.concatenate([self.numbers, np.empty_like(self.numbers)])
                self.numbers[self.length : self.length + len(added)] = added
        if self.texts is not None:
            self.texts += [cell[:MAX_CELL] for cell in cells]
        self.length += len(cells)

    @property
    def values(self) -> np.ndarray:
        """All cells so far, as an array of numbers or of text."""
        return self.numbers[: self.length] if self.texts is None else np.array(self.texts, dtype=object)


class TableTail:
    """The columns of a CSV file that another process may be writing."""

    def __init__(self, path: Path, root: Path):
        """Create the table. `root` is the run folder; links below it are not followed."""
        self.path = path
        self.root = root
        self.version = 0  # changes whenever rows are added or the table is read again from its start
        self._restart(0)

    def _restart(self, inode: int) -> None:
        self.inode = inode
        self.offset = 0  # number of bytes that were read
        self.width = 0  # number of cells of a complete row
        self.positions: dict[str, int] = {}  # name of a column -> index of its cells
        self.columns: dict[str, Column] = {}

    @property
    def num_rows(self) -> int:
        """The number of rows that were read."""
        return next(iter(self.columns.values())).length if self.columns else 0

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name].values

    @property
    def number_names(self) -> list[str]:
        """The names of the columns of numbers."""
        return [name for name, column in self.columns.items() if column.texts is None]

    def refresh(self) -> None:
        """Read the rows that were added since the last call, at most MAX_READ bytes.

        A file that was replaced or became shorter is read again from its start. This happens when a run is resumed from
        an earlier checkpoint. If the file cannot be read, the table stays unchanged.
        """
        try:
            descriptor = safe_files.open_file(self.path, os.O_RDONLY, self.root, safe_files.MAX_TABLE_BYTES)
        except OSError:
            if self.columns and not os.path.lexists(self.path):
                self._restart(0)
                self.version += 1
            return
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_ino != self.inode or status.st_size < self.offset:
                self._restart(status.st_ino)
                self.version += 1
            if status.st_size == self.offset:
                return
            file.seek(self.offset)
            content = file.read(MAX_READ)
        end = content.rfind(b"\n") + 1  # the last line may be incomplete
        if end:
            self._add(content[:end].decode(errors="replace"))
            self.offset += end
            self.version += 1

    def _add(self, text: str) -> None:
        try:
            rows = [row for row in csv.reader(text.split("\n")) if row]
        except csv.Error:  # a damaged part of the file; the parts before and after it are shown
            return
        if not self.columns and rows:
            header = rows.pop(0)
            self.width = len(header)
            for index, name in enumerate(header[:MAX_COLUMNS]):
                self.positions.setdefault(name, index)
            self.columns = {name: Column() for name in self.positions}
        complete = [row for row in rows if len(row) == self.width]
        if complete:
            for name, position in self.positions.items():
                self.columns[name].append([row[position] for row in complete])


def read_last_row(path: Path, root: Path) -> dict[str, float]:
    """Return {column: number} for the last complete row of a CSV file. Only the start and the end of the file are read.

    Return an empty dict if the file has no complete row or cannot be read.
    """
    try:
        descriptor = safe_files.open_file(path, os.O_RDONLY, root)
        with os.fdopen(descriptor, "rb") as file:
            header = file.readline(LAST_ROW_BYTES)
            start = max(len(header), os.fstat(descriptor).st_size - LAST_ROW_BYTES)
            file.seek(start)
            lines = file.read().decode(errors="replace").rpartition("\n")[0].split("\n")
        names = next(csv.reader([header.decode(errors="replace").strip()]))
        cells = next(csv.reader([lines[-1].strip()]))
        if len(names) != len(cells):
            return {}
        return {name: float(cell) if cell else np.nan for name, cell in zip(names, cells, strict=True)}
    except (OSError, ValueError, csv.Error, StopIteration):
        return {}
