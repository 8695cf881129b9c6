"""CSV tables keep all rows if columns are added, rows are cut off, or the disk is full."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from bestiary.runs.csv_tables import CsvTable, read_columns, read_rows


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
table.write([{"step": 40, "text": "y"}])
"""


def test_full_disk_loses_no_row(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", FULL_DISK], check=True, cwd=tmp_path)
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], np.arange(41))
