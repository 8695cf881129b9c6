"""Execution of real studies: failing, killed, interrupted, resumed, finished and changed runs."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bestiary.api import start
from bestiary.cli.main import run_command
from bestiary.runs.run import RunLocation
from bestiary.studies.runner import prepare_folder
from bestiary.studies.study import read_study
from bestiary.studies.trial import Trial, make_trials

BASE = """
[base]
steps = 400
runtime = "serial"
num_envs = 4
batch_size = 4
rollout_length = 5
save_every = 40
log_every = 40
"""
ENV = """
import gymnasium, numpy as np, pathlib, time
from gymnasium.spaces import Box, Discrete


class TestEnv(gymnasium.Env):
    # broken: raise an error after 30 steps; slow: step slowly until the file `fast` exists
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)

    def __init__(self, *, broken: bool = False, slow: bool = False):
        self.broken = broken
        self.slow = slow
        self.num_steps = 0

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        if self.broken and self.num_steps > 30:
            raise ZeroDivisionError("broken environment")
        if self.slow and not pathlib.Path("fast").exists():
            time.sleep(0.01)
        return np.zeros(2, np.float32), float(action), self.num_steps % 10 == 0, False, {}
"""


def write(text: str) -> list[Trial]:
    """Write the study s.toml and its environment env.py, and return the trials of the study."""
    Path("s.toml").write_text(text)
    if not Path("env.py").exists():
        Path("env.py").write_text(ENV)
    return make_trials(read_study(Path("s.toml"), trust_code=True), Path("runs/s"))


def files() -> list[tuple[str, bytes]]:
    """Return the path and content of all files in the working directory."""
    found = [path for path in Path().rglob("*") if path.is_file() and path.name != "lock"]
    return sorted((str(path), path.read_bytes()) for path in found if "__pycache__" not in path.parts)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met within {seconds} seconds"
        time.sleep(0.05)


def interrupt_once(condition: Callable[[], bool]) -> None:
    """Send SIGINT to this process, as Ctrl-C does, when the condition is met."""
    wait_until(condition)
    os.kill(os.getpid(), signal.SIGINT)


def test_failed_run_is_reported_and_other_runs_finish(
    capsys: pytest.CaptureFixture[str],
) -> None:
    variants = '[[variant]]\nname = "broken"\nbroken = true\n[[variant]]\nname = "good"\n'
    text = f'seeds = [1]\nevaluate = 3\n{BASE}env = "env.py:TestEnv"\n{variants}'
    broken, good = write(text)
    assert run_command(["study", "s.toml"]) == 1
    output = capsys.readouterr()
    reason = "ZeroDivisionError: broken environment"
    (listed,) = [line for line in output.err.splitlines() if line.startswith("warning: broken-s1 failed: ")]
    assert reason in listed
    assert "1 of 2 runs failed" in output.err
    assert "run 2 of 2  good-s1: done" in output.err
    assert reason in broken.state().text
    assert good.state().kind == "done"
    assert (good.path / "evaluations").is_dir()
    assert reason in Path("runs/s/index.html").read_text()
    assert "0 of 1" in output.out

    Path("env.py").write_text(ENV.replace("self.num_steps > 30", "False"))
    write(text)
    before = files()
    assert run_command(["study", "s.toml"]) == 2  # both were run with another env.py
    errors = capsys.readouterr().err
    assert errors.count("was run with other settings: env: ['TestEnv@") == 2
    assert "--if-changed new" in errors
    assert files() == before
    Path("env.py").write_text(ENV)
    fixed, good = write(text.replace("broken = true\n", "broken = false\nlr = 0.1\n"))
    prepare_folder(read_study(Path("s.toml")), [fixed, good], Path("runs/s"), "new")
    assert "abandoned-broken-s1" in capsys.readouterr().err
    assert Path("runs/s/abandoned-broken-s1/config.toml").exists()
    assert fixed.state().kind == "missing"
    assert fixed.next_command() == [
        "train",
        "--config",
        "runs/s/configs/broken-s1.toml",
        "--run-dir",
        "runs/s/broken-s1",
    ]
    assert good.state().kind == "done"


def test_killed_and_interrupted_study_continues_and_finishes_each_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(f'seeds = [1, 2]\n{BASE}env = "env.py:TestEnv"\nslow = true\n')

    killed = subprocess.Popen([sys.executable, "-m", "bestiary", "study", "s.toml"], stderr=subprocess.DEVNULL)
    wait_until(lambda: first.run.steps > 0)
    assert run_command(["study", "s.toml"]) == 2
    assert "another process is running this study" in capsys.readouterr().err
    killed.kill()
    killed.wait()
    wait_until(lambda: not first.run.is_locked)
    assert not (first.path / "lock_owner.json").exists()  # the run saved a checkpoint and ended
    saved = first.run.steps
    assert first.state().text.startswith("partial, ")
    assert second.state().kind == "missing"

    threading.Thread(target=interrupt_once, args=(lambda: first.run.steps > saved,)).start()
    assert run_command(["study", "s.toml"]) == 130
    errors = capsys.readouterr().err
    assert f"run 1 of 2  base-s1: resuming at step {saved}" in errors
    assert f"base-s1: stopped at step {first.run.steps}" in errors
    assert "bestiary study s.toml" in errors
    assert "Traceback" not in errors + first.log.read_text()
    assert first.state().text.startswith("partial, ")
    assert not second.path.exists()

    Path("fast").touch()
    assert run_command(["study", "s.toml", "--jobs", "2"]) == 0
    assert [trial.state().kind for trial in (first, second)] == ["done", "done"]
    assert [trial.run.steps for trial in (first, second)] == [400, 400]
    rows = first.run.metrics["step"].tolist()
    assert rows == sorted(set(rows))  # no row twice
    assert rows[-1] == 400

    capsys.readouterr()
    logs = first.log.read_text(), second.log.read_text()
    assert run_command(["study", "s.toml"]) == 0
    assert "2 of 2 runs are already done" in capsys.readouterr().err
    assert (first.log.read_text(), second.log.read_text()) == logs


def test_dry_run_lists_all_trials_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    memories = '[grid]\nmemory = ["none", "gru"]\n'
    one, *_ = write(f'seeds = [1, 2]\n{BASE}env = "toy/recall"\n{memories}')
    before = files()
    assert run_command(["study", "s.toml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "memory=gru-s2" in output
    assert f"{one.variant.parameters:,}" in output
    assert "4 runs: 4 missing; 1.6k steps remaining" in output
    assert files() == before


def test_run_with_other_settings_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = f'seeds = [1]\n{BASE}env = "toy/bandit"\n'
    (trial,) = write(text)
    start(trial.config, RunLocation(run_dir=str(trial.path)))
    Path("runs/s/study.toml").touch()
    assert trial.state().kind == "done"
    for same in (text.replace("save_every = 40", "save_every = 90"), text.replace("400", '"0.4k"')):
        (other,) = write(same)
        assert other.state().kind == "done"
    (other,) = write(text.replace("400", "800"))
    before = files()
    assert other.state().text == "changed: steps: 400 in the run, 800 in the study file"
    for words in ([], ["--report"]):
        assert run_command(["study", "s.toml", *words]) == 2
        errors = capsys.readouterr().err
        assert "base-s1" in errors
        assert "steps: 400 in the run, 800 in the study file" in errors
    assert run_command(["study", "s.toml", "--dry-run"]) == 0
    assert "1 runs: 1 changed" in capsys.readouterr().out
    assert files() == before


def test_state_and_next_command_of_a_trial(capsys: pytest.CaptureFixture[str]) -> None:
    (trial,) = write(f'seeds = [1]\nevaluate = 2\n{BASE}env = "toy/bandit"\n')
    trial.path.mkdir(parents=True)
    (trial.path / "checkpoints").mkdir()
    trial.remove_incomplete_folder()  # as left by kill -9 during the creation of the folder
    assert not trial.path.exists()
    start(trial.config, RunLocation(run_dir=str(trial.path)))
    assert trial.state().kind == "done"
    (evaluation,) = (trial.path / "evaluations").glob("*.json")
    complete = json.loads(evaluation.read_text())
    for broken in ("{", json.dumps({**complete, "protocol": {**complete["protocol"], "games": 3}})):
        evaluation.write_text(broken)
        assert trial.state().text == "trained, not evaluated"
        assert trial.next_command() == ["eval", str(trial.path), "--episodes", "2"]
    (trial.path / "checkpoints" / "latest").unlink()
    trial.run.checkpoints[-1].path.rename("elsewhere")
    assert trial.state().text == "partial, 360 of 400 steps"
    assert trial.next_command() == ["resume", str(trial.path)]


def test_folders_with_other_content_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (trial,) = write(f'seeds = [1]\n{BASE}env = "toy/bandit"\n')
    Path("thesis").mkdir()
    Path("thesis/results.csv").write_text("years of work")
    assert run_command(["study", "s.toml", "--dir", "thesis"]) == 2
    assert "thesis exists and is not the folder of a study" in capsys.readouterr().err
    trial.path.mkdir(parents=True)
    (trial.path / "thesis.tex").write_text("years of work")
    Path("runs/s/study.toml").touch()
    assert run_command(["study", "s.toml"]) == 2
    assert "base-s1 exists and is not a run folder" in capsys.readouterr().err
    assert run_command(["study", "s.toml", "--jobs", "0"]) == 2
    assert run_command(["study", "s.toml", "--job", "2"]) == 2
    assert "did you mean --jobs" in capsys.readouterr().err
    assert (trial.path / "thesis.tex").read_text() == "years of work"
