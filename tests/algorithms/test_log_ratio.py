"""The metric abs_log_ratio_lag0 detects memories that compute other outputs for a sequence than for single steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.agents.agent import find_child
from bestiary.agents.memories import MEMORIES
from bestiary.agents.memories.base import State
from bestiary.agents.memories.recurrent import GRU
from bestiary.config.resolve import resolve
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts

ALGORITHMS: dict[str, dict[str, Any]] = {
    "impala": {"rollout_length": 8, "batch_size": 6},
    "clear": {"rollout_length": 8, "batch_size": 6},
    "ppo": {"rollout_length": 16, "algo.sequence_length": 8, "algo.minibatches": 3, "algo.epochs": 2},
    "ppg": {
        "rollout_length": 16,
        "algo.sequence_length": 8,
        "algo.minibatches": 3,
        "algo.value_network": "shared",
        "algo.aux_interval": 2,
    },
}


class ForgetsInSequences(GRU):
    """A wrong memory: in a call with several steps, each step starts from the initial state."""

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        if len(x) == 1:
            return super().forward(x, done, state)
        calls = [
            super(ForgetsInSequences, self).forward(step[None], done[:1], self.initial_state(len(step))) for step in x
        ]
        return torch.cat([output for output, _ in calls]), calls[-1][1]


class ResetsTooLate(GRU):
    """A wrong memory: in a call with several steps, the state is reset one step too late."""

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        late = torch.cat([done[:1], done[:-1]]) if len(x) > 1 else done
        return super().forward(x, late, state)


def first_update(algorithm: str, memory: str) -> dict[str, float]:
    """Return the metrics of the first update on the third rollouts, in which memories and episodes have started."""
    options = {"env": "toy/recall", "delay": 2, "algo": algorithm, "memory": memory, "memory.hidden": 16}
    common = {"runtime": "serial", "num_envs": 6, "steps": 10_000, "lr": 1e-9}
    (actor,), learner = make_actors_and_learner(resolve({**options, **common, **ALGORITHMS[algorithm]}))
    with torch.no_grad():
        # Initial policies are nearly uniform; this makes them depend on the inputs.
        find_child(learner.agent, "policy").weight.mul_(100)
    actor.start()
    for _ in range(3):
        actor.version = learner.version
        metrics = learner.learn(collect_rollouts(actor, learner))
    return metrics[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("memory", ["gru", "lstm", "delta", "srwm"])
def test_metric_is_zero_for_right_memories(algorithm, memory):
    metrics = first_update(algorithm, memory)
    assert metrics["policy_lag"] == 0
    assert metrics["abs_log_ratio_lag0"] < 1e-5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("memory", [ForgetsInSequences, ResetsTooLate])
def test_metric_detects_wrong_memories(algorithm, memory, monkeypatch):
    monkeypatch.setitem(MEMORIES, "wrong", memory)
    metrics = first_update(algorithm, "wrong")
    assert metrics["policy_lag"] == 0
    assert metrics["abs_log_ratio_lag0"] > 0.01


def test_metric_is_absent_with_policy_lag():
    """Of the updates of one learn call of PPO, only the first one has policy lag 0."""
    options = {"env": "toy/catch", "algo": "ppo", "runtime": "serial", "num_envs": 6, "steps": 10_000}
    (actor,), learner = make_actors_and_learner(resolve({**options, **ALGORITHMS["ppo"]}))
    actor.start()
    first, *others = learner.learn(collect_rollouts(actor, learner))
    assert "abs_log_ratio_lag0" in first
    assert others
    assert not any("abs_log_ratio_lag0" in metrics for metrics in others)
    assert all(metrics["abs_log_ratio"] > 0 for metrics in others)
