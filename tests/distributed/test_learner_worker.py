"""Learner workers in a group: equal updates, and the network interface they use."""

import copy
import itertools
import multiprocessing
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from bestiary.distributed.learner_worker import LearnerWorker, critic_statistics
from bestiary.distributed.serialisation import pack_state, shard
from bestiary.distributed.shipped_config import ShippedConfig
from bestiary.training.factory import make_actors_and_learner
from tests.distributed.helpers import SMALL, write_faulty_env
from tests.distributed.ray_cluster import external_address
from tests.trusted import resolve_own

pytestmark = pytest.mark.xdist_group("ray")


def _learn_in_group(
    shipped_config: Any, rank: int, rollouts: Any, initial_state: Any, rendezvous: str, results: Any
) -> None:
    """Run one learner of a group in its own process, on its shards of some rollouts."""
    worker = LearnerWorker()
    num_learners = shipped_config.load().training.learners
    worker.setup(shipped_config, rank, use_gpu=False, learners_on_node=num_learners)
    worker.join_group(rendezvous, num_learners, same_node=True, shared_gpu=False, timeout=60)
    worker.load_state(*initial_state)
    metrics = [worker.learner.learn([shard(rollout, rank, num_learners, 4)]) for rollout in rollouts]
    results.put((rank, metrics, worker.learner.steps, pack_state(worker.learner.save())))


POPART = {"env": ["faulty_env.py:FaultyEnv", "faulty_env.py:LargeRewardEnv"], "critic": "popart", "critic.beta": 0.1}
# The updates are equal only if each batch has all trajectories: several minibatches are drawn in another order.
PPO = {"env": "faulty_env.py:FaultyEnv", "algo": "ppo", "algo.epochs": 2, "algo.minibatches": 1}


NORMALISED = {**PPO, "algo.reward_clipping": "return_std", "env": POPART["env"]}


@pytest.mark.parametrize(("num_learners", "algorithm"), [(2, POPART), (4, POPART), (2, PPO), (2, NORMALISED)])
def test_a_group_of_learners_computes_the_updates_of_a_single_learner(
    num_learners: int, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    """IMPALA with PopArt: 4 updates of 4 trajectories of 2 tasks, whose statistics change a lot in each update.

    PPO: 2 updates from each of 2 rollouts, with advantages that are normalised over all learners. NORMALISED: the
    rewards of the 2 tasks are normalised with statistics over all learners.
    """
    write_faulty_env()
    small = {name: value for name, value in SMALL.items() if name != "batch_size" or algorithm is POPART}
    options: dict[str, Any] = {**small, **algorithm, "runtime": "serial", "num_envs": 8, "device": "cpu"}
    (actor,), learner = make_actors_and_learner(resolve_own(options))
    actor.start()
    rollouts = [actor.collect() for _ in range(2)]
    initial_state = copy.deepcopy(pack_state(learner.save())), learner.counters()
    single_metrics = [learner.learn([rollout]) for rollout in rollouts]
    assert learner.version == 4
    if algorithm is POPART:
        assert learner.popart.sigma.max() > 2 * learner.popart.sigma.min()
    if algorithm is NORMALISED:
        assert learner.return_statistics is not None
        assert learner.return_statistics.deviation.max() > 2 * learner.return_statistics.deviation.min()

    config = resolve_own({**options, "runtime": "cluster", "cluster": "local", "learners": num_learners, "pools": 1})
    shipped_config = ShippedConfig.from_config(config)
    fork = multiprocessing.get_context("fork")
    queue: Any = fork.Queue()
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    processes = [
        fork.Process(target=_learn_in_group, args=(shipped_config, rank, rollouts, initial_state, rendezvous, queue))
        for rank in range(num_learners)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)

    expected_state = pack_state(learner.save())
    for _, metrics, steps, state in results:
        assert steps == learner.steps
        for expected, found in zip(itertools.chain(*single_metrics), itertools.chain(*metrics), strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for file, arrays in expected_state.items():
            for name, array in arrays.items():
                np.testing.assert_allclose(state[file][name], array, rtol=1e-4, atol=1e-6, err_msg=name)
                assert np.array_equal(state[file][name], results[0][3][file][name])  # bit for bit between the learners


def _join_group(rank: int, rendezvous: str, results: Any) -> None:
    """Join a group of two learners and report the addresses at which this process listens."""
    worker: Any = LearnerWorker()
    worker.rank = rank
    worker.learner = SimpleNamespace(device=torch.device("cpu"))
    worker.node_address = lambda: rendezvous.removeprefix("tcp://").rpartition(":")[0]
    worker.join_group(rendezvous, 2, same_node=False, shared_gpu=False, timeout=60)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    results.put({c.laddr.ip for c in listening})


def test_learners_on_several_nodes_use_the_node_address_and_not_that_of_the_host_name() -> None:
    """The host name often resolves to a loopback address, which other nodes cannot reach."""
    address = external_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        rendezvous = f"tcp://{address}:{probe.getsockname()[1]}"
    fork = multiprocessing.get_context("fork")
    queue: Any = fork.Queue()
    processes = [fork.Process(target=_join_group, args=(rank, rendezvous, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert all(address in addresses for addresses in results)
    assert not any(listening.startswith("127.") for addresses in results for listening in addresses)


def test_statistics_of_a_users_critic_need_not_have_the_names_of_popart() -> None:
    critic = torch.nn.Module()
    critic.register_buffer("mu", torch.tensor([1.0, 2.0]))
    critic.register_buffer("sigma", torch.tensor([3.0, 4.0]))
    statistics = critic_statistics(critic)
    assert {name: array.tolist() for name, array in statistics.items()} == {"mu": [1.0, 2.0], "sigma": [3.0, 4.0]}
