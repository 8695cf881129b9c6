"""Exact resume: an interrupted and resumed serial run equals an uninterrupted run bit for bit."""

import csv
import signal
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.api import resume
from bestiary.runs.run import Run, open_run
from bestiary.training.interrupts import Interrupted
from bestiary.training.session import Session

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 4,
    "batch_size": 4,
    "rollout_length": 10,
    "log_every": 300,
    "save_every": 400,
}
PPO: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("batch_size", "rollout_length")},
    "algo": {"name": "ppo", "rollout_length": 20, "sequence_length": 10, "epochs": 2, "minibatches": 2},
}
RUNS: dict[str, dict[str, Any]] = {
    "toy, lstm": {"env": "toy/recall", "memory": "lstm", "memory.hidden": 32, "steps": 4_000, **SMALL},
    "toy, truncation, gru, adam": {
        "env": "toy/chain",
        "time_limit": 7,
        "memory": "gru",
        "memory.hidden": 32,
        "steps": 4_000,
        **SMALL,
        "algo": {"name": "impala", "optimizer": "adam", "eps": 1e-5},
    },
    "rmsprop of TensorFlow": {
        "env": "toy/catch",
        "steps": 4_000,
        **SMALL,
        "algo": {"name": "impala", "optimizer": "rmsprop_tf", "eps": 0.01, "momentum": 0.5},
    },
    "several batches per rollout": {"env": "toy/catch", "steps": 4_000, **SMALL, "num_envs": 8},
    "several rollouts per batch": {"env": "toy/catch", "steps": 4_000, **SMALL, "num_envs": 2},
    "batches from several rollouts, lstm": {
        "env": "toy/recall",
        "memory": "lstm",
        "memory.hidden": 16,
        "steps": 4_000,
        **SMALL,
        "num_envs": 9,
    },
    "batches from several rollouts, clear, normalised rewards": {
        "env": "toy/catch",
        "steps": 3_000,
        **SMALL,
        "num_envs": 3,
        "algo": "clear",
        "algo.reward_clipping": "return_std",
    },
    "two games, unequal numbers of environments": {
        "env": "atari/{Pong,Carnival}",
        "torso": "mlp",
        "steps": 300,
        **SMALL,
        "num_envs": 5,
        "critic": "popart",
    },
    "atari, lstm, lives, random no-ops": {
        "env": "atari/Breakout",
        "memory": "lstm",
        "memory.hidden": 32,
        "steps": 600,
        **SMALL,
    },
    "atari, fixed no-ops, rmsprop": {
        "env": "atari/SpaceInvaders",
        "noop_mode": "fixed",
        "algo.optimizer": "rmsprop",
        "torso": "mlp",
        "steps": 1_200,
        **SMALL,
    },
    "atari, flicker, ppo, attention": {
        "env": "atari/Breakout",
        "flicker": 0.5,
        "agent": "iam",
        "memory.hidden": 16,
        "steps": 600,
        **PPO,
    },
    "warehouse, stack, ppo, iam, normalised rewards": {
        "env": "warehouse",
        "frame_stack": 2,
        "agent": "iam",
        "steps": 4_000,
        **PPO,
        "algo.reward_clipping": "return_std",
    },
}


def read_results(run: Run) -> dict[str, bytes]:
    """Return everything that must be equal bit for bit: all but the time columns of the metrics."""
    newest = run.checkpoints[-1].path
    results = {name: (newest / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer", "actor")}
    if (newest / "algorithm.safetensors").is_file():  # state of the algorithm or of the reward normalisation
        results["algorithm"] = (newest / "algorithm.safetensors").read_bytes()
    results["episodes"] = (run.path / "episodes.csv").read_bytes()
    with (run.path / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "sps")} for row in csv.DictReader(file)]
    return {**results, "metrics": repr(rows).encode(), "steps": newest.name.encode()}


def stop_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a real SIGINT when a run has done the given number of steps."""
    original = Session.log

    def log(self: Session, *args: Any) -> None:
        original(self, *args)
        if self.learner.steps >= steps and self.interrupts.received is None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Session, "log", log)


# The other two Atari runs cover most of this one.
SLOW = ("atari, fixed no-ops, rmsprop",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS])
def test_interrupted_and_resumed_run_equals_an_uninterrupted_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(RUNS[name])
    uninterrupted = bestiary.train(run_dir="uninterrupted", **options)
    for stop in (0.3, 0.7):
        with monkeypatch.context() as patch:
            stop_at(int(stop * options["steps"]), patch)
            with pytest.raises(Interrupted):
                bestiary.train(run_dir="interrupted", if_exists="resume", **options)
    resumed = resume(open_run("interrupted"))
    expected, results = read_results(uninterrupted), read_results(resumed)
    for key in expected:
        assert results[key] == expected[key], key


def test_runs_with_the_same_seed_are_equal_and_with_another_seed_differ() -> None:
    options = {**RUNS["toy, lstm"], "steps": 1_000}
    one, two, other = (bestiary.train(run_dir=f"r{i}", seed=s, **options) for i, s in enumerate((5, 5, 6)))
    assert read_results(one) == read_results(two)
    assert read_results(one)["model"] != read_results(other)["model"]


def test_resume_from_an_earlier_checkpoint_repeats_the_run_and_keeps_later_checkpoints_aside() -> None:
    run = bestiary.train(run_dir="r", **RUNS["toy, lstm"])
    before = read_results(run)
    earlier = run.checkpoints[2].steps
    assert earlier < 4_000
    resumed = resume(open_run("r"), checkpoint=earlier)
    assert read_results(resumed) == before
    assert list(Path("r/checkpoints").glob("abandoned-*"))


def test_resume_with_environments_that_cannot_be_saved_prints_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(500, patch)
        with pytest.raises(Interrupted):
            bestiary.train("gymnasium/CartPole-v1", run_dir="r", steps=1_000, **SMALL)
    run = resume(open_run("r"))
    assert run.steps >= 1_000
    assert "cannot be saved" in capsys.readouterr().err
    steps = run.episodes["step"]
    assert (steps[1:] >= steps[:-1]).all()


def test_extending_a_run_stretches_the_learning_rate_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train(run_dir="r", **{**RUNS["toy, lstm"], "steps": 1_000})
    assert run.metrics["lr"][-1] < 2e-4
    longer = resume(open_run("r"), steps=4_000)
    assert "stretched" in capsys.readouterr().err
    assert longer.steps == 4_000
    assert longer.config.training.steps == 4_000
    steps, lr = longer.metrics["step"], longer.metrics["lr"]
    assert lr[steps > 1_000][0] > 3e-4  # about 6e-4 * (1 - 1000/4000)
    assert (steps[1:] > steps[:-1]).all()


def test_resuming_a_finished_run_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train(run_dir="r", **{**RUNS["toy, lstm"], "steps": 1_000})
    before = read_results(run)
    resume(open_run("r"))
    assert read_results(run) == before
    assert "is finished" in capsys.readouterr().err
