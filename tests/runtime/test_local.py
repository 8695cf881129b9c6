"""The local runtime: the same mathematics as serial, bounded lag, reproducible where asked, clean in every end."""

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
from bestiary.errors import RunError
from bestiary.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.runtime import local
from bestiary.runtime.actor import Actor
from bestiary.runtime.build import build, rollouts_in_flight
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import bound_by
from bestiary.runtime.session import Session
from bestiary.runtime.snapshots import Snapshot

LOCAL: dict[str, Any] = {"runtime": "local", "num_envs": 8, "batch_size": 4, "unroll_length": 5, "log_every": 100}


def weights_of(run: bestiary.Run) -> bytes:
    return (run.checkpoints[-1].path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("env", ["toy/catch", "atari/Pong"])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_gradients_from_worker_threads_are_the_serial_ones_bit_for_bit(env: str, memory: str) -> None:
    config = resolve(
        {"env": env, "memory": memory, "runtime": "serial", "num_envs": 6, "batch_size": 6, "group_size": 2}
    )
    (actor,), learner = build(config)
    actor.start()
    rollout = actor.collect()
    actor.pool.close()
    found = learner.gradients(rollout)
    alone, sums = found.parameters, found.sums
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        learner.map = workers.map
        for _ in range(3):
            found = learner.gradients(rollout)
            together, together_sums = found.parameters, found.sums
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
            assert all(torch.equal(sums[name], together_sums[name]) for name in sums)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pools": 4, "num_envs": 16},
        {"pools": 4, "num_envs": 16, "actor_threads": 2},
        {"num_envs": 16, "batch_size": 2, "max_lag": 5},
        {"num_envs": 4, "batch_size": 8},
        {"max_lag": 0},
        {"algo.replay": 3},
        {"algo.replay": 2, "num_envs": 16, "max_lag": 3},
    ],
    ids=str,
)
def test_lag_is_never_above_the_cap(options: dict[str, Any]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=3_000, **{**LOCAL, **options})
    assert run.metrics["max_lag"].max() <= run.config.training.max_lag
    assert (run.metrics["lag"] <= run.metrics["max_lag"]).all()
    assert run.steps >= 3_000
    updates = run.steps / (LOCAL["unroll_length"] * {**LOCAL, **options}["batch_size"]) * options.get("algo.replay", 1)
    assert run.metrics["updates"][-1] == pytest.approx(updates)


@pytest.mark.parametrize(
    "options", [{"lag": 1}, {"lag": 2, "pools": 4, "actor_threads": 2, "num_envs": 16}, {"lag": 0}], ids=str
)
def test_a_fixed_lag_gives_the_same_bytes_again(options: dict[str, Any]) -> None:
    options = {**LOCAL, "memory": "gru", "steps": 2_000, **options}
    one, two = (bestiary.train("toy/recall", run_dir=f"r{i}", **options) for i in (1, 2))
    assert weights_of(one) == weights_of(two)
    assert (one.path / "episodes.csv").read_bytes() == (two.path / "episodes.csv").read_bytes()
    assert one.metrics["max_lag"].max() <= options["lag"] * (one.metrics["updates"][-1] / (one.steps / 40)) + 1


def test_a_fixed_lag_is_reproducible_on_atari_too() -> None:
    options = {**LOCAL, "lag": 1, "steps": 200}
    one, two = (bestiary.train("atari/Pong", run_dir=f"r{i}", **options) for i in (1, 2))
    assert weights_of(one) == weights_of(two)


def test_every_decision_is_made_with_one_published_version_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner updates its weights in place all the time; two actor threads decide meanwhile, each with weights that are
    bit for bit those of the version that they write into their rollouts, before and after the decision."""
    published: dict[int, bytes] = {}
    of, act = Snapshot.of.__func__, Actor.act  # type: ignore[attr-defined]

    def digest(tensors: Any) -> bytes:
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).digest()

    def publish(cls: type[Snapshot], *args: Any) -> Snapshot:
        snapshot: Snapshot = of(cls, *args)
        published[snapshot.version] = digest(snapshot.tensors)
        return snapshot

    decided: list[int] = []

    def watched(self: Actor) -> None:
        assert digest(self.agent.state_dict().values()) == published[self.version]
        act(self)
        assert digest(self.agent.state_dict().values()) == published[self.version]
        decided.append(self.version)

    monkeypatch.setattr(Snapshot, "of", classmethod(publish))
    monkeypatch.setattr(Actor, "act", watched)
    options = {**LOCAL, "num_envs": 16, "pools": 4, "actor_threads": 2, "steps": 4_000}
    run = bestiary.train("toy/catch", run_dir="r", **options)
    assert len(set(published.values())) == len(published) > 100
    assert len(set(decided)) > 50
    assert run.steps >= 4_000


@pytest.mark.parametrize("slow", ["learner", "environment"])
def test_a_slow_side_neither_deadlocks_nor_piles_up(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"env": "toy/catch", "steps": 1_200, **LOCAL})
    actors, _ = build(config)
    part, method = (Learner, "learn") if slow == "learner" else (type(actors[0].pool), "recv")
    original = getattr(part, method)

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return original(*args)

    monkeypatch.setattr(part, method, slowly)
    waiting: list[int] = []
    publish = local.Exchange.publish

    def counted(self: local.Exchange, *args: Any) -> None:
        waiting.append(self.begun - self.learnt)
        publish(self, *args)

    monkeypatch.setattr(local.Exchange, "publish", counted)
    made: list[weakref.ref[Rollout]] = []
    alive: list[int] = []
    empty = Rollout.empty.__func__  # type: ignore[attr-defined]

    def tracked(cls: type[Rollout], *args: Any) -> Rollout:
        rollout: Rollout = empty(cls, *args)
        made.append(weakref.ref(rollout))
        alive.append(sum(ref() is not None for ref in made))
        return rollout

    monkeypatch.setattr(Rollout, "empty", classmethod(tracked))
    run = bestiary.train("toy/catch", run_dir="r", steps=1_200, **LOCAL)
    assert run.steps >= 1_200
    in_flight = rollouts_in_flight(config.make_algorithm(), config.training)
    assert max(waiting) <= in_flight
    assert len(made) > 10 * in_flight
    assert max(alive) <= in_flight + 2 * config.training.pools + 1  # being written, in flight, just learnt from
    shares = run.metrics
    if slow == "learner":
        assert shares["actor_wait"].mean() > shares["learner_wait"].mean()
    else:
        assert shares["learner_wait"].mean() > shares["actor_wait"].mean()


def test_nothing_is_left_behind() -> None:
    process = psutil.Process()
    bestiary.train("atari/Pong", run_dir="r0", steps=200, **LOCAL)  # what is made once and stays
    gc.collect()
    threads, files, children = threading.active_count(), set(os.listdir("/dev/shm")), process.children()
    bestiary.train("atari/Pong", run_dir="r1", steps=200, **LOCAL)
    gc.collect()
    assert threading.active_count() == threads
    assert set(os.listdir("/dev/shm")) == files
    assert process.children() == children
    assert not Path("r1/lock.json").exists()


def test_what_kills_an_actor_ends_the_run_with_its_cause_and_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve({"env": "toy/catch", "steps": 10_000, **LOCAL})
    actors, _ = build(config)
    pool = type(actors[0].pool)
    original, calls = pool.recv, [0]

    def recv(self: Any) -> Any:
        calls[0] += 1
        if calls[0] == 200:
            raise OSError("the emulator is gone")
        return original(self)

    monkeypatch.setattr(pool, "recv", recv)
    before = threading.active_count()
    with pytest.raises(RunError, match="the emulator is gone"):
        bestiary.train("toy/catch", run_dir="r", steps=10_000, save_every=200, **LOCAL)
    run = bestiary.load("r")
    assert run.checkpoints
    assert run.checkpoints[-1].problem() is None
    assert threading.active_count() == before


def test_a_resumed_local_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first = bestiary.train("toy/catch", run_dir="r", steps=1_000, **LOCAL)
    seconds, games = first.metrics["seconds"][-1], first.metrics["games"][-1]
    from bestiary.runtime.train import resume

    run = resume(bestiary.load("r"), steps=2_000)
    assert run.steps >= 2_000
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()
    assert run.metrics["seconds"][-1] > seconds
    assert run.metrics["games"][-1] > games
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()


def test_a_resumed_local_run_acts_with_the_weights_it_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    bestiary.train("toy/catch", run_dir="r", steps=1_000, **LOCAL)
    from bestiary.runtime.train import resume

    learnt = {name: tensor for name, tensor in bestiary.load("r").checkpoints[-1].model().items()}
    acted: dict[int, bool] = {}
    act = Actor.act

    def watched(self: Actor) -> None:
        same = all(torch.equal(tensor, learnt[name]) for name, tensor in self.agent.state_dict().items())
        acted.setdefault(id(self), same)  # of the first decision
        act(self)

    monkeypatch.setattr(Actor, "act", watched)
    resume(bestiary.load("r"), steps=1_200)
    assert len(acted) == 2
    assert next(iter(acted.values()))  # the first to act cannot have seen an update yet


def test_the_rows_say_who_waits() -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=2_000, **LOCAL)
    shares = [run.metrics[name] for name in ("actor_environment", "actor_inference", "actor_wait", "learner_wait")]
    assert all((share >= 0).all() for share in shares)
    assert all(share.any() for share in shares[:2])  # whoever plays, steps and decides


@pytest.mark.parametrize(
    ("environment", "inference", "wait", "learner_wait", "expected"),
    [
        (0.1, 0.2, 0.6, 0.0, ("learner", "--batch-size")),
        (0.6, 0.3, 0.0, 0.5, ("environment", "--pools")),
        (0.2, 0.7, 0.0, 0.5, ("inference", "--num-envs")),
    ],
)
def test_what_a_run_is_bound_by(
    environment: float, inference: float, wait: float, learner_wait: float, expected: tuple[str, str]
) -> None:
    names = ("actor_environment", "actor_inference", "actor_wait", "learner_wait")
    shares = dict(zip(names, (environment, inference, wait, learner_wait), strict=True))
    what, hint = bound_by(shares, "--batch-size")
    assert what == expected[0]
    assert expected[1] in hint


def test_replay_learns_from_each_rollout_twice_but_counts_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    record = Session.record

    def recorded(self: Session, metrics: list, *args: Any) -> None:
        seen.append(len(metrics))
        record(self, metrics, *args)

    monkeypatch.setattr(Session, "record", recorded)
    run = bestiary.train("toy/catch", run_dir="r", steps=400, **{**LOCAL, "algo.replay": 2})
    assert set(seen) == {2}
    assert run.steps == 400
    assert run.metrics["updates"][-1] == 2 * 400 / 20
    assert run.episodes["step"].max() <= 400
