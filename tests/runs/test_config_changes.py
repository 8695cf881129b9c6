"""Changes of a run's configuration between two sessions."""

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


def test_changes_by_hand_and_by_option_are_printed_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", lr=0.001, **SMALL)
    assert not (run.path / "config_changes.csv").exists()
    text = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.002"))
    capsys.readouterr()
    assert run_command(["resume", "r", "--steps", "1280"]) == 0
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
    assert run_command(["resume", "r", "--steps", "1280"]) == 2
    assert "does not fit the agent" in capsys.readouterr().err
    assert config.read_text() == before
    assert not (run.path / "config_changes.csv").exists()


def test_episodes_table_has_its_header_from_the_start() -> None:
    """The environment finishes no game within these steps."""
    run = bestiary.train("warehouse", run_dir="r", **{**SMALL, "steps": 160})
    header = (Path(run.path) / "episodes.csv").read_text().splitlines()
    assert len(header) == 1
    assert header[0].startswith("step,task,return")
    assert run.metrics["envs_in_first_game"][-1] == 8
