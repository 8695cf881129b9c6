"""Filters: distances whose answers are known, alignment, and the comparisons that can be asked for."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.analysis.filters import convolutions, distance, linear_cka, look_filters, spaced
from bestiary.errors import UserError
from bestiary.runs.folder import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two agents with convolutions and three checkpoints each."""
    folder = tmp_path_factory.mktemp("filters")
    options: dict[str, Any] = {
        "steps": 480,
        "save_every": 160,
        "num_envs": 8,
        "batch_size": 8,
        "runtime": "serial",
        "torso": "resnet",
    }
    more: dict[str, Any] = {"torso.channels": (4, 4), "torso.width": 16, "unroll_length": 20}
    return [bestiary.train("toy/catch", run_dir=str(folder / f"c{s}"), seed=s, **options, **more) for s in (1, 2)]


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
    assert all(row.sum > 0 and row.mean == pytest.approx(row.sum / row.kernels) for row in rows)
    assert all(0 < row.cka <= 1 for row in rows if row.cka is not None)
    with Path("f.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [float(row["sum"]) for row in written] == pytest.approx([row.sum for row in rows], rel=1e-4)
    assert Path("f.png").stat().st_size > 10_000
    same = look_filters([runs[0], runs[0]], out="same.png", points=1, frames=20)
    assert all(row.sum == 0 and row.cka == pytest.approx(1) for row in same)
    over_time = look_filters(runs[:1], out="time.png", between="time", frames=0)
    assert [row.steps for row in over_time[:: len(layers)]] == [(160, 320), (320, 480)]
    assert all(row.cka is None for row in over_time)


def test_what_cannot_be_compared(runs: list[Run], catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="needs two runs or more"):
        look_filters(runs[:1])
    with pytest.raises(UserError, match="no convolutions to compare"):
        look_filters(catch_runs)
    pong = bestiary.load("zoo/pong")
    with pytest.raises(UserError, match=r"different shapes cannot be compared: torso.convolutions.0 is .* and "):
        look_filters([pong, runs[0]], out="x.png")
    with pytest.raises(UserError, match="has one checkpoint"):
        look_filters([pong], between="time")
    assert [c.steps for c in spaced(runs[0], 2)] == [160, 480]
    assert [c.steps for c in spaced(runs[0], 1)] == [480]
    assert not Path("x.png").exists()
