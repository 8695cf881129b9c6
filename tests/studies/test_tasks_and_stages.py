"""Studies with several tasks per run, stages, evaluations of other tasks, published values and analyses."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from bestiary.api import start
from bestiary.cli.main import run_command
from bestiary.runs.run import RunLocation
from bestiary.studies.analyses import Analysis
from bestiary.studies.analysis_runner import analysis_commands, analysis_problem
from bestiary.studies.study import Study, read_study
from bestiary.studies.trial import Trial, make_trials

ENVS = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete


class Base(gymnasium.Env):
    observation_space = Box(-1, 1, (2,))
    action_space = Discrete(2)
    scale = 1.0

    def reset(self, seed=None, options=None):
        self.num_steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.num_steps += 1
        return np.zeros(2, np.float32), self.scale * float(action), self.num_steps == 5, False, {}


class One(Base):
    scale = 1.0


class Ten(Base):
    scale = 10.0


class Broken(Base):
    def step(self, action):
        raise ZeroDivisionError("broken environment")
"""
TEXT = """
seeds = [1, 2]

[base]
steps = 400
runtime = "serial"
num_envs = 4
batch_size = 4
rollout_length = 5
save_every = 200

[[variant]]
name = "multi"
env = ["env.py:One", "env.py:Ten"]

[[variant]]
name = "single"
grid = { env = ["env.py:One", "env.py:Ten"] }

[[variant]]
name = "tuned"
after = "multi"
env = "env.py:Ten"

[[evaluate]]
episodes = 4

[[evaluate]]
name = "old task"
env = ["env.py:One"]
episodes = 3
checkpoints = "all"
greedy = true
variants = ["tuned"]

[[analysis]]
tool = "actions"
variants = ["multi", "single"]
episodes = 3

[[published]]
title = "Published results"
source = "a paper"
compare = "evaluation"
[published.values.multi]
"env.py:Ten" = 45.5
[published.values.tuned]
"env.py:Ten" = "about 50"

[[published]]
title = "Published curve"
source = "a figure"
[published.values.tuned]
"env.py:Ten" = [[100, 20], [400, 44.5]]
"""


def read(text: str) -> tuple[Study, list[Trial]]:
    Path("env.py").write_text(ENVS)
    Path("s.toml").write_text(text)
    study = read_study(Path("s.toml"), trust_code=True)
    return study, make_trials(study, Path("runs/s"))


def records(name: str) -> list[dict[str, str]]:
    with Path(name).open() as file:
        return list(csv.DictReader(file))


def test_tasks_stages_and_evaluations_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    _, trials = read(TEXT)
    assert len(trials) == 8
    for trial in trials:
        start(trial.config, RunLocation(run_dir=str(trial.path)))
    tuned = trials[-2:]
    for trial in trials[:-2]:
        assert trial.state().kind == "done"
    for trial in tuned:
        assert trial.state().text == "trained, not evaluated"
        command = trial.next_command()
        assert command is not None
        assert run_command(command) == 0
        assert trial.state().kind == "done"
    Path("runs/s/study.toml").touch()
    capsys.readouterr()
    assert run_command(["study", "s.toml", "--report"]) == 0
    printed = capsys.readouterr().out

    rows = {(row["variant"], row["environment"].rpartition("/")[2]): row for row in records("runs/s/results.csv")}
    assert list(rows) == [
        ("multi: env.py:One", "env.py:One"),
        ("multi: env.py:Ten", "env.py:Ten"),
        ("single,env=One", "env.py:One"),
        ("single,env=Ten", "env.py:Ten"),
        ("tuned", "env.py:Ten"),
    ]
    finals = []
    for trial in trials[:2]:
        games = [row for row in records(f"{trial.path}/episodes.csv") if row["task"] == "env.py:Ten"]
        last = 0.9 * max(int(row["step"]) for row in games)
        finals.append(np.mean([float(row["game_return"]) for row in games if int(row["step"]) >= last]))
    assert float(rows["multi: env.py:Ten", "env.py:Ten"]["mean"]) == pytest.approx(np.mean(finals), rel=1e-4)

    evaluations = records("runs/s/evaluations.csv")
    old = [row for row in evaluations if row["evaluation"] == "old task"]
    assert [(row["run"], row["checkpoint"]) for row in old] == [
        (f"tuned-s{seed}", steps) for seed in (1, 2) for steps in ("200", "400")
    ]
    assert all(float(row["mean"]) <= 5 for row in old)  # task One has returns from 0 to 5
    ten = [float(r["mean"]) for r in evaluations if r["variant"] == "multi" and r["task"] == "env.py:Ten"]
    assert len(ten) == 2
    assert float(rows["multi: env.py:Ten", "env.py:Ten"]["eval_return"]) == pytest.approx(np.mean(ten), rel=1e-4)
    assert "45.5" in printed
    assert "about 50" in printed
    (line,) = [line for line in printed.splitlines() if "44.5 at 0.0004M steps" in line]
    assert float(line.split("│")[-2]) == pytest.approx(float(rows["tuned", "env.py:Ten"]["mean"]), rel=1e-4)
    assert Path("runs/s/evaluation-old-task.png").is_file()
    page = Path("runs/s/index.html").read_text()
    assert "Published results" in page
    assert "a paper" in page
    assert "not made yet" in page

    # The weights of the later stage are those of the earlier stage, trained further.
    assert "weights of runs/s/multi-s1 at step 400" not in printed
    assert tuned[0].run.config.training.init_from == "runs/s/multi-s1"


def test_texts_of_an_analysis_do_not_become_flags() -> None:
    _, trials = read(TEXT)
    options = {"match": "--trust-code", "points": 3}
    command = analysis_commands(Analysis("a", "filters", (), options), trials, Path("runs/s"))[0]
    assert "--trust-code" not in command
    assert {"--match=--trust-code", "--points=3"} <= set(command)


def test_analyses_run_once_and_appear_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT[: TEXT.index("[[evaluate]]")] + TEXT[TEXT.index("[[analysis]]") : TEXT.index("[[published]]")]
    study, trials = read(text.replace("seeds = [1, 2]", "seeds = [1]"))
    for trial in trials:
        start(trial.config, RunLocation(run_dir=str(trial.path)))
    Path("runs/s/study.toml").touch()
    (analysis,) = study.analyses
    (command,) = analysis_commands(analysis, trials, Path("runs/s"))
    assert command[:4] == ["look", "actions", "runs/s/multi-s1", "runs/s/single,env=One-s1"]
    assert analysis_problem(analysis, trials, Path("runs/s")) == "not made yet"
    assert run_command(["study", "s.toml"]) == 0
    assert analysis_problem(analysis, trials, Path("runs/s")) == ""
    figure = Path("runs/s/analysis/actions/actions.png")
    written = figure.stat().st_mtime_ns
    assert "Action frequencies: actions" in (page := Path("runs/s/index.html").read_text())
    assert page.count("<figure") == 1
    assert run_command(["study", "s.toml"]) == 0
    assert figure.stat().st_mtime_ns == written
    stamp = Path("runs/s/analysis/actions/done.json")
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "checkpoints": {}}))
    capsys.readouterr()
    assert run_command(["study", "s.toml"]) == 0
    assert "analysis actions: done" in capsys.readouterr().err
    assert figure.stat().st_mtime_ns > written


def test_a_stage_does_not_start_if_the_stage_before_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT[: TEXT.index("[[evaluate]]")].replace("seeds = [1, 2]", "seeds = [1]")
    text = text.replace(
        'env = ["env.py:One", "env.py:Ten"]\n\n[[variant]]\nname = "single"',
        'env = "env.py:Broken"\n\n[[variant]]\nname = "single"',
    )
    _, trials = read(text.replace('grid = { env = ["env.py:One", "env.py:Ten"] }', 'env = "env.py:One"'))
    assert run_command(["study", "s.toml"]) == 1
    errors = capsys.readouterr().err
    assert "multi-s1 failed: " in errors
    assert "tuned-s1: not started, because multi-s1 is not trained" in errors
    assert "2 of 3 runs failed" in errors
    assert not trials[-1].exists


def test_a_stage_that_does_not_fit_is_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        seeds = [1]
        [base]
        env = "toy/chain"
        [[variant]]
        name = "small"
        memory = { name = "gru", hidden = 8 }
        [[variant]]
        name = "large"
        after = "small"
        memory = { name = "gru", hidden = 16 }
        """
    Path("s.toml").write_text(text)
    assert run_command(["study", "s.toml"]) == 2
    assert "variant large: after = small: its weights do not fit this agent" in capsys.readouterr().err
