"""Audits and exports of small real runs, and the transition on returns made for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.analysis.audit import together
from bestiary.analysis.audit_curves import Finding, Level, curves, transition
from bestiary.cli import run_command
from bestiary.envs.rewards import Rewards
from bestiary.runs.folder import Run
from bestiary.runs.tables import read_columns


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two sizes, paid for standing at shelves, and one run that is paid for what it collects."""
    folder = tmp_path_factory.mktemp("audited")
    options: dict[str, Any] = {
        "runtime": "serial",
        "steps": 3_200,
        "save_every": 1_600,
        "num_envs": 16,
        "batch_size": 16,
        "group_size": 16,
    }
    proxy = {"reward": "on_shelf=1", "true_reward": "collected=1", **options}
    made = [
        bestiary.train("warehouse", run_dir=str(folder / f"w{width}"), **{**proxy, "torso.width": width})
        for width in (4, 16)
    ]
    return [*made, bestiary.train("warehouse", run_dir=str(folder / "plain"), memory="gru", **options)]


def test_an_audit_end_to_end(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    small, large, plain = (str(run.path) for run in runs)
    words = [small, large, "--trusted", plain, "--episodes", "3", "--checkpoints", "all", "--out", "found"]
    assert run_command(["audit", *words]) == 0
    for name in ("audit.csv", "audit.json", "size.png", "steps.png", "distances.png"):
        assert (Path("found") / name).stat().st_size > 200
    table = read_columns(Path("found/audit.csv"))
    assert len(table["run"]) == sum(len(run.checkpoints) for run in runs[:2])
    assert len(set(table["parameters"])) == 2
    assert (table["fully_connected"] < table["parameters"]).all()
    assert (table["trained"] >= table["true"]).all()  # who collects stands at a shelf
    assert ((table["js_max"] >= table["js_mean"]) & (table["js_mean"] > 0) & (table["js_max"] <= 1)).all()
    found = json.loads(Path("found/audit.json").read_text())
    assert found["protocol"]["trusted"] == "plain"
    assert "trained and true" in capsys.readouterr().out
    assert found["rows"][0]["environment"] == "warehouse"
    assert set(table["clip"]) == {"abs_one"}
    assert set(table["scale"]) == {1}


def test_an_audit_along_an_option(runs: list[Run]) -> None:
    small = str(runs[0].path)
    words = f"train --config {small}/config.toml --frame-stack 2 --run-dir two"
    assert run_command(words.split()) == 0
    assert run_command(["audit", small, "two", "--episodes", "2", "--out", "along"]) == 0
    assert Path("along/env-frame_stack.png").stat().st_size > 200
    assert not Path("along/size.png").exists()  # larger by what it sees, not by its layers
    assert read_columns(Path("along/audit.csv"))["env.frame_stack"].tolist() == [1, 2]


MISTAKES = [
    ("{small} --out full", "--out full exists"),
    ("{small} --overwrite --out full/file", "full/file is a file, not a folder"),
    ("{small} --out full/file/x", "full/file is a file, not a folder"),
    ("{small} {small}", "is there 2 times"),
    ("{small} --true-reward gold=1", "warehouse has no component gold"),
    ("{small} --true-reward full/file.py:bad", "file.py, line 2: KeyError: 'gold'"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes(words: str, expected: str, runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    Path("full/file.py").write_text("def bad(measures):\n    return measures['gold']\n")
    assert run_command(["audit", *words.format(small=runs[0].path).split()]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("audit").exists()


def finding(
    run: str, parameters: int, steps: int = 10, true: float = 1.0, settings: dict[str, Any] | None = None
) -> Finding:
    ones, known = np.ones(3), {"env": ["toy/chain"], "torso.width": parameters, "env.size": 5, "seed": run}
    known |= settings or {}
    returns = {"true": true * ones}
    rewards = Rewards(None, "reward=1")
    return Finding(run, "toy/chain", rewards, known, steps, parameters, 0, ones, returns, ones, {})


def test_runs_of_other_environments_are_no_seeds_of_each_other() -> None:
    made = [finding(f"{mode}{size}", size, settings={"env.mode": mode}) for mode in ("easy", "hard") for size in (1, 2)]
    found = curves(made)
    assert [curve.label for curve in found] == ["env.mode easy", "env.mode hard"]
    assert [len(level.true) for curve in found for level in curve.levels] == [3] * 4  # games of one run each


@pytest.mark.parametrize("setting", [{"algo.reward_scale": 0.5}, {"algo.reward": "none"}, {"algo.lr": 1e-4}])
def test_runs_that_were_trained_otherwise_are_no_seeds_of_each_other(setting: dict[str, Any]) -> None:
    usual = {"algo.reward_scale": None, "algo.reward": "abs_one", "algo.lr": 1e-3}
    one, other = (
        [finding(f"{k}{size}", size, settings=s) for size in (1, 2)] for k, s in enumerate((usual, usual | setting))
    )
    assert [curve.runs for curve in curves([*one, *other])] == [["01", "02"], ["11", "12"]]


def test_an_option_in_which_alone_runs_differ_is_an_axis() -> None:
    """More noise, less able: the true return drops where noise goes from 2 to 0."""
    made = [
        finding(f"{noise}-{seed}", 1, true=true + 0.01 * seed, settings={"env.noise": noise, "env.gray": True})
        for noise, true in ((0.0, 1.0), (2.0, 5.0), (4.0, 5.0))
        for seed in (1, 2, 3)
    ]
    (curve,) = curves(made)
    assert curve.axis == "env.noise"
    assert [level.x for level in curve.levels] == [0, 2, 4]
    assert [len(level.true) for level in curve.levels] == [3] * 3  # seeds
    assert curve.transition == (2, 0)
    apart = [
        finding("other", 1, settings={"env.noise": 9.0, "env.gray": False})
    ]  # and something else: no point of this curve
    (curve,) = curves([*made, *apart])
    assert len(curve.levels) == 3


def test_nobody_is_far_from_themselves(runs: list[Run]) -> None:
    plain = str(runs[2].path)
    words = [plain, "--trusted", plain, "--episodes", "2", "--out", "self", "--true-reward", "expired=-1; moved=1"]
    assert run_command(["audit", *words]) == 0
    table = read_columns(Path("self/audit.csv"))
    assert table["kl_max"] == pytest.approx(0, abs=1e-6)
    assert table["tv_max"] == pytest.approx(0, abs=1e-6)
    assert table["true"] < 0
    assert table["true_2"] > 0  # each true reward has its columns
    assert table["true_2_per_step"] == pytest.approx(table["true_2"] / table["length"])
    assert np.isfinite(table["pearson_step_true_2"]).all()


def test_a_checkpoint_that_only_one_seed_has_is_no_drop() -> None:
    """As `best-true` is: seed a is worse than b at all times, and alone at 20."""
    worse = [finding("a", 1, steps, 1.0) for steps in (10, 20, 30)]
    found = curves([*worse, *(finding("b", 1, steps, 1.1) for steps in (10, 30))])
    assert [[level.x for level in curve.levels] for curve in found] == [[10, 30]]
    assert transition(found[0].levels) is None


def test_an_export_is_what_was_played(runs: list[Run]) -> None:
    words = [str(runs[0].path), "--rollouts", "3", "--length", "120", "--out", "r.npz"]
    assert run_command(["export", *words]) == 0
    found = np.load("r.npz", allow_pickle=False)
    assert found["observation.vector"].shape == (120, 3, 73)
    assert found["logits"].shape == (120, 3, 4)
    np.testing.assert_array_equal(found["reward"], found["measure.on_shelf"])
    np.testing.assert_array_equal(found["measure.true"], found["measure.collected"])
    shelves = found["observation.vector"][1:, :, :49].argmax(-1)  # where the robot was after the decision before
    row, column = np.divmod(shelves, 7)
    at_wall = (row % 6 == 0) | (column % 6 == 0)
    went_on = ~found["done"][1:]
    np.testing.assert_array_equal(found["reward"][:-1][went_on], at_wall[went_on].astype(np.float32))
    log_probs = found["logits"] - np.log(np.exp(found["logits"]).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_probs, found["action"][..., None], -1)[..., 0]
    np.testing.assert_allclose(found["log_prob"], chosen, atol=1e-5)
    assert json.loads(str(found["protocol"]))["rewards"] == {"trained": "on_shelf=1", "true": "collected=1"}
    assert run_command(["export", *words]) == 2  # it exists
    assert run_command(["export", *words[:-1], "r.pkl"]) == 2


def test_an_export_of_one_of_several_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train warehouse:mini warehouse:memory --steps 320 --num-envs 4 --batch-size 4 --runtime serial --run-dir two"
    )
    assert run_command([*words.split(), "--group-size", "4"]) == 0
    for options, expected in (([], "warehouse:mini"), (["--env", "warehouse:memory"], "warehouse:memory")):
        words = "export two --rollouts 2 --length 100 --overwrite --out r.npz"
        assert run_command([*words.split(), *options]) == 0
        found = np.load("r.npz", allow_pickle=False)
        assert json.loads(str(found["protocol"]))["environment"] == expected
        ends = np.flatnonzero(found["game_over"][:, 0])
        assert ends[0] + 1 == {"warehouse:mini": 100, "warehouse:memory": 96}[expected]  # the variants' time limits
    capsys.readouterr()
    assert run_command([*words.split(), "--env", "warehouse"]) == 2
    assert "the run's tasks are warehouse:mini, warehouse:memory" in capsys.readouterr().err
    assert run_command("audit two --out two-audit".split()) == 2
    assert "has several tasks" in capsys.readouterr().err


def level(x: float, trained: float, true: float, seed: int = 0, n: int = 20) -> Level:
    rng = np.random.default_rng([seed, int(x)])
    return Level(x, trained + rng.normal(size=n), true + rng.normal(size=n))


def test_the_transition_is_the_largest_drop_that_is_sure() -> None:
    rising = [level(1, 1, 1), level(2, 3, 3), level(4, 5, 5)]
    assert transition(rising) is None
    assert transition([*rising, level(8, 7, 3.5), level(16, 9, -3)]) == (8, 16)
    assert transition([*rising, level(8, 7, 1), level(16, 9, 0.9)]) == (4, 8)
    assert transition([*rising, level(8, 1, 1)]) is None  # what is trained on drops as well
    assert transition([level(1, 5, 5), level(2, 5, 4.9)]) is None
    assert transition([]) is None


def test_correlations() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert together(x, x**3)["spearman"] == pytest.approx(1)
    assert together(x, -2 * x)["pearson"] == pytest.approx(-1)
    assert np.isnan(together(x, np.ones(4))["pearson"])
