"""Functions that read CSV files, and a class that writes CSV files row by row."""

import contextlib
import csv
import errno
import io
import itertools
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from bestiary.utils import safe_files
from bestiary.utils.console import plural, warn
from bestiary.utils.errors import UserError

MAX_LINE = 2**20  # maximum number of characters of a line
MAX_CELL = 10_000  # maximum number of characters of a cell that is not a number
MAX_COLUMNS = 10_000
# Maximum number of cells that are missing in a table, because rows are shorter than the header. Readers add these
# cells, so a small file with many short rows would need much memory. In tables of Bestiary, only the last row can be
# short.
MAX_MISSING_CELLS = 100_000
# A table may need at most MEMORY_FACTOR times the size of its file, plus MEMORY_RESERVE bytes. Numbers need at most 4
# times their size in the file: 8 bytes instead of at least 2 (a digit and a comma). Text may need more than the limit,
# because each cell in an array of text needs as much memory as the longest cell.
MEMORY_FACTOR = 8
MEMORY_RESERVE = 64 * 2**20
BATCH_ROWS = 2_000  # number of rows that `read_columns` converts at once


class CsvTable:
    """A CSV file with a header, to which rows are appended.

    If a row has new columns, the whole file is written again with a longer header. If rows cannot be written, for
    example because the disk is full, they are kept in memory until the next call of `write`.
    """

    def __init__(self, path: Path, keep_rows: int = 0, root: Path | None = None):
        """Open the table. If the file exists, keep its first `keep_rows` rows and remove all other rows.

        `root` is a folder that contains the file (default: the folder of the file). If the path from `root` to the file
        contains a link, nothing is written.
        """
        self.path = path
        self.root = root
        self.columns: list[str] = []
        self.num_rows = 0  # number of rows in the file
        self.pending: list[dict[str, Any]] = []  # rows that are not in the file yet
        self.failure: OSError | None = None  # error of the last attempt to write, if it failed
        self.retry_length = 0  # after a failure, the number of pending rows at which writing is tried again
        if keep_rows and os.path.lexists(path):
            self._rewrite([], keep_rows)
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
            self._rewrite(columns)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows to the file. If `rows` is empty, only try again to write the pending rows.

        Raise OSError if the file cannot be written. The rows are then pending: a later call tries again to write them.
        """
        self.pending += rows
        # Each attempt formats all pending rows. If each call tried again, a full disk would slow down the training.
        if rows and self.failure is not None and len(self.pending) < self.retry_length:
            raise self.failure
        try:
            if self.pending:
                self._write_pending()
        except OSError as error:
            self.failure = error
            self.retry_length = 2 * len(self.pending)
            raise
        self.failure = None

    def _write_pending(self) -> None:
        columns = list(dict.fromkeys([*self.columns, *(key for row in self.pending for key in row)]))
        # Another program may have removed or damaged the file while the run was training.
        if columns != self.columns or not os.path.lexists(self.path):
            try:
                self._rewrite(columns)
            except UserError as error:
                raise OSError(errno.EIO, str(error)) from error
        text = io.StringIO()
        csv.DictWriter(text, self.columns, restval="", lineterminator="\n").writerows(self.pending)
        safe_files.append_text(self.path, text.getvalue(), self.root)
        self.num_rows += len(self.pending)
        self.pending = []

    def _rewrite(self, new_columns: list[str], max_rows: int | None = None) -> None:
        """Write the file again with its first `max_rows` rows (None: all) and with additional columns.

        One row is read and written at a time, because the tables of long runs may be larger than the memory.
        """
        with contextlib.closing(_iterate_rows(self.path, max_bytes=None)) as old_rows:
            columns = list(dict.fromkeys([*next(old_rows, []), *new_columns]))
            num_rows = 0
            with safe_files.replace_file(self.path, self.root) as binary:
                file = io.TextIOWrapper(binary, encoding="utf-8", newline="")
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                for row in itertools.islice(old_rows, max_rows):
                    # If a row is too short, its last cells become empty. If it is too long, the last cells are dropped.
                    writer.writerow([*row, *[""] * len(columns)][: len(columns)])
                    num_rows += 1
                file.detach()
        self.columns = columns
        self.num_rows = num_rows


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
    rows = _iterate_rows(path)
    columns = next(rows, [])
    return [dict(itertools.zip_longest(columns, row[: len(columns)], fillvalue="")) for row in rows]


def _iterate_rows(path: Path, max_bytes: int | None = safe_files.MAX_TABLE_BYTES) -> Generator[list[str], None, None]:
    """Yield the header and the rows of a CSV file. If it does not exist, yield nothing. Leave out empty lines."""
    if not os.path.lexists(path):
        return
    with describe_damage(path), safe_files.open_table(path, max_bytes=max_bytes) as file:
        num_columns = None
        num_missing = 0
        for row in csv.reader(_lines(file)):
            if not row:
                continue
            if num_columns is None:
                num_columns = len(row)
                if num_columns > MAX_COLUMNS:
                    raise ValueError(f"it has {num_columns} columns; at most {MAX_COLUMNS} are read")
            num_missing += max(num_columns - len(row), 0)
            if num_missing > MAX_MISSING_CELLS:
                raise ValueError(f"its rows lack more than {MAX_MISSING_CELLS} cells of the columns in the header")
            yield row


def _lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines of a file. Raise ValueError if a line is too long."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise ValueError(f"a line has {MAX_LINE} or more characters")
        yield line


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Read a CSV file and return its columns by name.

    A column of numbers becomes a float64 array, in which empty cells are nan. Any other column becomes an array of
    text. Incomplete rows are ignored. If the file does not exist, return an empty dict.

    Raises:
        UserError: the file is damaged.
    """
    rows = _iterate_rows(path)
    header = next(rows, [])
    # Arrays need much less memory than lists of text. The first batch is empty, so that each column has a batch.
    batches: list[list[np.ndarray]] = [[np.zeros(0)] for _ in header]
    num_bytes = 0
    with describe_damage(path):
        max_bytes = MEMORY_FACTOR * path.stat().st_size + MEMORY_RESERVE if header else 0
        while batch_rows := list(itertools.islice(rows, BATCH_ROWS)):
            complete = [row for row in batch_rows if len(row) == len(header)]
            for index, batch in enumerate(batches):
                batch.append(_to_array([row[index] for row in complete]))
                num_bytes += batch[-1].nbytes
                _check_memory(num_bytes, max_bytes)
        _check_memory(sum(map(_joined_bytes, batches)), max_bytes)
        return {name: _join(batch) for name, batch in zip(header, batches, strict=True)}


def _to_array(texts: list[str]) -> np.ndarray:
    """Return the numbers in a list of cells or, if a cell is not a number, the texts."""
    try:
        return np.array([float(text) if text else np.nan for text in texts])
    except ValueError:
        if max(map(len, texts)) > MAX_CELL:
            raise ValueError(f"a cell has more than {MAX_CELL} characters") from None
        return np.array(texts)


def _join(batches: list[np.ndarray]) -> np.ndarray:
    """Join the arrays of a column. If one of the arrays has text, convert the numbers in the other arrays to text."""
    if any(batch.dtype != np.float64 for batch in batches):
        batches = [
            np.where(np.isnan(batch), "", batch.astype(str)) if batch.dtype == np.float64 else batch
            for batch in batches
        ]
    return np.concatenate(batches)


def _joined_bytes(batches: list[np.ndarray]) -> int:
    """Return the size of the array that `_join` returns, in bytes; if numbers are converted, only an upper limit."""
    sizes = {batch.dtype.itemsize for batch in batches if len(batch)} | {8}
    if any(batch.dtype != np.float64 for batch in batches):
        sizes.add(np.dtype("U32").itemsize)  # the type of numbers that were converted to text
    return sum(map(len, batches)) * max(sizes)


def _check_memory(num_bytes: int, max_bytes: int) -> None:
    """Raise ValueError if a table needs much more memory than its file."""
    if num_bytes > max_bytes:
        raise ValueError(f"it would need {num_bytes} bytes of memory; a file of its size may need {max_bytes}")
