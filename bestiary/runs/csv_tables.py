"""Functions that read CSV files, and a class that writes CSV files row by row."""

import csv
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.utils import safe_files
from bestiary.utils.console import plural, warn
from bestiary.utils.errors import UserError


class CsvTable:
    """A CSV file with a header, to which rows are appended.

    If a row has new columns, the whole file is written again with a longer header. If rows cannot be written, for
    example because the disk is full, they are kept in memory until the next call of `write`.
    """

    def __init__(self, path: Path, keep_rows: int = 0):
        """Open the table. If the file exists, keep its first `keep_rows` rows and remove the others."""
        self.path = path
        self.columns: list[str] = []
        self.num_rows = 0  # number of rows in the file
        self.pending: list[dict[str, Any]] = []  # rows that are not in the file yet
        if keep_rows and os.path.lexists(path):
            with describe_damage(path), safe_files.open_table(path) as file:
                reader = csv.DictReader(file)
                # If a row is too short, its last cells become empty. If it is too long, its last cells are dropped.
                columns = list(reader.fieldnames or [])
                rows = zip(reader, range(keep_rows), strict=False)
                kept = [{name: row.get(name) or "" for name in columns} for row, _ in rows]
            self._rewrite(columns, kept)
        elif os.path.lexists(path):
            path.unlink()
        if self.num_rows < keep_rows:
            warn(
                f"{path} has only {plural(self.num_rows, 'row')}, but the checkpoint was saved after {keep_rows} rows: "
                f"{keep_rows - self.num_rows} rows are lost, so the table has a gap"
            )

    def write_header(self, columns: list[str]) -> None:
        """Create the file with these columns, if it does not exist yet."""
        if not os.path.lexists(self.path):
            self._rewrite(columns, [])

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to the file.

        Raise OSError if the file cannot be written. The next call then tries again to write these rows.
        """
        self.pending += rows
        if not self.pending:
            return
        columns = list(dict.fromkeys([*self.columns, *(key for row in self.pending for key in row)]))
        if columns != self.columns:
            self._rewrite(columns, read_rows(self.path) if self.path.exists() else [])
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(self.pending)
        safe_files.append_text(self.path, text.getvalue())
        self.num_rows += len(self.pending)
        self.pending = []

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Replace the whole file by a new file with these columns and rows."""
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        safe_files.write_text(self.path, text.getvalue())
        self.columns = columns
        self.num_rows = len(rows)


@contextmanager
def describe_damage(path: Path) -> Iterator[None]:
    """Context for reading a CSV file. If the file is damaged or cannot be read, raise UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file. Return each row as a dict: column name -> text. Raise UserError if the file is damaged."""
    with describe_damage(path), safe_files.open_table(path) as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or [])
        return [{name: row.get(name) or "" for name in columns} for row in reader]


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Read a CSV file and return its columns by name.

    A column of numbers becomes a float64 array, in which empty cells are nan. Any other column becomes an array of
    text. Incomplete rows are ignored. If the file does not exist, return an empty dict.

    Raises:
        UserError: the file is damaged.
    """
    if not os.path.lexists(path):
        return {}
    with describe_damage(path), safe_files.open_table(path) as file:
        header, *rows = list(csv.reader(file)) or [[]]
    columns = {}
    for index, name in enumerate(header):
        texts = [row[index] for row in rows if len(row) == len(header)]
        try:
            columns[name] = np.array([float(text) if text else np.nan for text in texts])
        except ValueError:
            columns[name] = np.array(texts)
    return columns
