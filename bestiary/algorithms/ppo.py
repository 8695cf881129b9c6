"""PPO: several passes over the newest rollouts, with the policy kept near the one that played them (Schulman et al. 2017).

Three lengths, which are often one number elsewhere: `rollout_length` decisions of each environment are learnt from at a time;
advantages look at most `horizon` decisions ahead; and gradients go back through `sequence` decisions of a memory. An actor's
rollout is one sequence, with the memory's state before it; `learn` puts the sequences of an environment one after the other
for the advantages, then deals whole sequences into minibatches.

With one epoch and one minibatch the ratio is 1 throughout, nothing is clipped, and this is A2C (`--preset a2c`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from bestiary.agents.agent import Agent
from bestiary.agents.critics import Worth
from bestiary.algorithms.algorithm import Loss, Metrics, Think, Update, watched
from bestiary.algorithms.gae import gae
from bestiary.algorithms.optimizers import make_adam
from bestiary.algorithms.rewards import MODES, squash
from bestiary.algorithms.schedules import SCHEDULES
from bestiary.options import option
from bestiary.rollout import Rollout, concatenate


class PPO:
    on_policy = True
    averages = True
    larger_batches = "fewer --algo.minibatches"

    @dataclass(frozen=True)
    class Options:
        rollout_length: int = option(
            128, "decisions of each environment between updates", low=1, high=100_000, everyday=True
        )
        sequence: int | None = option(
            None,
            "decisions that gradients of a memory go back through (none: 16 or all)",
            low=1,
        )
        horizon: int | None = option(None, "decisions that an advantage looks ahead (none: the rollout)", low=1)
        epochs: int = option(4, "passes over each rollout", low=1, high=1000)
        minibatches: int = option(4, "updates that a pass is cut into", low=1)
        lr: float = option(2.5e-4, "learning rate at the start (of schedule warm: at its peak)", above=0, everyday=True)
        schedule: str = option("linear", "learning rate over the run", choices=tuple(SCHEDULES))
        discount: float = option(0.99, "gamma", low=0, high=1)
        lam: float = option(0.95, "lambda of the advantages", low=0, high=1)
        clip: float = option(0.1, "how far the ratio of new to old policy may move from 1 and still gain", above=0)
        clip_schedule: str = option("constant", "clip over the run", choices=("constant", "linear"))
        value_clip: bool = option(False, "keep the value within `clip` of the old one, too")
        entropy: float = option(0.01, "weight of the entropy bonus", low=0)
        baseline: float = option(0.5, "weight of the value loss", low=0)
        normalize: bool = option(True, "scale the advantages of a rollout to mean 0 and deviation 1")
        target_kl: float | None = option(None, "go on to the next rollout once the policy moved this far", above=0)
        reward: str = option(
            "auto", "what of the reward is learnt from (auto: abs_one; all of it with --popart)", choices=MODES
        )
        reward_scale: float | None = option(
            None,
            "factor of the reward before that (none: 1; with --reward, what fits its usual steps into [-1,1])",
            above=0,
        )
        eps: float = option(1e-5, "of Adam", above=0)
        max_grad_norm: float = option(0.5, "gradients are scaled down to this norm", above=0)

    def __init__(self, options: Options = Options()):
        self.options = options

    @property
    def unroll_length(self) -> int:
        o = self.options
        return o.sequence or (16 if o.rollout_length % 16 == 0 else o.rollout_length)

    def rollouts(self, num_envs: int, pools: int) -> int:
        return self.options.rollout_length // self.unroll_length * pools

    def batch_size(self, num_envs: int, pools: int) -> int:
        return self.rollouts(num_envs, pools) * num_envs // self.options.minibatches

    @property
    def passes(self) -> int:
        return self.options.epochs

    def example(self, rollout: Rollout) -> Rollout:
        return rollout.with_extras(target=rollout.value, advantage=torch.ones_like(rollout.value))

    def problems(self, num_envs: int, pools: int) -> list[str]:
        o, found = self.options, []
        if o.rollout_length % self.unroll_length:
            near = _nearest(o.rollout_length, self.unroll_length)
            found.append(
                f"--algo.sequence {self.unroll_length} does not divide --rollout-length {o.rollout_length}; try {near}"
            )
        elif (count := self.rollouts(num_envs, pools) * num_envs) % o.minibatches:
            found.append(
                f"--algo.minibatches {o.minibatches} does not divide the {count} sequences of a rollout "
                f"({num_envs * pools} environments x {o.rollout_length} decisions / sequences of {self.unroll_length}); "
                f"try {_nearest(count, o.minibatches)}"
            )
        return found

    def share(self, learners: int) -> None:
        """Advantages are scaled, and minibatches drawn, over whole rollouts: one learner has to see them all."""

    def learn(
        self, think: Think, rollouts: Sequence[Rollout], update: Update, generator: torch.Generator
    ) -> list[Metrics]:
        o = self.options
        whole = self.prepare(think, rollouts)
        metrics: list[Metrics] = []
        for _ in range(o.epochs):
            order = torch.randperm(whole.num_envs, generator=generator)
            for columns in order.chunk(o.minibatches):
                metrics.append(update(whole.take(columns)))
                if metrics[-1].get("unfit"):
                    whole = self.prepare(think, rollouts)  # by the new scale
                if o.target_kl is not None and metrics[-1]["kl"] > o.target_kl:
                    return metrics
        return metrics

    def prepare(self, think: Think, rollouts: Sequence[Rollout]) -> Rollout:
        """All sequences side by side, [sequence, sequences], with each decision's advantage and target."""
        o = self.options
        pools = len(rollouts) * self.unroll_length // o.rollout_length
        ready: list[Rollout] = [*rollouts]
        for pool in range(pools):
            chain = rollouts[pool::pools]  # one after the other in time
            values = torch.cat([r.value for r in chain])  # [rollout_length, N]
            learnt = [squash(r.reward[1:], o.reward, o.reward_scale) for r in chain]
            rewards = torch.cat([reward + o.discount * r.bootstrap for reward, r in zip(learnt, chain, strict=True)])
            discounts = torch.cat([o.discount * (~r.done[1:]).float() for r in chain])
            last = _worth_after(think, chain[-1])
            targets, advantages = gae(rewards, discounts, values, last.value, lam=o.lam, horizon=o.horizon)
            advantages = last.scale(advantages)
            length = self.unroll_length
            for k, (target, advantage) in enumerate(zip(targets.split(length), advantages.split(length), strict=True)):
                ready[pool + k * pools] = chain[k].with_extras(target=target, advantage=advantage)
        whole = concatenate(ready)
        if o.normalize:
            advantage = whole.extras["advantage"]
            whole.extras["advantage"] = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        return whole

    def loss(self, agent: Agent, batch: Rollout, progress: float) -> Loss:
        o = self.options
        clip = o.clip * (1 - progress) if o.clip_schedule == "linear" else o.clip
        output, _ = agent(batch.inputs()[: batch.length], batch.state)  # the last entry is the next sequence's first
        log_probs, worth = output.distribution.log_prob(batch.action), output.worth
        advantage, target = batch.extras["advantage"], batch.extras["target"]

        log_ratio = log_probs - batch.log_prob
        ratio = log_ratio.exp()
        policy_loss = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum()
        wanted = worth.normalise(target)
        error = (wanted - worth.normalised).square()
        if o.value_clip:
            before = worth.normalise(batch.value)
            near = before + (worth.normalised - before).clamp(-clip, clip)
            error = torch.max(error, (wanted - near).square())
        value_loss = 0.5 * error.sum()
        entropy = output.distribution.entropy().sum()
        loss = policy_loss + o.baseline * value_loss - o.entropy * entropy
        sums = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "value": output.value.sum(),
            "learnt_reward": squash(batch.reward[1:], o.reward, o.reward_scale).sum(),
            "kl": (ratio - 1 - log_ratio).sum(),  # of the old policy from the new; an estimate that is never negative
            "clipped": ((ratio - 1).abs() > clip).float().sum(),
            **watched(output, log_probs.numel()),
        }
        return Loss(loss, {name: value.detach() for name, value in sums.items()}, target)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make_adam(parameters, self.options.lr, self.options.eps)


@torch.no_grad()
def _worth_after(think: Think, sequence: Rollout) -> Worth:
    """[N]: of the entry after a sequence, which no actor has decided on yet."""
    inputs = sequence.inputs()
    output, _ = think(inputs if sequence.state else inputs[-1:], sequence.state)  # a memory goes through all of it
    return output.worth[-1]


def _nearest(number: int, wrong: int) -> int:
    """The divisor of a number that is nearest to a wrong one."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wrong))
