"""Run folders are created once, never overwritten, and opened by their path."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.resolve import resolve
from bestiary.runs.run import Run, RunLocation, create_run, load_weights, open_run, run_labels, unused_path
from bestiary.utils.errors import UserError

CONFIG = {"env": "toy/chain", "steps": 1000}


def test_run_is_opened_by_its_path(catch_runs: list[Run]) -> None:
    run = bestiary.load(str(catch_runs[0].path))
    assert run.config.envs == ("toy/catch",)
    assert run.steps == 6_400
    assert set(run.metrics) >= {
        "step",
        "frames",
        "seconds",
        "sps",
        "return",
        "loss",
        "entropy",
        "grad_norm",
        "lr",
        "policy_lag",
    }
    assert set(run.episodes) >= {"step", "task", "return", "length", "game_return", "game_over"}
    agent = run.agent()
    assert agent.initial_state(2) == ()
    earlier = run.agent(checkpoint=2_000)
    pairs = zip(agent.parameters(), earlier.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_training_with_config_toml_repeats_the_run(catch_runs: list[Run], tmp_path: Path) -> None:
    again = bestiary.train(config=str(catch_runs[0].path / "config.toml"), run_dir=str(tmp_path / "again"))
    name = "checkpoints/latest/model.safetensors"
    assert (again.path / name).read_bytes() == (catch_runs[0].path / name).read_bytes()


def test_path_of_a_new_run() -> None:
    config = resolve(CONFIG)
    assert RunLocation(name="x").path(config) == Path("runs/x")
    assert RunLocation(run_dir="elsewhere/y").path(config) == Path("elsewhere/y")
    assert RunLocation().path(config).name.startswith("chain-mlp-2")


def test_latest_is_a_link_to_the_newest_run() -> None:
    create_run(resolve(CONFIG), RunLocation(name="one"))
    create_run(resolve(CONFIG), RunLocation(name="two"))
    assert os.readlink("runs/latest") == "two"
    assert open_run("runs/latest").name == "two"
    assert open_run("one").name == "one"  # a folder below runs/


def test_existing_folder_is_never_overwritten() -> None:
    config = resolve(CONFIG)
    first, _ = create_run(config, RunLocation(name="a"))
    with pytest.raises(UserError, match="exists already"):
        create_run(config, RunLocation(name="a"))
    second, exists = create_run(config, RunLocation(name="a", if_exists="new"))
    assert (second.path.name, exists) == ("a-2", False)
    same, exists = create_run(config, RunLocation(name="a", if_exists="resume"))
    assert (same.path, exists) == (first.path, True)
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    for if_exists in ("error", "resume"):
        with pytest.raises(UserError, match="is not a run folder"):
            create_run(config, RunLocation(run_dir="mine", if_exists=if_exists))
    assert os.listdir("mine") == ["thesis.tex"]


def test_error_if_the_folder_cannot_be_created() -> None:
    with pytest.raises(UserError, match="cannot be created"):
        create_run(resolve(CONFIG), RunLocation(run_dir="/proc/nowhere/run"))  # read-only for all users


def test_error_if_the_path_is_not_a_run() -> None:
    Path("folder").mkdir()
    with pytest.raises(UserError, match="not a run folder"):
        open_run("folder")
    create_run(resolve(CONFIG), RunLocation(name="chain-one"))
    with pytest.raises(UserError, match="did you mean chain-one"):
        open_run("runs/chain-on")


def test_error_names_the_import_of_a_checkpoint_of_torchbeast() -> None:
    Path("models/Pong").mkdir(parents=True)
    Path("models/Pong/model.tar").touch()
    with pytest.raises(UserError, match=r"bestiary import models/Pong/model\.tar --run-dir models/Pong"):
        open_run("models/Pong")
    with pytest.raises(UserError, match=r"bestiary import models/Pong/model\.tar --name"):
        open_run("models/Pong/model.tar")


def test_weights_of_another_agent_are_refused_with_the_differing_layer(catch_runs: list[Run]) -> None:
    config = resolve({"env": "toy/catch", "torso.width": 7})
    pool = config.make_vector_env(1, 0)
    agent = config.make_agent(pool)
    with pytest.raises(
        UserError, match=r"torso.layers.0.weight: float32 \(128, 50\) in the checkpoint, float32 \(7, 50\) in"
    ):
        load_weights(agent, catch_runs[0].checkpoints[-1])


def test_unused_path() -> None:
    Path("a.json").touch()
    Path("a-2.json").touch()
    assert unused_path(Path("a.json")) == Path("a-3.json")
    assert unused_path(Path("b.json")) == Path("b.json")


def test_one_writer_at_a_time_and_a_crash_releases_the_lock() -> None:
    run, _ = create_run(resolve(CONFIG), RunLocation(name="a"))
    with (
        run.lock(),
        pytest.raises(UserError, match=rf"another process \(pid {os.getpid()} on "),
        Run(run.path).lock(),
    ):
        pass
    (run.path / "lock_owner.json").write_text('{"pid": 1, "host": "gone"}')  # left by a killed process
    with run.lock():
        pass
    assert not (run.path / "lock_owner.json").exists()


def test_labels_of_runs_with_the_same_name_are_their_paths() -> None:
    assert run_labels([Run(Path("runs/a")), Run(Path("runs/b"))]) == ["a", "b"]
    assert run_labels([Run(Path("one/a")), open_run("zoo/pong"), Run(Path("two/a"))]) == ["one/a", "pong", "two/a"]
    assert run_labels([Run(Path("runs/pong")), open_run("zoo/pong")]) == ["runs/pong", "zoo/pong"]


@pytest.fixture
def old_run(catch_runs: list[Run]) -> Path:
    """A run folder of Bestiary 0.1 in the folder old-runs."""
    path = Path("old-runs/a1")
    shutil.copytree(catch_runs[0].path, path, symlinks=True)
    text = (path / "config.toml").read_text()
    assert f'bestiary = "{bestiary.__version__}"' in text
    (path / "config.toml").write_text(text.replace(f'bestiary = "{bestiary.__version__}"', 'bestiary = "0.1.0"'))
    return path


def test_run_folder_of_version_0_1_is_refused_in_one_line(old_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for read in (lambda: open_run(old_run), lambda: Run(old_run).config, lambda: Run(old_run).raw_config):
        with pytest.raises(UserError, match=r"made by Bestiary 0\.1\.0.*train again"):
            read()
    for command in ("eval", "resume", "video", "compare"):
        assert run_command([command, str(old_run)]) == 2
        message = capsys.readouterr().err
        assert "old-runs/a1 was made by Bestiary 0.1.0" in message
        assert message.count("\n") == 1
    assert run_command(["train", "--config", str(old_run / "config.toml")]) == 2
    message = capsys.readouterr().err
    assert "old-runs/a1/config.toml was made by Bestiary 0.1.0" in message
    assert message.count("\n") == 1


def test_folder_with_a_run_of_version_0_1_can_be_listed_and_reported(
    old_run: Path, catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(catch_runs[1].path, "old-runs/a2", symlinks=True)
    assert run_command(["runs", "old-runs"]) == 0
    assert "0.1.0" in capsys.readouterr().out
    assert run_command(["report", "old-runs", "--out", "report.html", "--no-draw"]) == 0
    page = Path("report.html").read_text()
    assert "was made by Bestiary 0.1.0" in page
    assert "a2" in page


def test_the_name_latest_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "toy/catch", "--name", "latest"]) == 2
    assert "--name latest" in capsys.readouterr().err
    with pytest.raises(UserError, match="without slashes"):
        bestiary.train("toy/catch", name="../x")


def test_only_runs_in_the_folder_runs_change_the_link_latest() -> None:
    options: dict[str, Any] = {"runtime": "serial", "steps": 160, "num_envs": 8, "batch_size": 8}
    bestiary.train("toy/catch", run_dir="elsewhere/a", **options)
    assert not Path("elsewhere/latest").exists()
    bestiary.train("toy/catch", name="b", **options)
    assert Path("runs/latest").resolve().name == "b"
