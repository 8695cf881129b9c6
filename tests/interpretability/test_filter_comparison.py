"""Comparison of convolutions: distances and CKA with known results, and comparisons of real runs."""

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.evaluation.figure_helpers import import_pyplot
from bestiary.interpretability import filter_comparison, layer_similarity
from bestiary.interpretability.filter_comparison import (
    LayerComparison,
    LayerFeatures,
    _draw_figure,
    compare_filters,
    evenly_spaced_checkpoints,
)
from bestiary.interpretability.layer_similarity import convolution_weights, kernel_distance, linear_cka
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError

OPTIONS: dict[str, Any] = {
    "steps": 480,
    "save_every": 160,
    "num_envs": 8,
    "batch_size": 8,
    "runtime": "serial",
    "torso": "resnet",
}
SMALL: dict[str, Any] = {"torso.channels": (4, 4), "torso.width": 16, "rollout_length": 20}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs of agents with convolutions, with three checkpoints each."""
    folder = tmp_path_factory.mktemp("filters")
    return [bestiary.train("toy/catch", run_dir=str(folder / f"c{s}"), seed=s, **OPTIONS, **SMALL) for s in (1, 2)]


def weights(seed=0):
    return torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(seed))


def test_distance_of_weights_that_differ_in_one_entry():
    one = weights()
    other = one.clone()
    other[2, 3, 0, 0] += 2.0
    assert kernel_distance(one, one) == 0
    for match in ("index", "optimal", "filters"):
        assert kernel_distance(one, other, match) == pytest.approx(4.0)


def test_optimal_matching_recovers_a_permutation():
    one = weights()
    filters = one[torch.randperm(6, generator=torch.Generator().manual_seed(1))]
    kernels = one.flatten(0, 1)[torch.randperm(30, generator=torch.Generator().manual_seed(2))].view_as(one)
    assert kernel_distance(one, filters) > 10
    assert kernel_distance(one, filters, "filters") == pytest.approx(0, abs=1e-9)
    assert kernel_distance(one, kernels, "optimal") == pytest.approx(0, abs=1e-9)
    assert kernel_distance(one, kernels, "filters") > 1  # kernels of one filter are no longer in one filter
    assert (
        kernel_distance(one, weights(5), "optimal")
        < kernel_distance(one, weights(5), "filters")
        < kernel_distance(one, weights(5))
    )


def test_cka_of_rotated_partial_and_independent_features():
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1))).Q
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, 3 * x @ turn + 5) == pytest.approx(1)
    assert linear_cka(x, x[:, [0]]) < 0.7
    assert abs(linear_cka(x, torch.randn(50, 7, generator=torch.Generator().manual_seed(3)))) < 0.2
    # As in real layers, there are more features than frames.
    many = torch.randn(2, 50, 5000, generator=torch.Generator().manual_seed(4))
    assert abs(linear_cka(*many)) < 0.1
    assert linear_cka(many[0], many[0] + many[1]) == pytest.approx(0.5, abs=0.1)
    assert np.isnan(linear_cka(x, torch.zeros(50, 2)))


def test_layers_are_sorted_by_number():
    model = {f"torso.{k}.weight": torch.zeros(1, 1, 3, 3) for k in (10, 2, 0)} | {"policy.weight": torch.zeros(2, 3)}
    assert list(convolution_weights(model)) == ["torso.0", "torso.2", "torso.10"]


def test_comparison_of_two_runs_and_of_a_run_over_time(runs: list[Run]) -> None:
    rows = compare_filters(runs, out="f.png", points=2, frames=20, match="filters")
    layers = list(convolution_weights(runs[0].checkpoints[0].load_model()))
    assert len(layers) == 10  # two sections with two blocks each
    assert len(rows) == 2 * len(layers)
    assert {row.steps for row in rows} == {(160, 160), (480, 480)}
    assert all(row.sum and row.per_kernel == pytest.approx(row.sum / row.kernels) for row in rows)
    # A kernel has 3x3 weights.
    assert all(row.per_kernel and row.per_weight == pytest.approx(row.per_kernel / 9) for row in rows)
    assert all(0 < row.cka <= 1 for row in rows if row.cka is not None)
    with Path("f.csv").open() as file:
        written = list(csv.DictReader(file))
    for column in ("sum", "per_kernel", "per_weight"):
        numbers = [getattr(row, column) for row in rows]
        assert [float(row[column]) for row in written] == pytest.approx(numbers, rel=1e-4)
    assert Path("f.png").stat().st_size > 10_000
    same = compare_filters([runs[0], runs[0]], out="same.png", points=1, frames=20)
    assert all(row.sum == 0 and row.cka == pytest.approx(1) for row in same)
    over_time = compare_filters(runs[:1], out="time.png", between="time", frames=0)
    assert [row.steps for row in over_time[:: len(layers)]] == [(160, 320), (320, 480)]
    assert all(row.cka is None for row in over_time)


def test_layers_of_different_shapes_have_cka_but_no_distance(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers with too many kernels, or of different shapes, have no distance; all other layers have one."""
    monkeypatch.setattr(layer_similarity, "MAX_MATCHED_KERNELS", 8)
    rows = compare_filters(runs, out="many.png", points=1, frames=8, match="optimal")
    assert [row.layer for row in rows if row.sum is not None] == ["torso.convolutions.0"]  # 1x4 kernels; others 4x4
    assert all(row.cka is not None for row in rows)
    errors = capsys.readouterr().err
    assert "more than 8 kernels: torso.convolutions.2.first (and 8 more); try --match" in errors
    wide = bestiary.train("toy/catch", run_dir="wide", **{**OPTIONS, **SMALL, "torso.channels": (4, 6)})
    rows = compare_filters([runs[0], wide], out="wide.png", points=1, frames=8)
    assert [row.sum is not None for row in rows] == 5 * [True] + 5 * [False]
    assert all(row.cka is not None for row in rows)
    assert "torso.convolutions.4 (and 4 more): 4x4x3x3 and 6x4x3x3" in capsys.readouterr().err
    with Path("wide.csv").open() as file:
        empty = list(csv.DictReader(file))[-1]
    assert (empty["sum"], empty["per_kernel"], empty["per_weight"]) == ("", "", "")


def test_equal_initial_weights_cause_a_warning(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of the same seed and network start with the same weights; another seed or network does not."""
    same_seed = bestiary.train("toy/catch", run_dir="same", seed=1, lr=1e-3, **OPTIONS, **SMALL)
    wider = bestiary.train("toy/catch", run_dir="wider", seed=1, **OPTIONS, **{**SMALL, "torso.channels": (6, 4)})
    warm = [bestiary.train("toy/catch", run_dir=f"w{s}", seed=s, init_from="same", **OPTIONS) for s in (1, 2)]
    capsys.readouterr()
    for first, other, expected in (
        (runs[0], same_seed, True),
        (runs[0], runs[1], False),
        (runs[0], wider, False),
        (warm[0], warm[1], True),
        (runs[0], warm[0], False),
    ):
        compare_filters([first, other], out="same.png", frames=4, points=1, overwrite=True)
        errors = " ".join(capsys.readouterr().err.split())
        assert ("same initial weights" in errors and "--seed" in errors) == expected
    compare_filters([runs[0], same_seed], out="same.png", frames=0, between="time", overwrite=True)
    assert "initial weights" not in capsys.readouterr().err


def test_cka_frames_continue_over_several_games(runs: list[Run]) -> None:
    features = LayerFeatures(runs[:1])
    features.play(runs[0], 80, seed=0)
    assert features.inputs.observation["image"].shape[:2] == (80, 1)  # a game has nine steps


def test_negative_cka_is_inside_the_axis_limits() -> None:
    rows = [
        LayerComparison("a and b", layer, 0, (1, 1), 4, 1.0, 0.25, 0.1, cka) for layer, cka in (("0", -0.2), ("1", 0.9))
    ]
    plt = import_pyplot()
    figure = _draw_figure(plt, rows, "index", "runs")
    assert figure.axes[-2].get_ylabel() == "CKA"
    assert figure.axes[-2].get_ylim()[0] < -0.2
    assert figure.axes[0].get_ylabel() == "squared difference per weight (index)"
    plt.close(figure)


def test_runs_that_cannot_be_compared_are_refused(
    runs: list[Run], catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="--between runs: needs at least two runs"):
        compare_filters(runs[:1])
    with pytest.raises(UserError, match="no convolutions"):
        compare_filters(catch_runs)
    pong = bestiary.load("zoo/pong")
    with pytest.raises(UserError, match=r"different shapes: torso.convolutions.0.*: .* and "):
        compare_filters([pong, runs[0]], out="x.png")
    monkeypatch.setattr(layer_similarity, "MAX_MATCHED_KERNELS", 2)
    with pytest.raises(UserError, match=r"more than 2 kernels: .*--match filters"):
        compare_filters(runs, out="x.png", match="optimal", frames=0)
    with pytest.raises(UserError, match="only one checkpoint"):
        compare_filters([pong], between="time")
    assert [c.steps for c in evenly_spaced_checkpoints(runs[0], 2)] == [160, 480]
    assert [c.steps for c in evenly_spaced_checkpoints(runs[0], 1)] == [480]
    assert not Path("x.png").exists()


def test_checkpoints_are_paired_at_equal_fractions_of_training() -> None:
    def run_with_checkpoints(*steps: int) -> Any:
        return SimpleNamespace(checkpoints=[SimpleNamespace(steps=at) for at in steps])

    def pairs(first: Any, second: Any) -> list[tuple[int, int]]:
        return [(one.steps, at) for one, at in filter_comparison._pair_by_fraction(first.checkpoints, second)]

    even = run_with_checkpoints(100, 200, 300, 400)
    assert pairs(even, run_with_checkpoints(30, 100, 190, 300, 390, 400)) == [
        (100, 100),
        (200, 190),
        (300, 300),
        (400, 400),
    ]
    assert pairs(even, run_with_checkpoints(2000, 4000, 6000, 8000)) == [
        (100, 2000),
        (200, 4000),
        (300, 6000),
        (400, 8000),
    ]
    assert pairs(even, run_with_checkpoints(390, 400)) == [(300, 390), (400, 400)]
    assert pairs(even, run_with_checkpoints(7)) == [(400, 7)]
