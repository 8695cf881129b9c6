"""Tables, curves and the catalogue of `bestiary view`, without a browser."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from bestiary.runs.csv_tables import CsvTable, read_columns
from bestiary.runs.run import Run
from bestiary.view import charts, run_data
from bestiary.view.catalogue import Catalogue
from bestiary.view.curves import Curve, band, differing_options, group_by_config, smooth, thin
from bestiary.view.study_data import read_trials
from bestiary.view.table_tail import TableTail, read_last_row


def assert_equal(tail: TableTail, path: Path) -> None:
    expected = read_columns(path)
    assert list(tail.columns) == list(expected)
    for name, column in expected.items():
        if column.dtype.kind == "f":
            np.testing.assert_array_equal(tail[name], column)
        else:
            assert tail[name].tolist() == column.tolist()


def test_a_growing_table_equals_a_complete_read() -> None:
    """Rows are appended, a line is written in two parts, a column is added, and rows are removed by a resumed run."""
    path = Path("metrics.csv").absolute()
    tail = TableTail(path, path.parent)
    tail.refresh()
    assert tail.num_rows == 0
    table = CsvTable(path)
    for k in range(700):
        table.write([{"step": k, "task": "a,b" if k % 3 else 'x"y', "loss": "" if k == 5 else k / 7}])
        if k % 50 == 0:
            tail.refresh()
            assert_equal(tail, path)
    with path.open("a") as file:
        file.write("700,")
    tail.refresh()
    assert tail.num_rows == 700
    with path.open("a") as file:
        file.write("c,1.5\n")
    tail.refresh()
    assert_equal(tail, path)
    version = tail.version
    tail.refresh()
    assert tail.version == version  # no change, so pages draw nothing
    table = CsvTable(path, keep_rows=20)
    table.write([{"step": 20, "task": "", "loss": 1.0, "new": 2.0}])
    tail.refresh()
    assert_equal(tail, path)
    assert tail.num_rows == 21
    path.unlink()
    tail.refresh()
    assert tail.num_rows == 0


def test_unusual_tables_do_not_raise(tmp_path: Path) -> None:
    contents = [
        "",
        "\n\n",
        "a,a\n1,2\n3,4\n",
        "a,b\n1\n1,2,3\n5,6\n",
        "a\n\x00\n1\n",
        'a\n"unclosed\n1\n',
        "\xff,b\n1,x\n",
    ]
    for content in contents:
        path = tmp_path / "t.csv"
        path.write_bytes(content.encode("latin-1"))
        tail = TableTail(path, tmp_path)
        tail.refresh()
        lengths = {column.length for column in tail.columns.values()}
        assert len(lengths) <= 1
        read_last_row(path, tmp_path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    tail.refresh()
    assert read_last_row(path, tmp_path) == {}


def test_the_last_row_equals_that_of_the_whole_table() -> None:
    path = Path("metrics.csv").absolute()
    table = CsvTable(path)
    for k in range(5000):
        table.write([{"step": k, "loss": k / 7, "return": ""}])
        if k in (0, 1, 4999):
            row = read_last_row(path, path.parent)
            assert row["step"] == k
            assert row["loss"] == pytest.approx(k / 7)
            assert np.isnan(row["return"])


def test_smoothing_is_a_weighted_mean_of_the_values_so_far() -> None:
    values = np.random.default_rng(0).normal(size=50)
    for weight in (0.0, 0.5, 0.97):
        expected = [np.average(values[: k + 1], weights=weight ** np.arange(k, -1, -1)) for k in range(50)]
        np.testing.assert_allclose(smooth(values, weight), expected)


def test_thinning_keeps_the_extremes() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[[1234, 7777]] = 50, -60
    thin_x, thin_y = thin(x, y, 100)
    assert len(thin_x) <= 102
    assert (thin_y.max(), thin_y.min()) == (50, -60)
    assert (thin_x[0], thin_x[-1]) == (0, 9999)
    assert (np.diff(thin_x) > 0).all()


def test_a_band_covers_the_runs() -> None:
    short, long = (
        Curve("a", np.array([0.0, 10.0]), np.array([0.0, 10.0])),
        Curve("b", np.arange(21.0), np.full(21, 4.0)),
    )
    found = band([short, long], "both")
    assert found.low is not None
    assert found.high is not None
    at = {round(x): k for k, x in enumerate(found.x)}
    assert found.y[at[10]] == pytest.approx(7)
    assert (found.low[at[10]], found.high[at[10]]) == (4, 10)
    assert found.y[at[20]] == 4  # only the longer run has reached this step


def test_runs_are_grouped_by_their_configuration(catch_runs: list[Run]) -> None:
    options = {run.name: run.raw_config for run in catch_runs}
    groups = group_by_config(options)
    assert sorted(map(sorted, groups.values())) == [["a1", "a2"], ["b1"]]
    differing = differing_options(options)
    assert differing["algo.lr"] == {"a1": "0.002", "a2": "0.002", "b1": "0.0001"}
    assert set(differing) == {"algo.lr", "seed"}


def test_the_catalogue_finds_runs_and_studies(view_folder: Path, tmp_path: Path) -> None:
    catalogue = Catalogue([view_folder])
    assert {"a1", "a2", "b1", "lr-study/lr=a-s1"} <= set(catalogue.runs)
    assert list(catalogue.studies) == ["lr-study"]
    summary = catalogue.summary("a1")
    assert (summary.state, summary.steps, summary.envs, summary.seed) == ("finished", 6400, "toy/catch", "1")
    metrics = read_columns(view_folder / "a1" / "metrics.csv")
    assert summary.sort_return == pytest.approx(metrics["return"][-1])
    shutil.copytree(view_folder / "a1", tmp_path / "one" / "damaged")
    (tmp_path / "one" / "damaged" / "config.toml").write_bytes(b"\xff = ")
    os.symlink(view_folder / "a1", tmp_path / "one" / "link")
    small = Catalogue([tmp_path / "one"])
    assert list(small.runs) == ["damaged"]
    assert small.summary("damaged").state.startswith("unreadable")
    two = Catalogue([view_folder, tmp_path / "one"], [view_folder / "a1"])
    assert {"a1", f"{view_folder.name}/a1", "one/damaged"} <= set(two.runs)


def test_trials_of_a_study_include_those_that_are_not_started(view_folder: Path) -> None:
    trials, problem = read_trials(Catalogue([view_folder]), "lr-study")
    assert problem == ""
    states = {trial.name: trial.state for trial in trials}
    assert states == {"lr=a-s1": "finished", "lr=a-s2": "finished", "lr=a-s3": "not started", "lr=b-s1": "finished"}


def test_origins_of_the_configuration_are_stored(catch_runs: list[Run]) -> None:
    origins = run_data.read_origins(catch_runs[0])
    assert origins["steps"] == "given"
    assert origins["algo.discount"] in ("default", "derived")
    assert set(origins) >= {key for key in catch_runs[0].raw_config if key.startswith("algo.")}


def test_a_recorded_game_is_found_by_length_and_return() -> None:
    games = [run_data.GameFile("r.json", k, 0, 9 * k, 9, float(k % 2)) for k in range(10)]
    found = run_data.find_recorded_game(games, 9, 1.0, 0.75)
    assert found is not None
    assert found.number == 7
    assert run_data.find_recorded_game(games, 8, 1.0, 0.75) is None


def test_charts_have_no_keys_that_are_evaluated() -> None:
    """The framework evaluates the values of keys that start with a colon as JavaScript."""
    curve = Curve(":name", np.array([1.0, 10.0]), np.array([0.0, 5.0]), np.array([0.0, 4.0]), np.array([1.0, 6.0]))
    options = charts.line_chart([curve], x_name=":x", y_name=":y", log_x=True, log_y=True, marks=[(1, ":m")])

    def keys(value: object) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(key for inner in value.values() for key in keys(inner))]
        return [key for inner in value for key in keys(inner)] if isinstance(value, list) else []

    assert not [key for key in keys(options) if key.startswith(":")]
    assert options["series"][-1]["data"] == [[1, None], [10, 5]]  # a logarithmic axis cannot show 0
    assert "yellow" not in charts.PALETTE


def test_an_empty_chart_says_so() -> None:
    empty = Curve("a", np.zeros(0), np.zeros(0))
    assert charts.line_chart([empty, empty], x_name="steps")["graphic"]["ignore"] is False
    dots = charts.Dots("one game", np.ones(1), np.ones(1))
    assert charts.line_chart([empty], x_name="steps", dots=[dots])["graphic"]["ignore"] is True


def test_very_many_columns_of_a_table_are_left_out(tmp_path: Path) -> None:
    """Otherwise a short file would need seconds, and space for the rows of each column."""
    header = ",".join(map(str, range(200_000)))
    (tmp_path / "t.csv").write_text(f"{header}\n{header}\n")
    table = TableTail(tmp_path / "t.csv", tmp_path)
    table.refresh()
    assert len(table.columns) == 10_000
    assert table["9999"] == [9_999]
