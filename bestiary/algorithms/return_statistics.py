"""Reward normalisation: rewards are divided by the running standard deviation of the discounted returns.

VecNormalize in OpenAI Baselines and Stable-Baselines3 and the code of PPG (Cobbe et al. 2021) use the same rule. R_t is
the discounted sum of the rewards of an episode up to step t. R is 0 before the first step of each episode:

    R_t = r_t + gamma R_{t-1}
    normalised reward = r_t / sqrt(variance of R + 1e-8), clipped to [-10, 10]

The variance is over all steps of the run so far, separately for each task. An episode may last longer than a rollout.
Therefore R_t is computed by the actors, which see whole episodes. The learner updates the variance with all new
rollouts, and then normalises their rewards.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bestiary.rollout import Rollout, Tensors

DISCOUNTED_RETURN = "discounted_return"  # name in `Rollout.extras`: R_t of each action, from the actor
NORMALISED_REWARD = "normalised_reward"  # name in `Rollout.extras`: the normalised reward of each action
MAX_REWARD = 10.0  # limit of the absolute value of a normalised reward
INITIAL_COUNT = 1e-4  # weight of the initial mean 0 and variance 1, in steps


class ReturnStatistics:
    """The running mean and variance of the discounted returns of each task."""

    def __init__(self, num_tasks: int):
        self.count = torch.full((num_tasks,), INITIAL_COUNT, dtype=torch.float64)  # [K] number of steps
        self.mean = torch.zeros(num_tasks, dtype=torch.float64)  # [K]
        self.variance = torch.ones(num_tasks, dtype=torch.float64)  # [K]

    def normalise(self, rollouts: Sequence[Rollout], all_reduce: Callable[[Tensor], Tensor]) -> list[Rollout]:
        """Update the statistics with new rollouts. Return the rollouts with normalised rewards in their extras.

        `all_reduce` returns the sum of a tensor over all learners.
        """
        sums = torch.stack([self._sums(rollout) for rollout in rollouts]).sum(0)
        self.update(*all_reduce(sums).cpu())
        return [self._with_normalised_rewards(rollout) for rollout in rollouts]

    def _sums(self, rollout: Rollout) -> Tensor:
        """Return, for each task, the number of steps, the sum of the returns and the sum of their squares, [3,K]."""
        returns = rollout.extras[DISCOUNTED_RETURN].double().flatten()
        values = torch.stack([torch.ones_like(returns), returns, returns.square()])
        sums = values.new_zeros(3, len(self.count))
        return sums.index_add_(1, rollout.task[:-1].flatten(), values)

    def update(self, count: Tensor, total: Tensor, squares: Tensor) -> None:
        """Add new returns: their number, their sum and the sum of their squares, all [K].

        The variance is updated with the formula of Chan et al. (1979).
        """
        mean = total / count.clamp(min=1)
        variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
        all_steps = self.count + count
        difference = mean - self.mean
        between = difference.square() * self.count * count / all_steps
        self.variance = (self.variance * self.count + variance * count + between) / all_steps
        self.mean = self.mean + difference * count / all_steps
        self.count = all_steps

    @property
    def deviation(self) -> Tensor:
        """The number by which the rewards of each task are divided, [K]."""
        return (self.variance + 1e-8).sqrt()

    def _with_normalised_rewards(self, rollout: Rollout) -> Rollout:
        deviation = self.deviation.to(rollout.reward)[rollout.task[:-1]]  # [T,N]
        normalised = (rollout.reward[1:] / deviation).clamp(-MAX_REWARD, MAX_REWARD)
        extras = {name: tensor for name, tensor in rollout.extras.items() if name != DISCOUNTED_RETURN}
        return replace(rollout, extras={**extras, NORMALISED_REWARD: normalised})

    def save(self) -> Tensors:
        """Return the statistics as tensors by name, for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "variance": self.variance}

    def load(self, tensors: Tensors) -> None:
        """Restore the result of `save`. Raise ValueError if the tensors do not fit or are not valid."""
        for name, own in self.save().items():
            found = tensors.get(name)
            if found is None or found.shape != own.shape or found.dtype != own.dtype:
                raise ValueError(f"{name}: expected one number per task ({len(own)}) of the type float64")
            if not bool(found.isfinite().all()) or (name != "mean" and bool((found < 0).any())):
                raise ValueError(f"{name}: the values are not valid")
        self.count, self.mean, self.variance = (tensors[name].clone() for name in ("count", "mean", "variance"))
