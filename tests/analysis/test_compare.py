"""Curves: grouping by config minus seed, values against a slow statement, files."""

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.analysis.compare import _binned, compare, draw, games_of, group_runs, labels
from bestiary.errors import UserError
from bestiary.options import span
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
    assert min(imageio.imread("curves.png").shape[:2]) > 500
    with Path("curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} == {"algo.lr 0.002", "algo.lr 0.0001"}
    assert "last tenth" in capsys.readouterr().out
    with pytest.raises(UserError, match="exist; choose another"):
        compare(catch_runs, Path("curves.png"))
    compare(catch_runs, Path("curves.png"), axis="minutes", overwrite=True)


def test_what_only_one_of_them_has_set_tells_them_apart() -> None:
    """Every configuration has a name of its own: of two with the same one, one would be lost."""
    base = {"env": ["atari/Pong"], "memory": "none"}
    others = ({"init_from": "runs/a"}, {"init_from": "runs/b"}, {"memory": "lstm", "memory.size": 9})
    found = labels([json.dumps({**base, **other}) for other in ({}, *others)])
    assert found[:3] == [f"memory none, init_from {source}" for source in ("none", "runs/a", "runs/b")]
    assert len(set(found)) == 4


def test_labels_name_what_differs_environments_first() -> None:
    base = {"env": ["toy/catch"], "steps": 10, "memory": "lstm", "memory.hidden": 3, "algo.lr": 0.1}
    others = [{**base, "env": ["toy/chain"], "steps": 20}, {**base, "memory": "none"}, {**base, "memory.hidden": 4}]
    found = labels([json.dumps(settings) for settings in (base, *others)])
    assert found == [
        "toy/catch, memory lstm, memory.hidden 3",
        "toy/chain, memory lstm, memory.hidden 3",
        "toy/catch, memory none, memory.hidden 3",
        "toy/catch, memory lstm, memory.hidden 4",
    ]


def test_users_parts_are_compared_by_content_and_without_running_them(tmp_path: Path) -> None:
    net = "import torch.nn as nn\nclass Net(nn.Identity):\n    def __init__(self, spec):\n        super().__init__()\n"
    net += "        self.output_size = 8\n    def forward(self, observation):\n        return observation['vector']\n"
    runs = []
    for seed, source in ((1, net), (2, net), (3, net + "# another\n")):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "net.py").write_text(source)
        options: dict[str, Any] = {
            "torso": f"{folder}/net.py:Net",
            "seed": seed,
            "run_dir": str(folder / "run"),
            "steps": 1_280,
        }
        runs.append(bestiary.train("toy/chain", runtime="serial", **options))
        (folder / "net.py").unlink()
    same, other = group_runs([bestiary.load(str(run.path)) for run in runs])
    assert (len(same.runs), len(other.runs)) == (2, 1)


def test_a_closer_look_and_dashed_lines(catch_runs: list[Run]) -> None:
    groups = group_runs(catch_runs)
    draw({"": groups}, Path("plain.png"))
    draw({"": groups}, Path("close.png"), flat=[groups[0].label], zoom=(1_000, 2_000))
    plain, close = (imageio.imread(f"{name}.png") for name in ("plain", "close"))
    assert close.shape[1] > 1.1 * plain.shape[1]  # two panels
    assert span("2M:4M") == (2e6, 4e6)
    for wrong in ("4M:2M", "2M", "a:b", ":", "-1:2"):
        with pytest.raises(ValueError, match="such as 2M:4M"):
            span(wrong)


def test_what_cannot_be_drawn(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="figures are"):
        compare(catch_runs, Path("curves.xls"))


def test_a_panel_for_each_task_against_steps_of_that_task(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 4, "torso": "mlp", "log_every": 400}
    both = bestiary.train("procgen/{starpilot,leaper}:easy", run_dir="both", steps=2_400, popart=True, **options)
    alone = bestiary.train("procgen/starpilot:easy", run_dir="alone", steps=1_200, **options)
    panels = compare([both, alone], Path("tasks.png"))  # by task without being asked: there is no common mean
    assert list(panels) == ["procgen/starpilot:easy", "procgen/leaper:easy"]
    assert [group.label.split(",")[0] for group in panels["procgen/starpilot:easy"]] == ["2 tasks", "one task"]
    assert [len(groups) for groups in panels.values()] == [2, 1]
    for group in panels["procgen/starpilot:easy"]:
        assert group.x[-1] <= 1_200  # of this task
    steps, returns = games_of(both, "procgen/leaper:easy")
    rows = [i for i, task in enumerate(both.episodes["task"]) if task == "procgen/leaper:easy"]
    assert len(steps) == len([i for i in rows if both.episodes["game_over"][i]])
    assert panels["procgen/leaper:easy"][0].final()[0] == pytest.approx(returns[steps >= 0.9 * steps.max()].mean())
    assert {p.name for p in Path().glob("tasks*")} == {"tasks.png", "tasks.csv", "tasks-popart.png"}
    with Path("tasks.csv").open() as file:
        assert {row["task"] for row in csv.DictReader(file)} == {"procgen/starpilot:easy", "procgen/leaper:easy"}
    assert "procgen/leaper:easy" in capsys.readouterr().out
    with pytest.raises(UserError, match="no common mean"):
        games_of(both)


def test_a_task_that_has_finished_no_game_yet_does_not_lend_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Of two tasks one has finished games: the curve is that one's, against its own steps, and the other is named."""
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 4, "torso": "mlp", "steps": 800}
    run = bestiary.train("procgen/{maze,leaper}:easy", run_dir="two", **options)
    path = run.path / "episodes.csv"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if "maze" not in row))
    run = bestiary.load("two")
    panels = compare([run], Path("one.png"))
    assert list(panels) == ["procgen/leaper:easy"]
    assert panels["procgen/leaper:easy"][0].x[-1] <= 400
    assert "two has not finished a game of procgen/maze:easy yet" in capsys.readouterr().err
    with pytest.raises(UserError, match="no common mean"):
        games_of(run)
