"""CSV tables keep all rows if columns are added, rows are cut off, or the disk is full."""

import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bestiary.runs.csv_tables import CsvTable, read_columns, read_rows
from bestiary.utils import safe_files
from bestiary.utils.errors import UserError


def test_rows_are_written_immediately_and_read_by_column(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.write([{"step": 1, "name": "a"}, {"step": 2, "name": "b"}])
    table.write([{"step": 3, "name": "c"}])
    columns = read_columns(tmp_path / "t.csv")
    np.testing.assert_array_equal(columns["step"], [1, 2, 3])
    assert list(columns["name"]) == ["a", "b", "c"]
    assert table.num_rows == 3


def test_new_column_is_empty_in_old_rows(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.write([{"step": 1}])
    table.write([{"step": 2, "loss": 0.5}])
    columns = read_columns(tmp_path / "t.csv")
    np.testing.assert_array_equal(columns["loss"], [np.nan, 0.5])
    assert read_rows(tmp_path / "t.csv")[0] == {"step": "1", "loss": ""}


def test_reopened_table_keeps_the_given_number_of_rows(tmp_path: Path) -> None:
    CsvTable(tmp_path / "t.csv").write([{"step": i} for i in range(5)])
    with (tmp_path / "t.csv").open("a") as file:
        file.write("7")  # an incomplete row, as after a kill
    table = CsvTable(tmp_path / "t.csv", keep_rows=3)
    table.write([{"step": 30}])
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], [0, 1, 2, 30])


def test_table_without_rows_to_keep_replaces_the_file(tmp_path: Path) -> None:
    CsvTable(tmp_path / "t.csv").write([{"step": 1}])
    CsvTable(tmp_path / "t.csv").write([{"other": 2}])
    assert read_rows(tmp_path / "t.csv") == [{"other": "2"}]


FULL_DISK = """
import resource, sys
from pathlib import Path
from bestiary.runs.csv_tables import CsvTable
table = CsvTable(Path("t.csv"))
table.write([{"step": 0, "text": "x"}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
failures = 0
for step in range(1, 40):
    try:
        table.write([{"step": step, "text": "x" * 8}])
    except OSError:
        failures += 1
assert failures > 10, failures
text = Path("t.csv").read_text()
assert text.endswith("\\n") and len(text) <= 100, "an incomplete row was left in the file"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
try:
    table.write([{"step": 40, "text": "y"}])
except OSError:  # the failure is so recent that the table has not tried again
    pass
table.write([])
"""


def test_full_disk_loses_no_row(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", FULL_DISK], check=True, cwd=tmp_path)
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], np.arange(41))


def test_rewritten_table_keeps_its_rows_if_the_disk_is_full(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.write([{"step": step} for step in range(1_000)])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            table.write([{"step": 1_000, "loss": 0.5}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
    table.write([])
    columns = read_columns(tmp_path / "t.csv")
    np.testing.assert_array_equal(columns["step"], np.arange(1_001))
    assert columns["loss"][-1] == 0.5


def test_pending_rows_are_not_formatted_in_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.write([{"step": 0}])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    formatted = []
    append_text = safe_files.append_text

    def append_and_count(path: Path, text: str, root: Path | None = None) -> None:
        formatted.append(len(text))
        append_text(path, text, root)

    monkeypatch.setattr(safe_files, "append_text", append_and_count)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len("step\n0\n"), limit[1]))
    try:
        for step in range(1, 10_000):
            with pytest.raises(OSError, match="too large"):
                table.write([{"step": step}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sum(formatted) < 10 * 10_000 * len("10000\n")
    table.write([])
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], np.arange(10_000))


def test_table_that_was_removed_during_training_is_created_again(tmp_path: Path) -> None:
    table = CsvTable(tmp_path / "t.csv")
    table.write([{"step": 1}])
    (tmp_path / "t.csv").unlink()
    table.write([{"step": 2}])
    assert read_rows(tmp_path / "t.csv") == [{"step": "2"}]
    assert table.num_rows == 1


def test_rows_that_are_kept_are_not_loaded_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "t.csv").open("w") as file:
        file.write("step,text\n")
        for step in range(200_000):
            file.write(f"{step},text of a row\n")
    tracemalloc.start()
    try:
        table = CsvTable(tmp_path / "t.csv", keep_rows=150_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert table.num_rows == 150_000
    assert read_columns(tmp_path / "t.csv")["step"][-1] == 149_999


def write_sparse(path: Path, start: bytes, size: int) -> None:
    """Write a file that begins with `start` and continues with zeros that need no space on the disk."""
    path.write_bytes(start)
    os.truncate(path, size)


def test_hostile_table_is_refused_before_it_needs_much_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_sparse(path, b"step\n1\n", 2**40)
    with pytest.raises(UserError, match=r"1099511627776 bytes; at most \d+ are read"):
        read_columns(path)
    with pytest.raises(UserError, match="a line has"):
        CsvTable(path, keep_rows=10)
    write_sparse(path, b"step\n1\n", 2**27)
    with pytest.raises(UserError, match="a line has"):
        read_columns(path)
    path.write_text("step,name\n" + "1,a\n" * 3_000 + f"2,{'b' * 100_000}\n")
    with pytest.raises(UserError, match="a cell has more than"):
        read_columns(path)


def test_column_is_text_if_only_a_late_row_has_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n" + "1,\n" * 5_000 + "x,y\n")
    columns = read_columns(tmp_path / "t.csv")
    assert [columns["a"][-1], columns["b"][0], columns["b"][-1]] == ["x", "", "y"]
    assert float(columns["a"][0]) == 1
