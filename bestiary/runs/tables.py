"""CSV tables that grow while a run goes on."""

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np


class Table:
    """A CSV file with a header; rows are appended and flushed at once. A full disk keeps rows waiting, losing none."""

    def __init__(self, path: Path, keep_rows: int = 0):
        """Open a new table, or an old one of which only the first `keep_rows` rows are to stay."""
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self.waiting: list[dict[str, Any]] = []
        if keep_rows and path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                kept = [row for row, _ in zip(reader, range(keep_rows), strict=False)]
            self._rewrite(list(reader.fieldnames or []), kept)
        elif path.exists():
            path.unlink()

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; raises OSError where the disk refuses, and then writes them with the next ones."""
        self.waiting += rows
        if not self.waiting:
            return
        columns = list(dict.fromkeys([*self.columns, *(key for row in self.waiting for key in row)]))
        if columns != self.columns:
            self._rewrite(columns, read_rows(self.path) if self.path.exists() else [])
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(self.waiting)
        end = self.path.stat().st_size
        try:
            with self.path.open("a", newline="") as file:
                file.write(text.getvalue())
        except OSError:
            os.truncate(self.path, end)  # no half row stays behind
            raise
        self.rows += len(self.waiting)
        self.waiting = []

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        temporary = self.path.with_name(f".{self.path.name}")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)
        self.columns, self.rows = columns, len(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """The table by column: numbers as float64 (nan where empty), anything else as strings."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    columns = {}
    for index, name in enumerate(header):
        texts = [row[index] for row in rows if len(row) == len(header)]
        try:
            columns[name] = np.array([float(text) if text else np.nan for text in texts])
        except ValueError:
            columns[name] = np.array(texts)
    return columns
