"""IMPALA: an actor-critic whose losses are summed over the batch and corrected by V-trace for the actor's lag.

The loss is a sum over all decisions, never a mean: gradients of groups of trajectories add up to the gradient of the whole,
however the batch is cut, and the published learning rates mean what they meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn

from bestiary.agents.agent import Agent
from bestiary.algorithms.algorithm import Loss, Metrics, Think, Update, watched
from bestiary.algorithms.optimizers import RMSprop, make_adam
from bestiary.algorithms.rewards import MODES, squash
from bestiary.algorithms.schedules import SCHEDULES
from bestiary.algorithms.vtrace import vtrace
from bestiary.options import option
from bestiary.rollout import Rollout, concatenate


class Impala:
    """The loss of one batch of trajectories. The defaults learn Pong fastest on two cores (docs/results/pong.md); the published
    settings are presets (`impala-shallow`, `impala-deep`, `torchbeast`)."""

    on_policy = False
    averages = False
    larger_batches = "--batch-size"

    @dataclass(frozen=True)
    class Options:
        unroll_length: int = option(20, "decisions in a rollout (T)", low=1, high=100_000, everyday=True)
        batch_size: int = option(4, "trajectories in an update (B)", low=1, high=100_000, everyday=True)
        replay: int = option(1, "how often each rollout is learnt from, under V-trace", low=1, high=100)
        lr: float = option(5e-4, "learning rate at the start (of schedule warm: at its peak)", above=0, everyday=True)
        schedule: str = option("linear", "learning rate over the run", choices=tuple(SCHEDULES))
        discount: float = option(0.99, "gamma", low=0, high=1)
        entropy: float = option(0.01, "weight of the entropy bonus", low=0)
        baseline: float = option(0.5, "weight of the value loss", low=0)
        reward: str = option(
            "auto", "what of the reward is learnt from (auto: abs_one; all of it with --popart)", choices=MODES
        )
        reward_scale: float | None = option(
            None,
            "factor of the reward before that (none: 1; with --reward, what fits its usual steps into [-1,1])",
            above=0,
        )
        rho_bar: float = option(1.0, "clip of the importance weights in the value targets", above=0)
        pg_rho_bar: float = option(1.0, "clip of the importance weights in the policy gradient", above=0)
        lam: float = option(0.95, "lambda of V-trace", low=0, high=1)
        optimizer: str = option("adam", "or rmsprop, as published", choices=("adam", "rmsprop"))
        alpha: float = option(0.99, "smoothing of rmsprop", low=0, high=1)
        momentum: float = option(0.0, "of rmsprop", low=0)
        eps: float = option(1e-5, "of the optimizer, outside the root", above=0)
        max_grad_norm: float = option(40.0, "gradients are scaled down to this norm", above=0)

    def __init__(self, options: Options = Options()):
        self.options = options

    @property
    def unroll_length(self) -> int:
        return self.options.unroll_length

    def rollouts(self, num_envs: int, pools: int) -> int:
        return max(1, self.options.batch_size // num_envs)

    def batch_size(self, num_envs: int, pools: int) -> int:
        return self.options.batch_size

    @property
    def passes(self) -> int:
        return self.options.replay

    def example(self, rollout: Rollout) -> Rollout:
        return rollout

    def problems(self, num_envs: int, pools: int) -> list[str]:
        batch, n = self.options.batch_size, num_envs
        if batch % n == 0 or n % batch == 0:
            return []
        fitting = (b for b in range(1, 2 * batch + 1) if n % b == 0 or b % n == 0)
        return [
            f"--batch-size {batch} and {n} environments a pool: one must divide the other, so that batches are made of "
            f"whole trajectories; try --batch-size {min(fitting, key=lambda b: abs(b - batch))}"
        ]

    def share(self, learners: int) -> "Impala | None":
        whole = self.options.batch_size % learners == 0
        return Impala(replace(self.options, batch_size=self.options.batch_size // learners)) if whole else None

    def learn(
        self, think: Think, rollouts: Sequence[Rollout], update: Update, generator: torch.Generator
    ) -> list[Metrics]:
        """One update a batch of trajectories, in the order they were played, as often as rollouts are replayed."""
        whole = concatenate(rollouts)
        return [update(batch) for _ in range(self.options.replay) for batch in whole.groups(self.options.batch_size)]

    def loss(self, agent: Agent, rollout: Rollout, progress: float = 0.0) -> Loss:
        """The summed loss of a rollout [T,B]. V-trace is in units of reward; policy and critic learn in the critic's own."""
        o = self.options
        output, _ = agent(rollout.inputs(), rollout.state)  # T+1 entries; the last only for its value
        policy, worth, values = output.distribution[:-1], output.worth[:-1], output.value.detach()
        log_probs = policy.log_prob(rollout.action)

        # Entry t+1 holds what the decision at t led to. A time limit is no end: the value of what came next stands in
        # for the rest of the episode; the trace is cut there as at any end.
        discounts = o.discount * (~rollout.done[1:]).float()
        learnt = squash(rollout.reward[1:], o.reward, o.reward_scale)
        rewards = learnt + o.discount * rollout.bootstrap

        targets, advantages = vtrace(
            (log_probs - rollout.log_prob).detach(),
            rewards,
            discounts,
            values[:-1],
            values[-1],
            rho_bar=o.rho_bar,
            pg_rho_bar=o.pg_rho_bar,
            lam=o.lam,
        )
        policy_loss = -(log_probs * worth.scale(advantages)).sum()
        value_loss = 0.5 * (worth.normalise(targets) - worth.normalised).square().sum()
        entropy = policy.entropy().sum()
        loss = policy_loss + o.baseline * value_loss - o.entropy * entropy
        sums = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "value": values[:-1].sum(),
            "learnt_reward": learnt.sum(),
            "rho": (log_probs - rollout.log_prob).exp().sum(),
            **watched(output, log_probs.numel()),
        }
        return Loss(loss, {name: value.detach() for name, value in sums.items()}, targets)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        o = self.options
        if o.optimizer == "adam":
            return make_adam(parameters, o.lr, o.eps)
        return RMSprop(parameters, lr=o.lr, alpha=o.alpha, eps=o.eps, momentum=o.momentum)
