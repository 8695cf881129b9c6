"""Reward audits and exports of small real runs, and curves and drops of constructed returns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.envs.rewards.wrapper import RewardConfig
from bestiary.reward_audit.audit import correlations
from bestiary.reward_audit.curves import AuditRow, CurvePoint, find_true_return_drop, make_curves
from bestiary.runs.csv_tables import read_columns
from bestiary.runs.run import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two network sizes trained on a proxy reward, and one run trained on the true reward."""
    folder = tmp_path_factory.mktemp("audited")
    options: dict[str, Any] = {
        "runtime": "serial",
        "steps": 3_200,
        "save_every": 1_600,
        "num_envs": 16,
        "batch_size": 16,
        "micro_batch_size": 16,
    }
    proxy = {"reward": "on_shelf=1", "true_reward": "collected=1", **options}
    proxy_runs = [
        bestiary.train("warehouse", run_dir=str(folder / f"w{width}"), **{**proxy, "torso.width": width})
        for width in (4, 16)
    ]
    return [*proxy_runs, bestiary.train("warehouse", run_dir=str(folder / "plain"), memory="gru", **options)]


def test_audit_writes_tables_and_figures(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    small, large, plain = (str(run.path) for run in runs)
    words = [small, large, "--trusted", plain, "--episodes", "3", "--checkpoints", "all", "--out", "found"]
    assert run_command(["audit", *words]) == 0
    for name in ("audit.csv", "audit.json", "size.png", "steps.png", "distances.png"):
        assert (Path("found") / name).stat().st_size > 200
    table = read_columns(Path("found/audit.csv"))
    assert len(table["run"]) == sum(len(run.checkpoints) for run in runs[:2])
    assert len(set(table["parameters"])) == 2
    assert (table["fc_parameters"] < table["parameters"]).all()
    assert (table["training"] >= table["true"]).all()  # items can be collected only at shelves
    assert ((table["js_max"] >= table["js_mean"]) & (table["js_mean"] > 0) & (table["js_max"] <= 1)).all()
    found = json.loads(Path("found/audit.json").read_text())
    assert found["protocol"]["trusted"] == "plain"
    printed = capsys.readouterr()
    assert "training and true returns" in printed.out
    # Each size has one run, so drops are not tested, and the reason is given.
    assert found["true_return_drops"] == []
    assert {curve["axis"] for curve in found["untested"]} == {"fc_parameters", "steps"}
    assert "one run at each point" in found["untested"][0]["reason"]
    assert "note: curve over steps: one run at each point" in printed.err
    assert set(table["interval"]) == {"Student's t, over games"}
    assert found["rows"][0]["environment"] == "warehouse"
    assert set(table["reward_clipping"]) == {"abs_one"}
    assert set(table["reward_scale"]) == {1}


def test_audit_along_an_environment_option(runs: list[Run]) -> None:
    small = str(runs[0].path)
    words = f"train --config {small}/config.toml --frame-stack 2 --run-dir two"
    assert run_command(words.split()) == 0
    assert run_command(["audit", small, "two", "--episodes", "2", "--out", "along"]) == 0
    assert Path("along/env-frame_stack.png").stat().st_size > 200
    assert not Path("along/size.png").exists()  # only the input is larger, not the layers
    assert read_columns(Path("along/audit.csv"))["env.frame_stack"].tolist() == [1, 2]


MISTAKES = [
    ("{small} --out full", "--out full: the folder is not empty"),
    ("{small} --overwrite --out full/file", "full/file is a file, not a folder"),
    ("{small} --out full/file/x", "full/file is a file, not a folder"),
    ("{small} {small}", "is listed 2 times"),
    ("{small} --true-reward gold=1", "warehouse has no component gold"),
    ("{small} --true-reward full/file.py:bad", "file.py, line 2: KeyError: 'gold'"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_wrong_arguments_are_refused(
    words: str, expected: str, runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    Path("full/file.py").write_text("def bad(measures):\n    return measures['gold']\n")
    assert run_command(["audit", *words.format(small=runs[0].path).split()]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("audit").exists()


def audit_row(
    run: str, parameters: int, steps: int = 10, true: float = 1.0, settings: dict[str, Any] | None = None
) -> AuditRow:
    """Return the row of a run with three games of the given true return."""
    ones, known = np.ones(3), {"env": ["toy/chain"], "torso.width": parameters, "env.size": 5, "seed": run}
    known |= settings or {}
    returns = {"true": true * ones}
    rewards = RewardConfig(None, "reward=1")
    return AuditRow(run, "toy/chain", rewards, known, steps, parameters, 0, ones, returns, ones, {})


def test_runs_of_different_environments_form_separate_curves() -> None:
    rows = [
        audit_row(f"{mode}{size}", size, settings={"env.mode": mode}) for mode in ("easy", "hard") for size in (1, 2)
    ]
    found = make_curves(rows)
    assert [curve.label for curve in found] == ["env.mode easy", "env.mode hard"]
    assert [len(point.true) for curve in found for point in curve.points] == [3] * 4  # the games of one run


@pytest.mark.parametrize("setting", [{"algo.reward_scale": 0.5}, {"algo.reward_clipping": "none"}, {"algo.lr": 1e-4}])
def test_runs_with_different_training_options_form_separate_curves(setting: dict[str, Any]) -> None:
    default = {"algo.reward_scale": None, "algo.reward_clipping": "abs_one", "algo.lr": 1e-3}
    one, other = (
        [audit_row(f"{k}{size}", size, settings=s) for size in (1, 2)]
        for k, s in enumerate((default, default | setting))
    )
    assert [curve.runs for curve in make_curves([*one, *other])] == [["01", "02"], ["11", "12"]]


def test_the_only_environment_option_in_which_runs_differ_is_an_axis() -> None:
    """Less noise makes the agent more capable: the true return drops from noise 2 to noise 0."""
    rows = [
        audit_row(f"{noise}-{seed}", 1, true=true + 0.01 * seed, settings={"env.noise": noise, "env.gray": True})
        for noise, true in ((0.0, 1.0), (2.0, 5.0), (4.0, 5.0))
        for seed in (1, 2, 3)
    ]
    (curve,) = make_curves(rows)
    assert curve.axis == "env.noise"
    assert [point.x for point in curve.points] == [0, 2, 4]
    assert [len(point.true) for point in curve.points] == [3] * 3  # seeds
    assert curve.true_return_drop is not None
    assert (curve.true_return_drop.before, curve.true_return_drop.after) == (2, 0)
    # A run that differs in a second option does not belong to this curve.
    other = audit_row("other", 1, settings={"env.noise": 9.0, "env.gray": False})
    (curve,) = make_curves([*rows, other])
    assert len(curve.points) == 3


def test_distance_of_a_run_from_itself_is_zero(runs: list[Run]) -> None:
    plain = str(runs[2].path)
    words = [plain, "--trusted", plain, "--episodes", "2", "--out", "self", "--true-reward", "expired=-1; moved=1"]
    assert run_command(["audit", *words]) == 0
    table = read_columns(Path("self/audit.csv"))
    assert table["kl_max"] == pytest.approx(0, abs=1e-6)
    assert table["tv_max"] == pytest.approx(0, abs=1e-6)
    assert table["true"] < 0
    assert table["true_2"] > 0  # each true reward has its own columns
    assert table["true_2_per_step"] == pytest.approx(table["true_2"] / table["length"])
    assert np.isfinite(table["pearson_step_true_2"]).all()


def test_checkpoint_of_only_one_seed_is_ignored() -> None:
    """Seed a is worse than seed b at all steps and alone at step 20, so the mean would drop there."""
    worse = [audit_row("a", 1, steps, 1.0) for steps in (10, 20, 30)]
    found = make_curves([*worse, *(audit_row("b", 1, steps, 1.1) for steps in (10, 30))])
    assert [[point.x for point in curve.points] for curve in found] == [[10, 30]]
    assert find_true_return_drop(found[0].points) is None


def test_export_has_the_rewards_and_log_probabilities_of_the_rollouts(runs: list[Run]) -> None:
    words = [str(runs[0].path), "--rollouts", "3", "--length", "120", "--out", "r.npz"]
    assert run_command(["export", *words]) == 0
    found = np.load("r.npz", allow_pickle=False)
    assert found["observation.vector"].shape == (120, 3, 73)
    assert found["logits"].shape == (120, 3, 4)
    np.testing.assert_array_equal(found["reward"], found["measure.on_shelf"])
    np.testing.assert_array_equal(found["measure.true"], found["measure.collected"])
    positions = found["observation.vector"][1:, :, :49].argmax(-1)  # of the robot after the previous step
    row, column = np.divmod(positions, 7)
    at_wall = (row % 6 == 0) | (column % 6 == 0)
    continues = ~found["done"][1:]
    np.testing.assert_array_equal(found["reward"][:-1][continues], at_wall[continues].astype(np.float32))
    log_probs = found["logits"] - np.log(np.exp(found["logits"]).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_probs, found["action"][..., None], -1)[..., 0]
    np.testing.assert_allclose(found["log_prob"], chosen, atol=1e-5)
    assert json.loads(str(found["protocol"]))["rewards"] == {"training": "on_shelf=1", "true": "collected=1"}
    assert run_command(["export", *words]) == 2  # the file exists
    assert run_command(["export", *words[:-1], "r.pkl"]) == 2


def test_export_of_one_task_of_a_multi_task_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train warehouse:mini warehouse:memory --steps 320 --num-envs 4 --batch-size 4 --runtime serial --run-dir two"
    )
    assert run_command([*words.split(), "--micro-batch-size", "4"]) == 0
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


def point(x: float, training: float, true: float, seed: int = 0, n: int = 20) -> CurvePoint:
    """Return a point with n noisy returns around the given means."""
    rng = np.random.default_rng([seed, int(x)])
    return CurvePoint(x, training + rng.normal(size=n), true + rng.normal(size=n))


def test_true_return_drop_is_the_largest_significant_drop() -> None:
    def ends(points: list[CurvePoint]) -> tuple[float, float]:
        found = find_true_return_drop(points)
        assert found is not None
        return found.before, found.after

    rising = [point(1, 1, 1), point(2, 3, 3), point(4, 5, 5)]
    assert find_true_return_drop(rising) is None
    assert ends([*rising, point(8, 7, 3.5), point(16, 9, -3)]) == (8, 16)
    assert ends([*rising, point(8, 7, 1), point(16, 9, 0.9)]) == (4, 8)
    assert find_true_return_drop([*rising, point(8, 1, 1)]) is None  # the training return drops as well
    assert find_true_return_drop([point(1, 5, 5), point(2, 5, 4.9)]) is None
    assert find_true_return_drop([]) is None


def test_correlations_of_known_samples() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert correlations(x, x**3)["spearman"] == pytest.approx(1)
    assert correlations(x, -2 * x)["pearson"] == pytest.approx(-1)
    assert np.isnan(correlations(x, np.ones(4))["pearson"])
