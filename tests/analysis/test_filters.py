"""Filters: distances whose answers are known, alignment, and the comparisons that can be asked for."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.analysis import filters
from bestiary.analysis.figures import pyplot
from bestiary.analysis.filters import Frames, Row, _figure, convolutions, distance, linear_cka, look_filters, spaced
from bestiary.errors import UserError
from bestiary.runs.folder import Run

OPTIONS: dict[str, Any] = {
    "steps": 480,
    "save_every": 160,
    "num_envs": 8,
    "batch_size": 8,
    "runtime": "serial",
    "torso": "resnet",
}
SMALL: dict[str, Any] = {"torso.channels": (4, 4), "torso.width": 16, "unroll_length": 20}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two agents with convolutions and three checkpoints each."""
    folder = tmp_path_factory.mktemp("filters")
    return [bestiary.train("toy/catch", run_dir=str(folder / f"c{s}"), seed=s, **OPTIONS, **SMALL) for s in (1, 2)]


def weights(seed=0):
    return torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(seed))


def test_distances_by_hand():
    one = weights()
    other = one.clone()
    other[2, 3, 0, 0] += 2.0
    assert distance(one, one) == 0
    for match in ("index", "optimal", "filters"):
        assert distance(one, other, match) == pytest.approx(4.0)


def test_optimal_matching_recovers_a_permutation():
    one = weights()
    filters = one[torch.randperm(6, generator=torch.Generator().manual_seed(1))]
    kernels = one.flatten(0, 1)[torch.randperm(30, generator=torch.Generator().manual_seed(2))].view_as(one)
    assert distance(one, filters) > 10
    assert distance(one, filters, "filters") == pytest.approx(0, abs=1e-9)
    assert distance(one, kernels, "optimal") == pytest.approx(0, abs=1e-9)
    assert distance(one, kernels, "filters") > 1  # these do not belong together any more
    assert distance(one, weights(5), "optimal") < distance(one, weights(5), "filters") < distance(one, weights(5))


def test_alignment():
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1))).Q
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, 3 * x @ turn + 5) == pytest.approx(1)
    assert linear_cka(x, x[:, [0]]) < 0.7
    assert abs(linear_cka(x, torch.randn(50, 7, generator=torch.Generator().manual_seed(3)))) < 0.2
    many = torch.randn(
        2, 50, 5000, generator=torch.Generator().manual_seed(4)
    )  # as layers are: more numbers than frames
    assert abs(linear_cka(*many)) < 0.1
    assert linear_cka(many[0], many[0] + many[1]) == pytest.approx(0.5, abs=0.1)
    assert np.isnan(linear_cka(x, torch.zeros(50, 2)))


def test_layers_are_in_the_order_of_their_numbers():
    model = {f"torso.{k}.weight": torch.zeros(1, 1, 3, 3) for k in (10, 2, 0)} | {"policy.weight": torch.zeros(2, 3)}
    assert list(convolutions(model)) == ["torso.0", "torso.2", "torso.10"]


def test_runs_and_time(runs: list[Run]) -> None:
    rows = look_filters(runs, out="f.png", points=2, frames=20, match="filters")
    layers = list(convolutions(runs[0].checkpoints[0].model()))
    assert len(layers) == 10  # of two sections with two blocks
    assert len(rows) == 2 * len(layers)
    assert {row.steps for row in rows} == {(160, 160), (480, 480)}
    assert all(row.sum and row.per_kernel == pytest.approx(row.sum / row.kernels) for row in rows)
    assert all(row.per_kernel and row.per_weight == pytest.approx(row.per_kernel / 9) for row in rows)  # of 3x3 each
    assert all(0 < row.cka <= 1 for row in rows if row.cka is not None)
    with Path("f.csv").open() as file:
        written = list(csv.DictReader(file))
    for column in ("sum", "per_kernel", "per_weight"):
        numbers = [getattr(row, column) for row in rows]
        assert [float(row[column]) for row in written] == pytest.approx(numbers, rel=1e-4)
    assert Path("f.png").stat().st_size > 10_000
    same = look_filters([runs[0], runs[0]], out="same.png", points=1, frames=20)
    assert all(row.sum == 0 and row.cka == pytest.approx(1) for row in same)
    over_time = look_filters(runs[:1], out="time.png", between="time", frames=0)
    assert [row.steps for row in over_time[:: len(layers)]] == [(160, 320), (320, 480)]
    assert all(row.cka is None for row in over_time)


def test_layers_without_a_distance_are_left_empty(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too many kernels to match, or another shape: the others are compared, and CKA needs neither."""
    monkeypatch.setattr(filters, "MANY", 8)
    rows = look_filters(runs, out="many.png", points=1, frames=8, match="optimal")
    assert [row.layer for row in rows if row.sum is not None] == ["torso.convolutions.0"]  # 1x4 kernels; others 4x4
    assert all(row.cka is not None for row in rows)
    assert "torso.convolutions.2.first (and 8 more): more than 8 kernels; try --match" in capsys.readouterr().err
    wide = bestiary.train("toy/catch", run_dir="wide", **{**OPTIONS, **SMALL, "torso.channels": (4, 6)})
    rows = look_filters([runs[0], wide], out="wide.png", points=1, frames=8)
    assert [row.sum is not None for row in rows] == 5 * [True] + 5 * [False]
    assert all(row.cka is not None for row in rows)
    assert "torso.convolutions.4 (and 4 more): 4x4x3x3 and 6x4x3x3" in capsys.readouterr().err
    with Path("wide.csv").open() as file:
        empty = list(csv.DictReader(file))[-1]
    assert (empty["sum"], empty["per_kernel"], empty["per_weight"]) == ("", "", "")


def test_frames_are_of_game_after_game(runs: list[Run]) -> None:
    lens = Frames(runs[:1])
    lens.play(runs[0], 80, seed=0)
    assert lens.inputs.observation["image"].shape[:2] == (80, 1)  # games of nine steps


def test_an_alignment_below_zero_is_drawn() -> None:
    rows = [Row("a and b", layer, 0, (1, 1), 4, 1.0, 0.25, 0.1, cka) for layer, cka in (("0", -0.2), ("1", 0.9))]
    plt = pyplot()
    figure = _figure(plt, rows, "index", "runs")
    assert figure.axes[-2].get_ylabel() == "CKA"
    assert figure.axes[-2].get_ylim()[0] < -0.2
    assert figure.axes[0].get_ylabel() == "squared difference per weight (index)"
    plt.close(figure)


def test_what_cannot_be_compared(runs: list[Run], catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs two runs or more"):
        look_filters(runs[:1])
    with pytest.raises(UserError, match="no convolutions to compare"):
        look_filters(catch_runs)
    pong = bestiary.load("zoo/pong")
    with pytest.raises(UserError, match=r"different shapes have no distance: torso.convolutions.0.*: .* and "):
        look_filters([pong, runs[0]], out="x.png")
    monkeypatch.setattr(filters, "MANY", 2)
    with pytest.raises(UserError, match="more than 2 kernels; try --match filters"):
        look_filters(runs, out="x.png", match="optimal", frames=0)
    with pytest.raises(UserError, match="has one checkpoint"):
        look_filters([pong], between="time")
    assert [c.steps for c in spaced(runs[0], 2)] == [160, 480]
    assert [c.steps for c in spaced(runs[0], 1)] == [480]
    assert not Path("x.png").exists()


def test_checkpoints_are_compared_at_equal_fractions_of_their_trainings() -> None:
    def trained(*steps: int) -> Any:
        return SimpleNamespace(checkpoints=[SimpleNamespace(steps=at) for at in steps])

    def pairs(first: Any, second: Any) -> list[tuple[int, int]]:
        return [(one.steps, at) for one, at in filters._abreast(first.checkpoints, second)]

    even = trained(100, 200, 300, 400)
    assert pairs(even, trained(30, 100, 190, 300, 390, 400)) == [(100, 100), (200, 190), (300, 300), (400, 400)]
    assert pairs(even, trained(2000, 4000, 6000, 8000)) == [(100, 2000), (200, 4000), (300, 6000), (400, 8000)]
    assert pairs(even, trained(390, 400)) == [(300, 390), (400, 400)]
    assert pairs(even, trained(7)) == [(400, 7)]
