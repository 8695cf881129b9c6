"""Curves: grouping by config minus seed, values against a slow statement, files."""

import csv
import itertools
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from bestiary.analysis.compare import _binned, compare, games_of, group_runs
from bestiary.errors import UserError
from bestiary.runs.folder import Run


def test_runs_that_differ_in_their_seed_are_one_group(catch_runs: list[Run]) -> None:
    a, b = group_runs(catch_runs)
    assert [run.path.name for run in a.runs] == ["a1", "a2"]
    assert [run.path.name for run in b.runs] == ["b1"]
    assert (a.label, b.label) == ("algo.lr 0.002", "algo.lr 0.0001")
    some = ~np.isnan(a.mean)
    assert some.sum() > 150
    assert (a.low <= a.mean + 1e-9)[some].all()
    assert (a.mean <= a.high + 1e-9)[some].all()
    steps, returns = games_of(catch_runs[0])
    last_tenth = [r for s, r in zip(steps, returns, strict=True) if s >= 0.9 * max(steps)]
    assert a.final()[0] == pytest.approx(np.mean(last_tenth))


def test_bins_against_a_slow_statement() -> None:
    rng = np.random.default_rng(0)
    places, values = np.sort(rng.uniform(0, 100, 5_000)), rng.normal(size=5_000)
    grid = np.linspace(0, 100, 21)
    slow = [values[(places >= low) & (places <= high)].mean() for low, high in itertools.pairwise(grid)]
    np.testing.assert_allclose(_binned(places, values, grid), slow)
    few = _binned(places[::1000], values[::1000], grid)  # windows grow where games are few, but not beyond the last
    np.testing.assert_array_equal(np.isfinite(few), grid[1:] <= places[4000] + 5)


def test_files_and_table(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    compare(catch_runs, Path("curves.png"))
    assert imageio.imread("curves.png").shape[:2] == (630, 1050)
    with Path("curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} == {"algo.lr 0.002", "algo.lr 0.0001"}
    assert "last tenth" in capsys.readouterr().out
    with pytest.raises(UserError, match="exist; choose another"):
        compare(catch_runs, Path("curves.png"))
    compare(catch_runs, Path("curves.png"), axis="minutes", overwrite=True)


def test_what_cannot_be_drawn(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="figures are"):
        compare(catch_runs, Path("curves.xls"))
