"""PPO: several epochs over the newest rollouts with a clipped policy update (Schulman et al. 2017).

This implementation has three separate lengths; many other implementations use one number for all three.

    rollout_length     number of steps per environment that are collected before each series of updates
    sequence_length    number of steps over which gradients are propagated through the memory
    horizon            maximum number of TD errors that generalised advantage estimation (GAE) adds up for an advantage

Actors collect one sequence of `sequence_length` steps at a time, and store the memory's state before its first step. To
compute the advantages, `prepare` concatenates the sequences of each environment in time. `batches` then distributes
whole sequences at random over the minibatches.

With one epoch and one minibatch, the probability ratio is always 1 and nothing is clipped. The algorithm is then A2C
(`--preset a2c`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, find_child
from bestiary.agents.component_defaults import CriticDefaults
from bestiary.agents.critics import ValueEstimate
from bestiary.algorithms.actor_critic_loss import actor_critic_loss, learner_rewards, rewards_and_discounts
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.algorithms.base import MAIN_OPTIMIZER, Algorithm, Batch, Batches, LearnContext, Loss
from bestiary.algorithms.gae import gae
from bestiary.algorithms.optimizers import make_adam
from bestiary.rollout import Rollout, concatenate
from bestiary.utils.errors import UserError
from bestiary.utils.options import option


class PPO(Algorithm):
    """Proximal policy optimisation."""

    on_policy = True
    mean_loss = True
    batch_size_hint = "fewer --algo.minibatches"

    @dataclass(frozen=True)
    class Options(ActorCriticOptions):
        rollout_length: int = option(
            128,
            "number of steps per environment that are collected before each series of updates",
            low=1,
            high=100_000,
            unprefixed=True,
        )
        sequence_length: int | None = option(
            None,
            "number of steps over which gradients are propagated through a memory (default: 16 if that divides the "
            "rollout length, else the rollout length)",
            low=1,
        )
        horizon: int | None = option(
            None,
            "maximum number of TD errors that GAE sums for an advantage: the rollout is split into blocks of this "
            "length, and each sum ends at the end of its block (default: the rollout length)",
            low=1,
        )
        epochs: int = option(4, "number of epochs (passes) over each rollout", low=1, high=1000)
        minibatches: int = option(4, "number of minibatches per epoch, with one update for each minibatch", low=1)
        lr: float = option(
            2.5e-4, "initial learning rate (with --algo.lr-schedule warmup: the highest rate)", above=0, unprefixed=True
        )
        clip: float = option(
            0.1, "clipping range: the probability ratio of new to old policy is clipped to [1-clip, 1+clip]", above=0
        )
        clip_schedule: str = option(
            "constant",
            "how --algo.clip changes during the run (linear: decreases to zero)",
            choices=("constant", "linear"),
        )
        value_clip: bool = option(
            False, "clip the difference between new and old value to [-clip, clip] in the value loss (see --algo.clip)"
        )
        normalise_advantages: bool = option(True, "normalise the advantages to mean 0 and standard deviation 1")
        target_kl: float | None = option(
            None,
            "maximum KL divergence from the policy that collected the rollouts; if it is exceeded in an update, the "
            "remaining updates with these rollouts are left out (default: no maximum)",
            above=0,
        )
        max_grad_norm: float = option(0.5, "maximum norm of the gradient; larger gradients are scaled down", above=0)

    def setup(self, agent: Agent) -> None:
        """Check that the critic supports the value loss. Raise UserError if it does not."""
        critic = find_child(agent, "critic")
        if self.options.value_clip and isinstance(critic, CriticDefaults) and critic.classifies:
            raise UserError("--algo.value-clip on: not supported by --critic hl-gauss; remove it")

    @property
    def sequence_length(self) -> int:
        o = self.options
        return o.sequence_length or (16 if o.rollout_length % 16 == 0 else o.rollout_length)

    def rollouts_per_learn(self, num_envs: int, pools: int) -> int:
        return self.options.rollout_length // self.sequence_length * pools

    def batch_size(self, num_envs: int, pools: int) -> int:
        # If the sequences cannot be divided equally, some minibatches have one sequence more.
        return max(1, self.rollouts_per_learn(num_envs, pools) * num_envs // self.options.minibatches)

    @property
    def epochs(self) -> int:
        return self.options.epochs

    def dummy_batch(self, rollout: Rollout) -> Batch:
        extras = {"target": rollout.value, "advantage": torch.ones_like(rollout.value)}
        return Batch(rollout.with_extras(**extras), self.loss)

    def validate(self, num_envs: int, pools: int) -> list[str]:
        o = self.options
        length = self.sequence_length
        if o.rollout_length % length:
            return [
                f"--algo.sequence-length {length}: must divide --rollout-length {o.rollout_length}; "
                f"try {_nearest_divisor(o.rollout_length, length)}"
            ]
        num_sequences = self.rollouts_per_learn(num_envs, pools) * num_envs
        if num_sequences < o.minibatches:
            return [
                f"--algo.minibatches {o.minibatches}: must be at most {num_sequences}, the number of sequences of a "
                f"rollout ({num_envs * pools} environments x {o.rollout_length} steps / {length} steps per sequence); "
                f"try {num_sequences}"
            ]
        return []

    def fits_exactly(self, num_envs: int, pools: int) -> bool:
        return self.rollouts_per_learn(num_envs, pools) * num_envs % self.options.minibatches == 0

    def shard(self, learners: int) -> Self | None:
        return type(self)(self.options)

    def batches(self, rollouts: Sequence[Rollout], context: LearnContext) -> Batches:
        """Yield `epochs` x `minibatches` batches. Stop earlier if the KL divergence exceeds `target_kl`."""
        o = self.options
        sequences = self.prepare(rollouts, context)
        for _ in range(o.epochs):
            order = torch.randperm(sequences.num_envs, generator=context.generator)
            for columns in order.tensor_split(o.minibatches):
                metrics = yield Batch(sequences.select(columns), self.loss)
                if metrics.get("recomputed_updates"):
                    # PopArt's statistics have changed, so the advantages must be computed again.
                    sequences = self.prepare(rollouts, context)
                if o.target_kl is not None and metrics["kl"] > o.target_kl:
                    return

    def prepare(self, rollouts: Sequence[Rollout], context: LearnContext) -> Rollout:
        """Return all sequences as one rollout, with advantages and value targets in its extras.

        The result has `sequence_length` steps and one column for each sequence of each environment. `rollouts` are the
        sequences of all vector environments (pools) in the order of collection: the first sequence of pool 0, the first
        sequence of pool 1, ..., then the second sequence of pool 0, ...
        """
        o = self.options
        length = self.sequence_length
        pools = len(rollouts) * length // o.rollout_length
        prepared: list[Rollout] = [*rollouts]
        for pool in range(pools):
            chain = rollouts[pool::pools]  # the sequences of one pool, consecutive in time
            values = torch.cat([sequence.value for sequence in chain])  # [rollout_length,N]
            _, rewards, discounts = (
                torch.cat(tensors) for tensors in zip(*(rewards_and_discounts(s, o) for s in chain), strict=True)
            )
            last = _estimate_after(context, chain[-1])
            targets, advantages = gae(rewards, discounts, values, last.value, lam=o.lam, horizon=o.horizon)
            advantages = last.normalise_difference(advantages)
            for k, (target, advantage) in enumerate(zip(targets.split(length), advantages.split(length), strict=True)):
                prepared[pool + k * pools] = chain[k].with_extras(target=target, advantage=advantage)
        sequences = concatenate(prepared)
        if o.normalise_advantages:
            sequences.extras["advantage"] = _normalise(sequences.extras["advantage"], context)
        return sequences

    def loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        """Return the loss of a batch [T,B], summed over all steps. The batch consists of sequences from `prepare`."""
        o = self.options
        # Use only the first T of the T+1 entries. The last entry is also the first entry of the next sequence.
        output, _ = agent(batch.inputs()[: batch.length], batch.state)
        estimate = output.value_estimate
        target = batch.extras["target"]
        value_loss = estimate.loss(target)
        if o.value_clip:
            clip = self.clip(progress)
            old = estimate.normalise(batch.value)
            clipped = old + (estimate.normalised - old).clamp(-clip, clip)
            value_loss = torch.max(value_loss, 0.5 * (estimate.normalise(target) - clipped).square())
        terms = self.policy_terms(output, batch, progress)
        return actor_critic_loss(
            output,
            terms.pop("policy_loss"),
            value_loss.sum(),
            terms.pop("entropy"),
            target,
            o,
            value=output.value.sum(),
            **terms,
        )

    def policy_terms(self, output: Output, batch: Rollout, progress: float) -> dict[str, Tensor]:
        """Return the clipped policy loss, the entropy and the metrics of the policy by name, summed over the batch."""
        o = self.options
        clip = self.clip(progress)
        advantage = batch.extras["advantage"]
        log_ratio = output.distribution.log_prob(batch.action) - batch.log_prob
        ratio = log_ratio.exp()
        return {
            "policy_loss": -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum(),
            "entropy": output.distribution.entropy().sum(),
            "transformed_reward": learner_rewards(batch, o).sum(),
            "kl": (ratio - 1 - log_ratio).sum(),  # non-negative estimate of KL(old || new)
            "abs_log_ratio": log_ratio.abs().sum(),
            "clipped": ((ratio - 1).abs() > clip).float().sum(),
        }

    def clip(self, progress: float) -> float:
        """Return the current clipping range. `progress` is the finished fraction of the run, from 0 to 1."""
        o = self.options
        return o.clip * (1 - progress) if o.clip_schedule == "linear" else o.clip

    def make_optimizers(self, parameters: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
        return {MAIN_OPTIMIZER: make_adam(parameters, self.options.lr, self.options.eps)}


def _normalise(advantage: Tensor, context: LearnContext) -> Tensor:
    """Return the advantages, normalised to mean 0 and standard deviation 1 over the sequences of all learners."""
    count, total = context.all_reduce(torch.stack([advantage.new_tensor(advantage.numel()), advantage.sum()]))
    difference = advantage - total / count
    variance = context.all_reduce(difference.square().sum()) / count
    return difference / (variance.sqrt() + 1e-8)


@torch.no_grad()
def _estimate_after(context: LearnContext, sequence: Rollout) -> ValueEstimate:
    """Return the bootstrap values [N] of a sequence: the value estimates of the observations after its last step.

    These observations are the last of the T+1 entries of the sequence. Actors compute only the values of the first T
    entries.
    """
    inputs = sequence.inputs()
    # An agent with a memory must process the whole sequence first.
    output, _ = context.infer(inputs if sequence.state else inputs[-1:], sequence.state)
    return output.value_estimate[-1]


def _nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` that is nearest to `wanted`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
