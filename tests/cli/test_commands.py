"""Commands as a user types them, with real environments."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from bestiary.cli.listing import LISTS
from bestiary.cli.main import run_command
from bestiary.runs.run import Run, open_run


def command(*words: str) -> int:
    return run_command(list(words))


def test_preset_hello_trains_evaluates_and_records_a_video(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--preset", "hello") == 0
    run = open_run("runs/latest")
    (evaluation,) = (run.path / "evaluations").glob("*.json")
    assert json.loads(evaluation.read_text())["statistics"]["game_return"]["mean"] > 0.8
    assert list((run.path / "videos").glob("*.gif"))
    output = capsys.readouterr()
    assert "return of a game" in output.out
    assert "steps/s" in output.err


def test_components_from_users_files(capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]) -> None:
    examples = Path(__file__).parents[2] / "examples"
    for file in examples.glob("*.py"):
        Path(file.name).write_text(file.read_text())
    components = ["maze_env.py:Maze", "--torso", "tiny_torso.py:Tiny", "--memory", "ema_memory.py:Ema"]
    assert command("train", *components, "--torso.width", "24", "--steps", "2k", "--name", "mine") == 0
    run = open_run("runs/mine")
    assert run.config.components["torso"].options.width == 24
    assert command("eval", "runs/mine", "--episodes", "2") == 0
    assert command("video", "runs/mine", "--length", "5", "--out", "maze.gif") == 0
    Path("tiny_torso.py").write_text(Path("tiny_torso.py").read_text() + "\n# changed\n")
    capsys.readouterr()
    assert command("eval", "runs/mine", "--episodes", "2") == 0
    assert "tiny_torso.py: this file is missing, has changed since the run was created" in capsys.readouterr().err
    Path("tiny_torso.py").unlink()
    Path("maze_env.py").write_text("raise SystemExit('changed')")  # the tasks keep their names
    assert command("resume", "runs/mine", "--steps", "2.5k") == 0
    another_user()
    assert command("resume", "runs/mine", "--steps", "3k") == 2
    assert "then add --trust-code" in capsys.readouterr().err
    assert command("resume", "runs/mine", "--steps", "3k", "--trust-code") == 0


@pytest.mark.parametrize(
    "words",
    [("toy/chain", "toy/catch"), ("--env", "toy/chain", "toy/catch"), ("toy/chain", "--env=toy/catch")],
)
def test_environments_may_follow_the_flag_env(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--steps", "100", *words, "--dry-run") == 2
    # These toys have different observations. Both are named, so none of them was left out.
    error = capsys.readouterr().err
    assert "toy/chain" in error
    assert "toy/catch" in error


def test_a_name_of_another_project_after_the_flag_env_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "atari/Pong", "--env", "PongNoFrameskip-v4", "--dry-run") == 2
    assert "write atari/Pong" in capsys.readouterr().err


def test_dry_run_prints_the_config_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "atari/Pong", "--torso", "resnet", "--dry_run", "--lr=1e-3") == 0
    output = capsys.readouterr().out
    assert "1,091,038 parameters" in output
    assert "lr = 0.001" in output
    assert not Path("runs").exists()
    toml = output.split("\nenvironment")[0]
    Path("again.toml").write_text(toml)
    assert command("train", "--config", "again.toml", "--dry-run") == 0
    again = capsys.readouterr().out.split("\nenvironment")
    assert tomllib.loads(again[0]) == tomllib.loads(toml)
    assert again[1] == output.split("\nenvironment")[1]


def test_eval_video_compare_runs_and_resume(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    one = str(catch_runs[0].path)
    assert command("eval", one, "--episodes", "5", "--checkpoint", "2k", "--greedy") == 0
    assert command("video", one, "--out", "play.gif", "--length", "20") == 0
    assert Path("play.gif").stat().st_size > 500
    assert command("compare", *(str(run.path) for run in catch_runs), "--out", "c.png") == 0
    assert command("runs", str(catch_runs[0].path.parent)) == 0
    assert "finished" in capsys.readouterr().out
    assert command("resume", one) == 0  # a finished run is not trained further
    assert "is finished" in capsys.readouterr().err


def test_list_prints_names_and_filters_them(capsys: pytest.CaptureFixture[str]) -> None:
    expected_names = {
        "envs": "atari/Pong",
        "algorithms": "impala",
        "agents": "iam",
        "torsos": "resnet",
        "memories": "lstm",
        "critics": "popart",
        "presets": "hello",
        "zoo": "pong",
        "studies": "published/six-games",
        "loggers": "tensorboard",
    }
    assert set(expected_names) == set(LISTS)
    for what, expected in expected_names.items():
        assert command("list", what) == 0
        assert expected in capsys.readouterr().out
    assert command("list", "envs", "atari/breakout") == 0
    assert capsys.readouterr().out.split() == ["atari/Breakout"]


def test_doctor_passes_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("doctor") == 0
    output = capsys.readouterr().out
    assert "FAILED" not in output
    for env in ("toy/catch", "gymnasium/CartPole-v1", "atari/Pong", "procgen/coinrun", "warehouse"):
        assert f"{env}: " in output  # followed by the measured speed


def test_piped_output_has_no_control_characters() -> None:
    words = [sys.executable, "-m", "bestiary", "train", "toy/chain", "--steps", "2k"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert "\x1b" not in result.stderr + result.stdout
    assert "steps/s" in result.stderr
    assert result.stdout.startswith("run: runs/chain-mlp-")


@pytest.mark.parametrize("words", [[], ["list", "envs"]])
def test_closed_pipe_gives_no_traceback(words: list[str]) -> None:
    """`bestiary | head -1`: the reader closes the pipe before everything is printed."""
    script = "import sys; from bestiary.cli.main import main; sys.stdin.read(); main(sys.argv[1:])"
    command = [sys.executable, "-c", script, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.close()  # the process starts to print now
        errors = process.stderr.read()
        process.wait(60)
    assert b"Traceback" not in errors
    assert process.returncode == 141
