"""Changes of a run's configuration between two sessions."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.runs.config_changes import find_changes
from bestiary.runs.csv_tables import read_rows

SMALL: dict[str, Any] = {"runtime": "serial", "num_envs": 8, "batch_size": 8, "micro_batch_size": 8, "steps": 640}


def test_differences_of_two_configurations() -> None:
    old = {"steps": 10, "algo": {"name": "ppo", "lr": 0.1}, "memory": {"name": "a.py:A"}}
    new = {"steps": 20, "algo": {"name": "ppo", "lr": 0.1, "clip": 0.2}, "memory": {"name": "runs/r/a.py:A"}}
    assert [str(change) for change in find_changes(old, new)] == ["steps 10 -> 20", "algo.clip (not set) -> 0.2"]


def test_table_of_changes_without_steps_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", **SMALL)
    (run.path / "config_changes.csv").write_text("time,option\n1,x\n")
    assert run_command(["resume", "r", "--steps", "1280"]) == 2
    assert "config_changes.csv is damaged" in capsys.readouterr().err


def test_changes_by_hand_and_by_option_are_printed_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", lr=0.001, **SMALL)
    assert not (run.path / "config_changes.csv").exists()
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    capsys.readouterr()
    assert run_command(["resume", "r", "--steps", "1280"]) == 2
    errors = capsys.readouterr().err
    assert "algo.lr: 0.001 in the checkpoint, 0.002 in config.toml" in errors
    assert "--accept-changes" in errors
    assert "steps = 640" in (run.path / "config.toml").read_text()
    assert run_command(["resume", "r", "--steps", "1280", "--accept-changes"]) == 0
    assert "algo.lr 0.001 -> 0.002" in capsys.readouterr().err
    rows = read_rows(run.path / "config_changes.csv")
    assert {(row["step"], row["option"], row["old"], row["new"]) for row in rows} == {
        ("640", "steps", "640", "1280"),
        ("640", "algo.lr", "0.001", "0.002"),
    }


def test_a_run_that_cannot_be_resumed_keeps_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", **SMALL)
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace("width = 128", "width = 64"))  # does not fit the saved weights
    before = config.read_text()
    assert run_command(["resume", "r", "--steps", "1280", "--accept-changes"]) == 2
    assert "does not fit the agent" in capsys.readouterr().err
    assert config.read_text() == before
    assert not (run.path / "config_changes.csv").exists()


KILL_AFTER_THE_FIRST_UPDATES = """
import os, signal, sys
from bestiary.cli.main import run_command
from bestiary.training.session import Session

def kill(session):
    if session.learner.steps > int(sys.argv[1]):
        if sys.argv[2] == "save":
            session.save_checkpoint()
        os.kill(os.getpid(), signal.SIGKILL)

Session.run_due_tasks = kill
run_command(["resume", "r", *sys.argv[3:]])
"""


def resume_and_kill(steps: int, saving: str, *options: str) -> None:
    """Resume run r, and kill the process after its first update. If `saving` is "save", it saves a checkpoint first."""
    command = [sys.executable, "-c", KILL_AFTER_THE_FIRST_UPDATES, str(steps), saving, *options]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == -signal.SIGKILL


def recorded_changes() -> list[tuple[str, str, str, str]]:
    return [(row["step"], row["option"], row["old"], row["new"]) for row in read_rows(Path("r/config_changes.csv"))]


def test_changes_are_recorded_although_the_process_is_killed() -> None:
    """The checkpoint that is saved before the kill has the new options, so later sessions find no difference."""
    bestiary.train("toy/catch", run_dir="r", **SMALL)
    resume_and_kill(640, "save", "--steps", "1280")
    expected = [("640", "steps", "640", "1280")]
    assert recorded_changes() == expected
    assert run_command(["resume", "r"]) == 0
    assert recorded_changes() == expected


def test_changes_without_a_checkpoint_are_recorded_once() -> None:
    run = bestiary.train("toy/catch", run_dir="r", **SMALL)
    resume_and_kill(640, "lose", "--steps", "1280")
    assert run_command(["resume", "r", "--steps", "1920"]) == 0
    assert recorded_changes() == [("640", "steps", "640", "1920")]
    assert run_command(["resume", "r", "--steps", "2560", "--checkpoint", "640"]) == 0
    assert recorded_changes() == [("640", "steps", "640", "2560")]  # the training up to step 1920 is abandoned
    assert run.steps == 2560


def test_refused_resume_prints_no_new_total(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", lr=0.001, **SMALL)
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    capsys.readouterr()
    assert run_command(["resume", "r", "--steps", "1280"]) == 2
    assert "total steps" not in capsys.readouterr().err
    assert run_command(["resume", "r", "--steps", "1280", "--accept-changes"]) == 0
    assert "total steps 640 -> 1280" in capsys.readouterr().err


def test_episodes_table_has_its_header_from_the_start() -> None:
    """The environment finishes no game within these steps."""
    run = bestiary.train("warehouse", run_dir="r", **{**SMALL, "steps": 160})
    header = (Path(run.path) / "episodes.csv").read_text().splitlines()
    assert len(header) == 1
    assert header[0].startswith("step,task,return")
    assert run.metrics["envs_in_first_game"][-1] == 8


def test_checkpoint_of_another_seed_or_run_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    first = bestiary.train("toy/catch", run_dir="first", **{**SMALL, "seed": 1})
    second = bestiary.train("toy/catch", run_dir="second", **{**SMALL, "seed": 2})
    third = bestiary.train("toy/catch", run_dir="third", **{**SMALL, "seed": 1})
    for run, word in ((second, "seed: 1 in the checkpoint, 2 in config.toml"), (third, "run ID")):
        shutil.rmtree(run.path / "checkpoints")
        shutil.copytree(first.path / "checkpoints", run.path / "checkpoints", symlinks=True)
        capsys.readouterr()
        assert run_command(["resume", str(run.path), "--steps", "1280"]) == 2
        assert word in capsys.readouterr().err
        assert "steps = 640" in (run.path / "config.toml").read_text()
    assert run_command(["resume", "third", "--steps", "1280", "--accept-changes"]) == 0


def test_config_is_not_changed_before_the_checkpoint_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bestiary.train("toy/catch", run_dir="r", **SMALL)
    before = (run.path / "config.toml").read_text()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bestiary.training.run_training.load_checkpoint", fail)
    with pytest.raises(ZeroDivisionError):
        bestiary.api.resume(bestiary.load("r"), steps=1280)
    assert (run.path / "config.toml").read_text() == before


def test_missing_rows_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", log_every=80, **SMALL)
    lines = (run.path / "metrics.csv").read_text().splitlines(keepends=True)
    (run.path / "metrics.csv").write_text("".join(lines[:-2]))
    (run.path / "episodes.csv").unlink()
    capsys.readouterr()
    assert run_command(["resume", "r", "--steps", "1280"]) == 0
    errors = capsys.readouterr().err
    assert f"metrics.csv has only {len(lines) - 3} rows" in errors
    assert "episodes.csv has only 0 rows" in errors
