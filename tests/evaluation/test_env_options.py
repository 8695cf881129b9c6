"""Evaluation with other environment options than in training, and evaluation of scripted policies."""

import json
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.evaluation.evaluate import evaluate, evaluate_scripted_policy
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError

SHORT: dict[str, Any] = {"algo": "ppo", "runtime": "serial", "num_envs": 4, "rollout_length": 16, "steps": 128}


@pytest.fixture(scope="module")
def warehouse_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A warehouse agent after a short training."""
    folder = tmp_path_factory.mktemp("warehouse") / "run"
    options = {**SHORT, "agent": "iam", "agent.dset": "attention", "memory.hidden": 8, "torso.sizes": (16,)}
    return bestiary.train("warehouse", run_dir=str(folder), **options)


def test_environment_options_replace_those_of_the_training(warehouse_run: Run) -> None:
    other = warehouse_run.with_env_options({"spawn": "0", "expiry": "3"})
    assert (other.config.env_options.spawn, other.config.env_options.expiry) == (0.0, 3)
    assert warehouse_run.config.env_options.spawn is None
    assert evaluate(other, episodes=4).mean == 0  # no items appear
    assert evaluate(warehouse_run, episodes=4).mean > 0
    with pytest.raises(UserError, match=r"spawn 2: must be at most 1"):
        warehouse_run.with_env_options({"spawn": "2"})


def test_protocol_contains_the_changed_options(warehouse_run: Run) -> None:
    result = evaluate(warehouse_run.with_env_options({"spawn": "0.2"}), episodes=4)
    assert result.path is not None
    assert json.loads(result.path.read_text())["protocol"]["environment_options"]["spawn"] == 0.2


def test_environment_options_do_not_bypass_the_check_of_users_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (Path(__file__).parents[2] / "examples" / "maze_env.py").read_text()
    (tmp_path / "maze.py").write_text(source)
    bestiary.train("maze.py:Maze", run_dir="r", runtime="serial", num_envs=4, steps=80)
    (tmp_path / "maze.py").write_text("raise SystemExit('changed code was run')\n")
    assert run_command(["eval", "r", "--episodes", "2", "--max-steps", "50", "--trust-code", "--size", "9"]) in (0, 1)
    assert "changed code was run" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words",
    [
        "eval {run} --episodes 4 --spawn 0.1 --legacy",
        "eval --spawn 0.1 --legacy {run} --episodes 4",
        "eval --spawn=0.1 --legacy=on --episodes=4 {run}",
        "eval --spawn 0.1 --env.legacy on {run} --episodes 4 --num-envs 2 --seed 3",
    ],
)
def test_options_are_accepted_in_any_order(warehouse_run: Run, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words.format(run=warehouse_run.path).split()) == 0
    path = sorted(warehouse_run.path.glob("evaluations/*.json"), key=lambda path: path.stat().st_mtime_ns)[-1]
    played = json.loads(path.read_text())["protocol"]["environment_options"]
    assert (played["spawn"], played["legacy"]) == (0.1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval {run} --spwan 1", "unknown option --spwan; did you mean --spawn"),
        ("eval {run} --spawn 2", "--spawn 2: must be at most 1"),
        ("eval {run} --env atari/Pong", "--env atari/Pong: "),
        ("eval", "no run given"),
        ("eval --spawn 1", "1: there is no such run"),
        ("eval scripted:nearest", "scripted:nearest: no environment given"),
        ("eval scripted:nearst --env warehouse", "did you mean nearest"),
        ("eval scripted:nearest --env toy/chain", "scripted:nearest: only for the warehouse"),
        ("eval scripted:nearest --env warehouse --greedy", "remove --greedy"),
        ("video scripted:nearest", "scripted:nearest: video needs a trained agent"),
    ],
)
def test_wrong_arguments_give_one_line_of_error(
    warehouse_run: Run, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(words.format(run=warehouse_run.path).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_help_lists_the_options_of_the_environment(warehouse_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_command(["eval", str(warehouse_run.path), "--help"])
    assert "--expiry" in capsys.readouterr().out


def test_scripted_policies_are_evaluated() -> None:
    results = {name: evaluate_scripted_policy(name, "warehouse", {}, episodes=64) for name in ("random", "nearest")}
    assert results["nearest"].mean > results["random"].mean + 20
    path = results["nearest"].path
    assert path is not None
    assert path.parts[:2] == ("runs", "scripted-nearest-warehouse")
    assert json.loads(path.read_text())["protocol"]["environment_options"]["frame_stack"] == 1
    assert evaluate_scripted_policy("nearest", "warehouse", {"spawn": 0.0}, episodes=2).mean == 0


def test_options_that_change_the_observations_are_refused(warehouse_run: Run) -> None:
    with pytest.raises(UserError, match=r"--frame-stack: the agent of .*vector float32\[73\].*146"):
        warehouse_run.with_env_options({"frame_stack": "2"})
