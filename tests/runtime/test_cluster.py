"""The cluster runtime on a real Ray of several nodes: the same mathematics, and the same bytes where that is promised.
One Ray serves all tests that have `nodes`."""

import copy
import itertools
import multiprocessing
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.cli import run_command
from bestiary.errors import RunError
from bestiary.resolve import resolve
from bestiary.runs.folder import Run
from bestiary.runtime.build import build, rollouts_in_flight
from bestiary.runtime.bundle import Bundle
from bestiary.runtime.wire import arrays_of, pack_state, share_of
from bestiary.runtime.workers import Oracle, Student
from tests.clusters import SMALL, WORLD, newest, train_while, wait_until
from tests.nodes import Nodes, own_address

pytestmark = pytest.mark.xdist_group("ray")


def weights_of(run: Run) -> bytes:
    return (run.checkpoints[-1].path / "model.safetensors").read_bytes()


# --- the same mathematics ---


@pytest.mark.parametrize(
    "options",
    [
        {"env": "toy/recall", "memory": "gru", "lag": 1, "steps": 400},
        {
            **{"env": "toy/catch", "algo": "ppo", "rollout_length": 10, "algo.sequence": 5, "algo.minibatches": 2},
            **{"batch_size": None, "unroll_length": None, "steps": 320},
        },
    ],
    ids=["impala", "ppo"],
)
def test_a_cluster_computes_what_one_machine_computes_bit_for_bit(nodes: Nodes, options: dict[str, Any]) -> None:
    """Whose rollouts are played with which weights is fixed in both; so are the losses, and all that follows."""
    options = {key: value for key, value in {**SMALL, **options}.items() if value is not None}
    local = bestiary.train(run_dir="local", runtime="local", **options)
    cluster = bestiary.train(run_dir="cluster", cluster=nodes.address, **options)
    assert weights_of(cluster) == weights_of(local)
    assert (cluster.path / "episodes.csv").read_bytes() == (local.path / "episodes.csv").read_bytes()
    assert cluster.metrics["loss"].tolist() == local.metrics["loss"].tolist()
    assert cluster.metrics["restarts"].tolist() == [0] * len(cluster.metrics["step"])


def _learn_all(bundle: Any, rank: int, rollouts: Any, before: Any, meeting: str, answers: Any) -> None:
    """What one of several learners makes of its shares, in a process of its own."""
    student, learners = Student(), bundle.config().training.learners
    student.prepare(bundle, rank, gpu=False, neighbours=learners)
    student.join(meeting, learners, together=True, shared=False, timeout=60)
    student.load(*before)
    metrics = [student.learner.learn([share_of(rollout, rank, learners, 4)]) for rollout in rollouts]
    answers.put((rank, metrics, student.learner.steps, pack_state(student.learner.save())))


@pytest.mark.parametrize("learners", [2, 4])
def test_several_learners_make_the_updates_of_one_popart_included(learners: int, tmp_path: Path) -> None:
    """Four updates of four trajectories of two tasks; the statistics move far with each."""
    Path("world.py").write_text(WORLD)
    given: dict[str, Any] = {
        **{**SMALL, "env": ["world.py:World", "world.py:Large"], "popart": True, "critic.beta": 0.1},
        **{"runtime": "serial", "num_envs": 8, "device": "cpu"},
    }
    (actor,), learner = build(resolve(given))
    actor.start()
    rollouts = [actor.collect() for _ in range(2)]
    before = copy.deepcopy(pack_state(learner.save())), learner.counters()
    alone = [learner.learn([rollout]) for rollout in rollouts]
    assert learner.version == 4
    assert learner.adaptive.sigma.max() > 2 * learner.adaptive.sigma.min()

    config = resolve({**given, "runtime": "cluster", "cluster": "local", "learners": learners, "pools": 1})
    bundle = Bundle.of(config, actor.pool)
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.Queue()
    meeting = f"file://{tmp_path / 'meeting'}"
    arguments = [(bundle, rank, rollouts, before, meeting, answers) for rank in range(learners)]
    group = [fork.Process(target=_learn_all, args=each) for each in arguments]
    for process in group:
        process.start()
    found = [answers.get(timeout=120) for _ in group]
    for process in group:
        process.join(timeout=60)

    whole = pack_state(learner.save())
    for _, metrics, steps, state in found:
        assert steps == learner.steps
        for mine, theirs in zip(itertools.chain(*alone), itertools.chain(*metrics), strict=True):
            assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-5)
        for file, arrays in whole.items():
            for name, array in arrays.items():
                np.testing.assert_allclose(state[file][name], array, rtol=1e-4, atol=1e-6, err_msg=name)
                assert np.array_equal(state[file][name], found[0][3][file][name])  # all learners have the same bits


def _meet(rank: int, meeting: str, answers: Any) -> None:
    import psutil

    student: Any = Student()
    student.rank, student.learner = rank, SimpleNamespace(device=torch.device("cpu"))
    student.where = lambda: meeting.removeprefix("tcp://").rpartition(":")[0]
    student.join(meeting, 2, together=False, shared=False, timeout=60)
    here = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    answers.put({c.laddr.ip for c in here})


def test_learners_on_several_machines_meet_at_the_address_that_ray_has() -> None:
    """... and not at what the name of the machine stands for, which no other machine might reach."""
    own = own_address()
    with socket.socket() as probe:
        probe.bind((own, 0))
        meeting = f"tcp://{own}:{probe.getsockname()[1]}"
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.Queue()
    pair = [fork.Process(target=_meet, args=(rank, meeting, answers)) for rank in range(2)]
    for process in pair:
        process.start()
    found = [answers.get(timeout=60) for _ in pair]
    for process in pair:
        process.join(timeout=60)
    assert all(own in addresses for addresses in found)
    assert not any(address.startswith("127.") for addresses in found for address in addresses)


BAD = """
import torch
from bestiary.agents.torsos import MLP


class Bad(MLP):
    def forward(self, observation):
        if torch.is_grad_enabled():
            torch.ones(2, 3) @ torch.ones(2, 3)
        return super().forward(observation)
"""


def test_a_users_mistake_in_learning_is_a_line_and_not_a_lost_learner(nodes: Nodes) -> None:
    Path("bad.py").write_text(BAD)
    with pytest.raises(RunError, match=r"bad.py, line 9: RuntimeError: mat1 and mat2 shapes"):
        bestiary.train("toy/catch", run_dir="r", torso="bad.py:Bad", cluster=nodes.address, learners=2, **SMALL)


# --- many actors ---


@pytest.mark.slow
def test_one_process_decides_for_all(nodes: Nodes) -> None:
    """... with the newest weights at every decision, memories and all; and where it is killed, another does."""

    def act() -> None:
        wait_until(lambda: newest("step") > 200)
        (oracle,) = nodes.processes("Oracle")
        oracle.kill()
        wait_until(lambda: newest("restarts") == 1)
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)

    run = train_while(
        act, "toy/recall", memory="gru", cluster=nodes.address, actors=2, inference="central", **{"memory.hidden": 8}
    )
    assert run.metrics["max_lag"].max() <= run.config.training.max_lag
    assert run.metrics["rho"] == pytest.approx(
        1, abs=0.2
    )  # the learner finds what the oracle decided as likely as it did
    assert run.metrics["lag"].max() > 0


def test_whoever_decides_for_all_uses_the_newest_weights_and_waits_for_those_that_it_is_asked_for() -> None:
    config = resolve({**SMALL, "env": "toy/catch"})
    pool = config.make_pool(1, 0)
    pool.close()
    agents = [config.make_agent(pool, seed=seed) for seed in range(3)]
    oracle, answers = Oracle(), dict[int, Any]()
    oracle.prepare(Bundle.of(config, pool), gpu=False)
    observation = {k: np.zeros((1, 2, *s.shape), s.dtype) for k, s in pool.observation_spec.items()}
    whole = np.zeros((1, 2), np.int64)
    inputs = {"observation": observation, "reward": whole.astype(np.float32), "done": whole > 0}
    inputs |= {"last_action": whole, "task": whole}

    def ask(wanted: int) -> threading.Thread:
        def think() -> None:
            answers[wanted] = oracle.think(wanted, inputs, [])

        thread = threading.Thread(target=think, daemon=True)
        thread.start()
        return thread

    def take(version: int) -> None:
        oracle.take(version, arrays_of(list(agents[version].state_dict().values())))

    second = ask(2)
    take(1)
    ask(1).join(timeout=60)
    assert answers[1][0] == 1
    assert 2 not in answers  # which is not answered with the old ones
    take(2)
    take(0)  # late
    second.join(timeout=60)
    ask(0).join(timeout=60)
    assert answers[2][0] == answers[0][0] == 2
    assert np.array_equal(answers[2][1], answers[0][1])
    assert not np.array_equal(answers[2][1], answers[1][1])


SLOW = """
import gymnasium, numpy as np, time, torch
from gymnasium.spaces import Box, Discrete
from bestiary.agents.torsos import MLP


class Vast(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (20_000,)), Discrete(2)

    def reset(self, seed=None, options=None):
        return np.zeros(20_000, np.float32), {}

    def step(self, action):
        return np.zeros(20_000, np.float32), 0.0, False, False, {}


class Slow(MLP):
    def forward(self, observation):
        if torch.is_grad_enabled():  # it learns
            time.sleep(0.2)
        return super().forward(observation)
"""


def test_memory_stays_flat_where_the_learner_is_slow(nodes: Nodes) -> None:
    """Rollouts of 2 MB each, played in milliseconds; no more of them lie in the store than may be in flight."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    Path("slow.py").write_text(SLOW)
    state, used = get_state_from_address(nodes.address), []

    def act() -> None:
        wait_until(lambda: newest("step") > 0)
        for _ in range(30):
            used.append(get_memory_info_reply(state).store_stats.object_store_bytes_used)
            time.sleep(0.1)

    small = {"torso.width": 2}  # weights are in the store, too
    run = train_while(act, "slow.py:Vast", torso="slow.py:Slow", cluster=nodes.address, actors=2, **small)
    rollout = 6 * 4 * 20_000 * 4  # bytes: a step more than an unroll, four environments
    at_once = rollouts_in_flight(run.config.make_algorithm(), run.config.training)
    assert run.metrics["max_queue"].max() > 1  # there is a queue
    assert max(used) > 2 * rollout
    assert max(used) < (at_once + 4) * rollout  # some of which are about to be let go


# --- what users bring, and what does not fit ---


def test_the_users_own_files_reach_machines_that_do_not_have_them(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "helper.py").write_text("SCALE = 2.0\n")
    (tmp_path / "parts" / "own.py").write_text(WORLD.replace("scale = 1.0", "from helper import SCALE as scale"))
    config = resolve({"env": "parts/own.py:World", **SMALL})
    bundle = Bundle.of(config, config.make_pool(1, 0))
    (tmp_path / "parts").rename(tmp_path / "elsewhere")  # as if this were another machine
    config = bundle.config()
    assert not config.envs[0].startswith(str(tmp_path))
    pool = config.make_pool(2, 0)
    pool.reset()
    pool.send(np.ones(2, np.int64))
    assert pool.recv().reward.tolist() == [2.0, 2.0]
    pool.close()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--actors 9", "--actors 9: needs 9 CPUs; the cluster has 2 on 1 machine, 2 of them free: room for 2"),
        ("--workers 9", "--workers 9: a learner needs so many CPUs on one machine, and there are --learners 1; the"),
        ("--actors 2 --workers 1", "--actors 2: needs 2 CPUs and 1 for --workers; the cluster has 2 on 1 machine"),
    ],
)
def test_more_than_there_is_room_for(
    nodes: Nodes, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "toy/catch", "--cluster", nodes.address, "--run-dir", "r", *words.split()]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("r").exists()


def test_a_cluster_that_wants_another_token(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of somebody else, who has no business here")
    assert run_command(["train", "toy/catch", "--cluster", nodes.address, "--run-dir", "r"]) == 2
    assert f"{nodes.address} does not take our token" in capsys.readouterr().err
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--cluster 127.0.0.1:9", "--cluster 127.0.0.1:9: 127.0.0.1:9 cannot be reached: Connection refused"),
        ("--cluster somewhere", "--cluster somewhere: expected local, auto or host:port, such as 10.0.0.5:6379"),
        ("--cluster local --runtime serial", "--cluster local and --runtime serial contradict each other"),
        ("--runtime cluster", "--runtime cluster: which? --cluster local, auto or an address"),
        ("--actors 2", "--actors: has an effect only on a cluster (--cluster)"),
        ("--cluster local --learners 3", "try --learners 2"),
        ("--cluster local --learners 2 --algo ppo", "--learners 2: this algorithm learns in one place; --learners 1"),
        ("--cluster local --actor-threads 2", "--actor-threads: actors of a cluster have a thread a pool"),
        ("--cluster local --actors 2 --min-actors 3", "--min-actors 3: there are --actors 2"),
        (
            "--cluster local --lag 1 --inference central",
            "--lag 1: with --inference central every decision is made with",
        ),
        ("--cluster local --lag 1 --min-actors 1", "--min-actors 1: here every rollout has its place"),
    ],
)
def test_mistakes_are_named_before_any_work(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "toy/catch", "--run-dir", "r", *words.split()]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert expected in error
    assert not Path("r").exists()
