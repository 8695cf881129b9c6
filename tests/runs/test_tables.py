"""CSV tables: what is written can be read, whatever is cut off or added."""

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np

from bestiary.runs.tables import Table, read_columns, read_rows


def test_rows_are_on_disk_at_once_and_read_back_by_column(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv")
    table.write([{"step": 1, "name": "a"}, {"step": 2, "name": "b"}])
    table.write([{"step": 3, "name": "c"}])
    columns = read_columns(tmp_path / "t.csv")
    np.testing.assert_array_equal(columns["step"], [1, 2, 3])
    assert list(columns["name"]) == ["a", "b", "c"]
    assert table.rows == 3


def test_a_new_column_leaves_old_rows_empty_there(tmp_path: Path) -> None:
    table = Table(tmp_path / "t.csv")
    table.write([{"step": 1}])
    table.write([{"step": 2, "loss": 0.5}])
    columns = read_columns(tmp_path / "t.csv")
    np.testing.assert_array_equal(columns["loss"], [np.nan, 0.5])
    assert read_rows(tmp_path / "t.csv")[0] == {"step": "1", "loss": ""}


def test_reopening_keeps_just_the_rows_of_the_checkpoint(tmp_path: Path) -> None:
    Table(tmp_path / "t.csv").write([{"step": i} for i in range(5)])
    with (tmp_path / "t.csv").open("a") as file:
        file.write("7")  # half a row, as a kill leaves one
    table = Table(tmp_path / "t.csv", keep_rows=3)
    table.write([{"step": 30}])
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], [0, 1, 2, 30])


def test_a_table_without_rows_to_keep_starts_anew(tmp_path: Path) -> None:
    Table(tmp_path / "t.csv").write([{"step": 1}])
    Table(tmp_path / "t.csv").write([{"other": 2}])
    assert read_rows(tmp_path / "t.csv") == [{"other": "2"}]


FULL_DISK = """
import resource, sys
from pathlib import Path
from bestiary.runs.tables import Table
table = Table(Path("t.csv"))
table.write([{"step": 0, "text": "x"}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
refused = 0
for step in range(1, 40):
    try:
        table.write([{"step": step, "text": "x" * 8}])
    except OSError:
        refused += 1
assert refused > 10, refused
whole = Path("t.csv").read_text()
assert whole.endswith("\\n") and len(whole) <= 100, "no half row may stay"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
table.write([{"step": 40, "text": "y"}])
"""


def test_a_full_disk_loses_no_row(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", FULL_DISK], check=True, cwd=tmp_path)
    np.testing.assert_array_equal(read_columns(tmp_path / "t.csv")["step"], np.arange(41))
