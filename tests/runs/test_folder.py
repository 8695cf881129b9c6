"""Run folders: made once, never overwritten, opened with nothing but their path."""

import os
from pathlib import Path

import pytest
import torch

import bestiary
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runs.folder import Place, Run, create_run, labels, load_weights, open_run, unused

CONFIG = {"env": "toy/chain", "steps": 1000}


def test_a_run_is_opened_by_its_path_alone(catch_runs: list[Run]) -> None:
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
        "lag",
    }
    assert set(run.episodes) >= {"step", "task", "return", "length", "game_return", "game_over"}
    agent = run.agent()
    assert agent.initial_state(2) == ()
    different = run.agent(checkpoint=2_000)
    pairs = zip(agent.parameters(), different.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_config_toml_starts_the_same_run_again(catch_runs: list[Run], tmp_path: Path) -> None:
    again = bestiary.train(config=str(catch_runs[0].path / "config.toml"), run_dir=str(tmp_path / "again"))
    name = "checkpoints/latest/model.safetensors"
    assert (again.path / name).read_bytes() == (catch_runs[0].path / name).read_bytes()


def test_where_a_run_goes() -> None:
    config = resolve(CONFIG)
    assert Place(name="x").path(config) == Path("runs/x")
    assert Place(run_dir="elsewhere/y").path(config) == Path("elsewhere/y")
    assert Place().path(config).name.startswith("chain-mlp-2")


def test_latest_points_to_the_newest_run() -> None:
    create_run(resolve(CONFIG), Place(name="one"))
    create_run(resolve(CONFIG), Place(name="two"))
    assert os.readlink("runs/latest") == "two"
    assert open_run("runs/latest").name == "two"
    assert open_run("one").name == "one"  # below runs/ without saying so


def test_an_existing_folder_is_never_overwritten() -> None:
    config = resolve(CONFIG)
    first, _ = create_run(config, Place(name="a"))
    with pytest.raises(UserError, match="exists already"):
        create_run(config, Place(name="a"))
    second, exists = create_run(config, Place(name="a", if_exists="new"))
    assert (second.path.name, exists) == ("a-2", False)
    same, exists = create_run(config, Place(name="a", if_exists="resume"))
    assert (same.path, exists) == (first.path, True)
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("years of work")
    for if_exists in ("error", "resume"):
        with pytest.raises(UserError, match="is not a run folder"):
            create_run(config, Place(run_dir="mine", if_exists=if_exists))
    assert os.listdir("mine") == ["thesis.tex"]


def test_a_folder_that_cannot_be_made_is_a_clear_error() -> None:
    with pytest.raises(UserError, match="cannot be made"):
        create_run(resolve(CONFIG), Place(run_dir="/proc/nowhere/run"))  # read-only for everybody


def test_opening_what_is_no_run() -> None:
    Path("folder").mkdir()
    with pytest.raises(UserError, match="not a run folder"):
        open_run("folder")
    create_run(resolve(CONFIG), Place(name="chain-one"))
    with pytest.raises(UserError, match="did you mean chain-one"):
        open_run("runs/chain-on")


def test_weights_of_another_agent_are_refused_by_name(catch_runs: list[Run]) -> None:
    config = resolve({"env": "toy/catch", "torso.width": 7})
    pool = config.make_pool(1, 0)
    agent = config.make_agent(pool)
    with pytest.raises(
        UserError, match=r"torso.layers.0.weight: \(128, 50\) in the checkpoint, \(7, 50\) in the agent"
    ):
        load_weights(agent, catch_runs[0].checkpoints[-1])


def test_unused_names() -> None:
    Path("a.json").touch()
    Path("a-2.json").touch()
    assert unused(Path("a.json")) == Path("a-3.json")
    assert unused(Path("b.json")) == Path("b.json")


def test_one_writer_at_a_time_and_a_crash_frees_the_folder() -> None:
    run, _ = create_run(resolve(CONFIG), Place(name="a"))
    with (
        run.writing(),
        pytest.raises(UserError, match=rf"another process \(pid {os.getpid()} on "),
        Run(run.path).writing(),
    ):
        pass
    (run.path / "lock.json").write_text('{"pid": 1, "host": "gone"}')  # what a killed writer leaves
    with run.writing():
        pass
    assert not (run.path / "lock.json").exists()


def test_runs_of_the_same_name_are_told_apart() -> None:
    assert labels([Run(Path("runs/a")), Run(Path("runs/b"))]) == ["a", "b"]
    assert labels([Run(Path("one/a")), open_run("zoo/pong"), Run(Path("two/a"))]) == ["one/a", "pong", "two/a"]
    assert labels([Run(Path("runs/pong")), open_run("zoo/pong")]) == ["runs/pong", "zoo/pong"]
