"""Training on a real Ray cluster: the same results as on one machine, central inference, and bounded memory."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.runs.run import Run
from bestiary.training.factory import max_rollouts_in_flight
from bestiary.utils.errors import RunError
from tests.distributed.helpers import SMALL, last_metric, train_while, wait_for_steps, wait_until
from tests.distributed.ray_cluster import RayCluster

pytestmark = pytest.mark.xdist_group("ray")


def final_weights(run: Run) -> bytes:
    return (run.checkpoints[-1].path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"env": "toy/recall", "memory": "gru", "lag": 1, "steps": 400},
        {
            "env": "toy/catch",
            "algo": "ppo",
            "rollout_length": 10,
            "algo.sequence_length": 5,
            "algo.minibatches": 2,
            "batch_size": None,
            "steps": 320,
            "algo.reward_clipping": "return_std",
        },
        {"env": "toy/recall", "lag": 1, "steps": 400, "num_envs": 7, "batch_size": 5},
    ],
    ids=["impala", "ppo, normalised rewards", "batches from several rollouts, unequal pools"],
)
def test_cluster_and_local_training_are_bit_identical(ray_cluster: RayCluster, options: dict[str, Any]) -> None:
    """With a fixed policy lag, both runtimes use the same weights for each rollout."""
    options = {key: value for key, value in {**SMALL, **options}.items() if value is not None}
    local = bestiary.train(run_dir="local", runtime="local", **options)
    cluster = bestiary.train(run_dir="cluster", cluster=ray_cluster.address, **options)
    assert final_weights(cluster) == final_weights(local)
    assert (cluster.path / "episodes.csv").read_bytes() == (local.path / "episodes.csv").read_bytes()
    assert cluster.metrics["loss"].tolist() == local.metrics["loss"].tolist()
    assert cluster.metrics["restarts"].tolist() == [0] * len(cluster.metrics["step"])


FAILING_TORSO = """
import torch
from bestiary.agents.torsos import MLP


class FailingTorso(MLP):
    def forward(self, observation):
        if torch.is_grad_enabled():
            torch.ones(2, 3) @ torch.ones(2, 3)
        return super().forward(observation)
"""


def test_an_error_of_a_plugin_in_a_learner_is_reported_with_its_line(ray_cluster: RayCluster) -> None:
    """It is not mistaken for a lost learner, which would be restarted."""
    Path("failing.py").write_text(FAILING_TORSO)
    options = {**SMALL, "torso": "failing.py:FailingTorso", "cluster": ray_cluster.address, "learners": 2}
    with pytest.raises(RunError, match=r"failing.py, line 9: RuntimeError: mat1 and mat2 shapes"):
        bestiary.train("toy/catch", run_dir="r", **options)


STOPPING_CALLBACK = """
import os
from pathlib import Path
from bestiary.training.callbacks.base import Callback


class Stop(Callback):
    due = False

    def on_start(self, session):
        self.pid = os.getpid()

    def on_update(self, session, metrics, episodes):
        if session.learner.version >= 3:
            self.due = not session.stop_requested

    def is_due(self, session):
        return self.due

    def on_due(self, session):
        self.due = False
        session.request_stop("enough updates")

    def save(self):
        return {"pid": self.pid}
"""


def test_callback_of_a_user_runs_in_the_driver_and_can_stop_the_training(ray_cluster: RayCluster) -> None:
    Path("stop.py").write_text(STOPPING_CALLBACK)
    options = {**SMALL, "callback": "stop.py:Stop", "cluster": ray_cluster.address, "steps": 10**6}
    run = bestiary.train("toy/catch", run_dir="r", **options)
    state = run.checkpoints[-1].load_state()
    assert 3 <= state["version"] < 100
    assert state["callbacks"]["user:Stop"] == {"pid": os.getpid()}


@pytest.mark.slow
def test_central_inference_uses_the_newest_weights_and_a_killed_server_is_replaced(ray_cluster: RayCluster) -> None:
    def act() -> None:
        wait_until(lambda: last_metric("step") > 200)
        (server,) = ray_cluster.processes("InferenceServer")
        server.kill()
        wait_until(lambda: last_metric("restarts") == 1)
        wait_for_steps(400)

    options = {"cluster": ray_cluster.address, "actors": 2, "inference": "central"}
    run = train_while(act, "toy/recall", memory="gru", **options, **{"memory.hidden": 8})
    assert run.metrics["max_policy_lag"].max() <= run.config.training.max_lag
    # The importance ratio: learner and server compute similar probabilities, including the recurrent state.
    assert run.metrics["rho"] == pytest.approx(1, abs=0.2)
    assert run.metrics["policy_lag"].max() > 0


LARGE_ROLLOUTS = """
import gymnasium, numpy as np, time, torch
from gymnasium.spaces import Box, Discrete
from bestiary.agents.torsos import MLP


class LargeObservationEnv(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (20_000,)), Discrete(2)

    def reset(self, seed=None, options=None):
        return np.zeros(20_000, np.float32), {}

    def step(self, action):
        return np.zeros(20_000, np.float32), 0.0, False, False, {}


class SlowTorso(MLP):
    def forward(self, observation):
        if torch.is_grad_enabled():  # only in the learner
            time.sleep(0.2)
        return super().forward(observation)
"""


def test_memory_is_bounded_if_the_learner_is_slow(ray_cluster: RayCluster) -> None:
    """Rollouts of 2 MB are collected within milliseconds; the object store holds only those that may be in flight."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    Path("large.py").write_text(LARGE_ROLLOUTS)
    state = get_state_from_address(ray_cluster.address)
    used_bytes = []

    def act() -> None:
        wait_until(lambda: last_metric("step") > 0)
        for _ in range(30):
            used_bytes.append(get_memory_info_reply(state).store_stats.object_store_bytes_used)
            time.sleep(0.1)

    options = {"cluster": ray_cluster.address, "actors": 2, "torso": "large.py:SlowTorso"}
    # The weights are in the object store, too: they must be small.
    run = train_while(act, "large.py:LargeObservationEnv", **options, **{"torso.width": 2})
    rollout_bytes = 6 * 4 * 20_000 * 4  # 6 observations of 4 environments, float32
    max_in_flight = max_rollouts_in_flight(run.config.make_algorithm(), run.config.training)
    assert run.metrics["max_queue"].max() > 1
    assert max(used_bytes) > 2 * rollout_bytes
    assert max(used_bytes) < (max_in_flight + 4) * rollout_bytes  # 4: rollouts that are about to be freed
