"""Exact resume: a run of 2N steps, and one of N steps that was stopped, resumed and went on, end in the same bytes."""

import csv
import signal
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.runs.folder import Run, open_run
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.session import Session
from bestiary.runtime.train import resume

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 4,
    "batch_size": 4,
    "unroll_length": 10,
    "log_every": 300,
    "save_every": 400,
}
PPO: dict[str, Any] = {
    **{name: value for name, value in SMALL.items() if name not in ("batch_size", "unroll_length")},
    "algo": {"name": "ppo", "rollout_length": 20, "sequence": 10, "epochs": 2, "minibatches": 2},
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
    "several batches a rollout": {"env": "toy/catch", "steps": 4_000, **SMALL, "num_envs": 8},
    "several rollouts a batch": {"env": "toy/catch", "steps": 4_000, **SMALL, "num_envs": 2},
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
    "warehouse, stack, ppo, iam": {"env": "warehouse", "frame_stack": 2, "agent": "iam", "steps": 4_000, **PPO},
}


def files(run: Run) -> dict[str, bytes]:
    """All that must be equal, bit for bit; of the metrics all but the clock's columns."""
    newest = run.checkpoints[-1].path
    found = {name: (newest / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer", "actor")}
    found["episodes"] = (run.path / "episodes.csv").read_bytes()
    with (run.path / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if k not in ("seconds", "sps")} for row in csv.DictReader(file)]
    return {**found, "metrics": repr(rows).encode(), "steps": newest.name.encode()}


def stop_at(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a real SIGINT once a run has done so many steps."""
    original = Session.record

    def record(self: Session, *args: Any) -> None:
        original(self, *args)
        if self.learner.steps >= steps and self.interrupts.received is None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Session, "record", record)


SLOW = ("atari, fixed no-ops, rmsprop",)  # what is left of it without the other two games of Atari is little


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS])
def test_stopped_and_resumed_is_the_run_that_was_never_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(RUNS[name])
    whole = bestiary.train(run_dir="whole", **options)
    for stop in (0.3, 0.7):
        with monkeypatch.context() as patch:
            stop_at(int(stop * options["steps"]), patch)
            with pytest.raises(Interrupted):
                bestiary.train(run_dir="stopped", if_exists="resume", **options)
    resumed = resume(open_run("stopped"))
    expected, got = files(whole), files(resumed)
    for key in expected:
        assert got[key] == expected[key], key


def test_same_seed_same_bytes_and_another_seed_others() -> None:
    options = {**RUNS["toy, lstm"], "steps": 1_000}
    one, two, other = (bestiary.train(run_dir=f"r{i}", seed=s, **options) for i, s in enumerate((5, 5, 6)))
    assert files(one) == files(two)
    assert files(one)["model"] != files(other)["model"]


def test_resume_from_an_earlier_checkpoint_sets_later_ones_aside() -> None:
    run = bestiary.train(run_dir="r", **RUNS["toy, lstm"])
    before = files(run)
    earlier = run.checkpoints[2].steps
    assert earlier < 4_000
    again = resume(open_run("r"), checkpoint=earlier)
    assert files(again) == before  # the same road again
    assert list(Path("r/checkpoints").glob("abandoned-*"))


def test_a_run_that_cannot_be_saved_exactly_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        stop_at(500, patch)
        with pytest.raises(Interrupted):
            bestiary.train("gymnasium/CartPole-v1", run_dir="r", steps=1_000, **SMALL)
    run = resume(open_run("r"))
    assert run.steps >= 1_000
    assert "not bit for bit" in capsys.readouterr().err
    steps = run.episodes["step"]
    assert (steps[1:] >= steps[:-1]).all()


def test_extending_a_run_stretches_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
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
    before = files(run)
    resume(open_run("r"))
    assert files(run) == before
    assert "is finished" in capsys.readouterr().err
