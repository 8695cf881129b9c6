"""What a runtime needs of an algorithm.

The runtime plays rollouts of `unroll_length` decisions and hands `rollouts(...)` of them at once to `learn`, which decides what
an update is made of and calls `update` for each. The learner computes an update's gradient from `loss`, group by group:

    play -> [Rollout, ...] -> algorithm.learn -> update(batch) -> sum over groups of the gradient of algorithm.loss -> optimizer
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.rollout import Inputs, Rollout

Metrics = dict[str, float]
Think = Callable[[Inputs, State], tuple[Output, State]]  # the agent as it is now, without gradients
Update = Callable[[Rollout], Metrics]  # one step of the optimizer on one batch of trajectories


@dataclass
class Loss:
    total: Tensor  # summed over the decisions of a batch
    sums: dict[str, Tensor]  # of what is worth knowing, over the same decisions
    targets: Tensor | None = None  # [T,B] what the values should have been, for critics that adapt to them


class Algorithm(Protocol):
    options: Any  # must have lr, schedule (one of schedules.SCHEDULES) and max_grad_norm
    on_policy: bool  # learns only from decisions of the newest weights, so actors wait while it learns
    averages: bool  # the gradient is divided by the decisions in a batch
    larger_batches: str  # the flag to change for them

    @property
    def unroll_length(self) -> int:
        """Decisions in an actor's rollout."""

    def rollouts(self, num_envs: int, pools: int) -> int:
        """How many rollouts of `num_envs` environments `learn` takes at once, from `pools` pools in turn."""

    def batch_size(self, num_envs: int, pools: int) -> int:
        """How many trajectories an update is made of."""

    @property
    def passes(self) -> int:
        """How often each trajectory is learnt from, at most."""

    def example(self, rollout: Rollout) -> Rollout:
        """A rollout as a batch for `loss`, as if there were nothing else to learn from; to measure with."""

    def problems(self, num_envs: int, pools: int) -> list[str]:
        """Why so many environments cannot be cut into batches; nothing where they can."""

    def share(self, learners: int) -> "Algorithm | None":
        """The algorithm for one of several learners, each with its share of every batch; None where that cannot be."""

    def learn(
        self, think: Think, rollouts: Sequence[Rollout], update: Update, generator: torch.Generator
    ) -> list[Metrics]:
        """All updates that these rollouts bring, and what each reported. `generator` is for what is shuffled."""

    def loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """What is to become less. `progress`: of the run, 0 to 1."""

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer: ...


def watched(output: Output, decisions: int) -> dict[str, Tensor]:
    """What parts of the agent tell of themselves, as sums over so many decisions, for `Loss.sums`."""
    return {name: mean * decisions for name, mean in output.measures.items()}


def updates(algorithm: Algorithm, num_envs: int, pools: int) -> int:
    """How many updates `learn` makes of what it takes at once, at most."""
    trajectories = algorithm.rollouts(num_envs, pools) * num_envs
    return trajectories * algorithm.passes // algorithm.batch_size(num_envs, pools)
