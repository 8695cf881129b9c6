"""Local runtime: same gradients as serial, bounded policy lag, reproducible with --lag, clean shutdown."""

import gc
import hashlib
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import bestiary
from bestiary.algorithms.base import Batch
from bestiary.api import resume
from bestiary.config.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.training import local
from bestiary.training.actor import Actor
from bestiary.training.factory import make_actors_and_learner, max_rollouts_in_flight
from bestiary.training.learner import Learner
from bestiary.training.session import Session
from bestiary.training.utilisation import find_bottleneck
from bestiary.training.weights import Weights
from bestiary.utils.errors import RunError

LOCAL: dict[str, Any] = {"runtime": "local", "num_envs": 8, "batch_size": 4, "rollout_length": 5, "log_every": 100}


def model_bytes(run: bestiary.Run) -> bytes:
    return (run.checkpoints[-1].path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("env", ["toy/catch", "atari/Pong"])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_gradients_of_learner_threads_equal_serial_gradients_bit_for_bit(env: str, memory: str) -> None:
    config = resolve(
        {"env": env, "memory": memory, "runtime": "serial", "num_envs": 6, "batch_size": 6, "micro_batch_size": 2}
    )
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    rollout = actor.collect()
    actor.pool.close()
    serial = learner.batch_gradient(Batch(rollout, learner.algorithm.loss))
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        learner.parallel_map = threads.map
        for _ in range(3):
            threaded = learner.batch_gradient(Batch(rollout, learner.algorithm.loss))
            assert all(torch.equal(a, b) for a, b in zip(serial.tensors, threaded.tensors, strict=True))
            assert all(torch.equal(serial.sums[name], threaded.sums[name]) for name in serial.sums)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pools": 4, "num_envs": 16},
        {"pools": 4, "num_envs": 16, "actor_threads": 2},
        {"num_envs": 16, "batch_size": 2, "max_lag": 5},
        {"num_envs": 4, "batch_size": 8},
        {"max_lag": 0},
        {"algo.reuse": 3},
        {"algo.reuse": 2, "num_envs": 16, "max_lag": 3},
    ],
    ids=str,
)
def test_policy_lag_is_at_most_max_lag(options: dict[str, Any]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=3_000, **{**LOCAL, **options})
    assert run.metrics["max_policy_lag"].max() <= run.config.training.max_lag
    assert (run.metrics["policy_lag"] <= run.metrics["max_policy_lag"]).all()
    assert run.steps >= 3_000
    updates = run.steps / (LOCAL["rollout_length"] * {**LOCAL, **options}["batch_size"]) * options.get("algo.reuse", 1)
    assert run.metrics["updates"][-1] == pytest.approx(updates)


@pytest.mark.parametrize(
    "options", [{"lag": 1}, {"lag": 2, "pools": 4, "actor_threads": 2, "num_envs": 16}, {"lag": 0}], ids=str
)
def test_fixed_lag_is_reproducible_bit_for_bit(options: dict[str, Any]) -> None:
    options = {**LOCAL, "memory": "gru", "steps": 2_000, **options}
    one, two = (bestiary.train("toy/recall", run_dir=f"r{i}", **options) for i in (1, 2))
    assert model_bytes(one) == model_bytes(two)
    assert (one.path / "episodes.csv").read_bytes() == (two.path / "episodes.csv").read_bytes()
    assert one.metrics["max_policy_lag"].max() <= options["lag"] * (one.metrics["updates"][-1] / (one.steps / 40)) + 1


def test_fixed_lag_is_reproducible_on_atari() -> None:
    options = {**LOCAL, "lag": 1, "steps": 200}
    one, two = (bestiary.train("atari/Pong", run_dir=f"r{i}", **options) for i in (1, 2))
    assert model_bytes(one) == model_bytes(two)


def test_each_step_uses_complete_weights_of_one_published_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner updates its weights in place while two actor threads act. Before and after each step, an actor's
    weights equal those of the version that it stores in its rollout, bit for bit."""
    published: dict[int, bytes] = {}
    from_agent = Weights.from_agent.__func__  # type: ignore[attr-defined]
    act = Actor.act

    def digest(tensors: Any) -> bytes:
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).digest()

    def publish(cls: type[Weights], *args: Any) -> Weights:
        weights: Weights = from_agent(cls, *args)
        published[weights.version] = digest(weights.tensors)
        return weights

    used_versions: list[int] = []

    def checked_act(self: Actor) -> None:
        assert digest(self.agent.state_dict().values()) == published[self.version]
        act(self)
        assert digest(self.agent.state_dict().values()) == published[self.version]
        used_versions.append(self.version)

    monkeypatch.setattr(Weights, "from_agent", classmethod(publish))
    monkeypatch.setattr(Actor, "act", checked_act)
    options = {**LOCAL, "num_envs": 16, "pools": 4, "actor_threads": 2, "steps": 4_000}
    run = bestiary.train("toy/catch", run_dir="r", **options)
    assert len(set(published.values())) == len(published) > 100
    assert len(set(used_versions)) > 50
    assert run.steps >= 4_000


@pytest.mark.parametrize("slow", ["learner", "environment"])
def test_slow_learner_or_environment_causes_no_deadlock_and_no_growth(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"env": "toy/catch", "steps": 1_200, **LOCAL})
    actors, _ = make_actors_and_learner(config)
    cls, method = (Learner, "learn") if slow == "learner" else (type(actors[0].pool), "recv")
    original = getattr(cls, method)

    def slowed(*args: Any) -> Any:
        time.sleep(0.02)
        return original(*args)

    monkeypatch.setattr(cls, method, slowed)
    in_flight_counts: list[int] = []
    publish = local.RolloutQueue.publish

    def counted(self: local.RolloutQueue, *args: Any) -> None:
        in_flight_counts.append(self.num_started - self.num_consumed)
        publish(self, *args)

    monkeypatch.setattr(local.RolloutQueue, "publish", counted)
    created: list[weakref.ref[Rollout]] = []
    alive: list[int] = []
    empty = Rollout.empty.__func__  # type: ignore[attr-defined]

    def tracked(cls: type[Rollout], *args: Any) -> Rollout:
        rollout: Rollout = empty(cls, *args)
        created.append(weakref.ref(rollout))
        alive.append(sum(ref() is not None for ref in created))
        return rollout

    monkeypatch.setattr(Rollout, "empty", classmethod(tracked))
    run = bestiary.train("toy/catch", run_dir="r", steps=1_200, **LOCAL)
    assert run.steps >= 1_200
    in_flight = max_rollouts_in_flight(config.make_algorithm(), config.training)
    assert max(in_flight_counts) <= in_flight
    assert len(created) > 10 * in_flight
    assert max(alive) <= in_flight + 2 * config.training.pools + 1  # being collected, in flight, just consumed
    actor_wait, learner_wait = (run.metrics[name].mean() for name in ("actor_wait", "learner_wait"))
    assert actor_wait > learner_wait if slow == "learner" else learner_wait > actor_wait


def test_run_leaves_no_threads_processes_or_files_behind() -> None:
    process = psutil.Process()
    bestiary.train("atari/Pong", run_dir="r0", steps=200, **LOCAL)  # creates what is kept for the whole process
    gc.collect()
    threads, files, children = threading.active_count(), set(os.listdir("/dev/shm")), process.children()
    bestiary.train("atari/Pong", run_dir="r1", steps=200, **LOCAL)
    gc.collect()
    assert threading.active_count() == threads
    assert set(os.listdir("/dev/shm")) == files
    assert process.children() == children
    assert not Path("r1/lock.json").exists()


def test_error_in_an_actor_stops_the_run_and_keeps_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve({"env": "toy/catch", "steps": 10_000, **LOCAL})
    actors, _ = make_actors_and_learner(config)
    pool = type(actors[0].pool)
    original, calls = pool.recv, [0]

    def recv(self: Any) -> Any:
        calls[0] += 1
        if calls[0] == 200:
            raise OSError("the emulator crashed")
        return original(self)

    monkeypatch.setattr(pool, "recv", recv)
    before = threading.active_count()
    with pytest.raises(RunError, match="the emulator crashed"):
        bestiary.train("toy/catch", run_dir="r", steps=10_000, save_every=200, **LOCAL)
    run = bestiary.load("r")
    assert run.checkpoints
    assert run.checkpoints[-1].find_damage() is None
    assert threading.active_count() == before


def test_resumed_run_continues_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    first = bestiary.train("toy/catch", run_dir="r", steps=1_000, **LOCAL)
    seconds, games = first.metrics["seconds"][-1], first.metrics["games"][-1]
    run = resume(bestiary.load("r"), steps=2_000)
    assert run.steps >= 2_000
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()
    assert run.metrics["seconds"][-1] > seconds
    assert run.metrics["games"][-1] > games
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()


def test_resumed_run_acts_with_the_weights_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    bestiary.train("toy/catch", run_dir="r", steps=1_000, **LOCAL)
    saved = bestiary.load("r").checkpoints[-1].load_model()
    used_saved_weights: dict[int, bool] = {}  # by actor, at its first step
    act = Actor.act

    def checked_act(self: Actor) -> None:
        same = all(torch.equal(tensor, saved[name]) for name, tensor in self.agent.state_dict().items())
        used_saved_weights.setdefault(id(self), same)
        act(self)

    monkeypatch.setattr(Actor, "act", checked_act)
    resume(bestiary.load("r"), steps=1_200)
    assert len(used_saved_weights) == 2
    assert next(iter(used_saved_weights.values()))  # the first actor to act acts before any update


def test_metrics_contain_time_fractions() -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=2_000, **LOCAL)
    fractions = [run.metrics[name] for name in ("actor_environment", "actor_inference", "actor_wait", "learner_wait")]
    assert all((fraction >= 0).all() for fraction in fractions)
    assert all(fraction.any() for fraction in fractions[:2])  # environment and inference


@pytest.mark.parametrize(
    ("environment", "inference", "wait", "learner_wait", "expected"),
    [
        (0.1, 0.2, 0.6, 0.0, ("learner", "--batch-size")),
        (0.6, 0.3, 0.0, 0.5, ("environment", "--pools")),
        (0.2, 0.7, 0.0, 0.5, ("inference", "--num-envs")),
    ],
)
def test_find_bottleneck(
    environment: float,
    inference: float,
    wait: float,
    learner_wait: float,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("actor_environment", "actor_inference", "actor_wait", "learner_wait")
    fractions = dict(zip(names, (environment, inference, wait, learner_wait), strict=True))
    bottleneck, suggestion = find_bottleneck(fractions, "--batch-size")
    assert bottleneck == expected[0]
    assert expected[1] in suggestion
    assert "GPU" not in suggestion  # there is none on this machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, suggestion = find_bottleneck(fractions, "--batch-size")
    assert ("GPU" in suggestion) == (bottleneck != "environment")


def test_the_bottleneck_is_named_only_in_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    bestiary.train("toy/catch", run_dir="r", steps=1_600, **LOCAL)
    lines = capsys.readouterr().err.splitlines()
    assert [k for k, line in enumerate(lines) if "bottleneck" in line] == [len(lines) - 1]


def test_reuse_trains_on_each_rollout_twice_but_counts_its_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    updates_per_call: list[int] = []
    log = Session.log

    def counted_log(self: Session, metrics: list, *args: Any) -> None:
        updates_per_call.append(len(metrics))
        log(self, metrics, *args)

    monkeypatch.setattr(Session, "log", counted_log)
    run = bestiary.train("toy/catch", run_dir="r", steps=400, **{**LOCAL, "algo.reuse": 2})
    assert set(updates_per_call) == {2}
    assert run.steps == 400
    assert run.metrics["updates"][-1] == 2 * 400 / 20
    assert run.episodes["step"].max() <= 400
