"""PopArt (van Hasselt et al. 2016, Hessel et al. 2019): values that are normalised separately for each task.

If the returns of tasks differ in scale, the gradients of one task dominate the gradients of the other tasks. With
PopArt, the network therefore outputs a normalised value n for each task. The value is sigma n + mu, where mu and sigma
are the running mean and standard deviation of the task's value targets v, and nu is the running mean of v^2. An update
with the step size beta changes these statistics as follows, where E[v] is the mean of the task's targets in the batch:

    mu' = (1 - beta) mu + beta E[v]      nu' = (1 - beta) nu + beta E[v^2]      sigma' = sqrt(nu' - mu'^2)

It also changes the weights w and the bias b of the last layer so that all unnormalised values stay the same:

    w' = w sigma / sigma'                b' = (sigma b + mu - mu') / sigma'

Debiasing (option `debias`, on by default; not part of the papers). The statistics start at mu = 0 and sigma = 1. With
beta = 3e-4, the statistics need thousands of updates to reach the scale of a game whose returns are in the hundreds.
Until then, the network would have to output values in the hundreds, and its weights would become too large. With
debiasing:

1. The statistics of a task do not change before the task's first nonzero reward. Before that reward, the targets of the
   task are only values of the untrained network, and sigma would shrink towards 0.
2. A "rewarded update" of a task is an update whose batch contains a nonzero reward of the task. In the t-th rewarded
   update, the step size is max(beta, 1 / (t + 1)). At first, the statistics are thus arithmetic means over the rewarded
   updates; the initial values count as one more update. In updates without rewards, the step size is beta, as in the
   papers. This step size is small, so sigma stays near the scale of the rewards even if rewards are rare.
3. Before a task has had 100 rewarded updates, an update is not accepted (`accepts` returns False) if sigma would grow
   by more than 25 % or mu would move by more than sigma. The normalised errors of such an update have the wrong scale.
   The learner therefore updates the statistics first, and then computes the gradient again with the new statistics. In
   this case, the task's row of the last layer is not rescaled, so that the untrained values of the task move to the new
   mean.
4. Normalised value errors and normalised advantages are always clipped to [-MAX_ERROR, MAX_ERROR]. Without clipping,
   they could be arbitrarily large after a period without rewards, or if the rewards suddenly increase.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import CriticDefaults
from bestiary.agents.critics.estimate import ValueEstimate, select_task
from bestiary.utils.options import option

# Before a task has had WARMUP_UPDATES rewarded updates, an update is not accepted if it multiplies the task's sigma by
# more than this factor (item 3 of the module docstring).
MAX_SIGMA_GROWTH = 1.25
# When a task has had this number of updates with a nonzero reward, any change of its sigma and mu is accepted.
WARMUP_UPDATES = 100
MAX_ERROR = 10.0  # maximum absolute value of normalised errors and advantages


class PopArt(nn.Linear, CriticDefaults):
    """Critic with one value output per task, normalised by the running statistics of the task's value targets.

    The statistics (mean and standard deviation) are buffers, so checkpoints contain them. See the module docstring.
    """

    mu: Tensor  # [K], running mean of the value targets of each of the K tasks
    nu: Tensor  # [K], running mean of the squared value targets
    sigma: Tensor  # [K], running standard deviation of the value targets
    updates: Tensor  # [K], number of updates whose batch contained a nonzero reward of the task

    @dataclass(frozen=True)
    class Options:
        beta: float = option(3e-4, "step size of the running mean and standard deviation, per update", above=0, high=1)
        average: str = option(
            "moments",
            "how the running standard deviation is computed (moments: from running means of the value targets and of "
            "their squares, as in the paper; deviations: running mean of the standard deviations of the batches)",
            choices=("moments", "deviations"),
        )
        debias: bool = option(
            True,
            "adapt the running statistics faster at the start of training (but not before the first nonzero reward of "
            "a task), and clip normalised errors and advantages (off: as in the papers)",
        )
        min_sigma: float = option(1e-4, "lower bound of the standard deviation", above=0)
        max_sigma: float = option(1e6, "upper bound of the standard deviation", above=0)

        def __post_init__(self) -> None:
            if self.min_sigma > self.max_sigma:
                raise ValueError(
                    f"--critic.min-sigma {self.min_sigma:g} is above --critic.max-sigma {self.max_sigma:g}"
                )

    keeps_statistics = True

    def __init__(self, input_size: int, tasks: int = 1, options: Options = Options()):
        super().__init__(input_size, tasks)
        self.options = options
        self.register_buffer("mu", torch.zeros(tasks, dtype=torch.float64))
        self.register_buffer("nu", torch.ones(tasks, dtype=torch.float64))
        self.register_buffer("sigma", torch.ones(tasks, dtype=torch.float64))
        self.register_buffer("updates", torch.zeros(tasks, dtype=torch.float64))

    def forward(self, x: Tensor, task: Tensor) -> ValueEstimate:  # type: ignore[override]
        normalised = select_task(super().forward(x), task)
        max_error = MAX_ERROR if self.options.debias else math.inf
        return ValueEstimate(normalised, self.mu[task].float(), self.sigma[task].float(), max_error)

    def target_moments(self, targets: Tensor, task: Tensor, rewards: Tensor | None = None) -> Tensor:
        """Return four numbers for each of the K tasks, float64 [K,4], from which the statistics are updated.

        The four numbers are: the number of value targets of the task, their sum, the sum of their squares, and the
        number of nonzero rewards of the task. If `rewards` is None, nonzero targets are counted instead of nonzero
        rewards. All arguments are [T,B]. The result for a batch is the sum of the results for its micro-batches.
        """
        flat = targets.detach().double().flatten()
        nonzero = (targets if rewards is None else rewards).detach().flatten() != 0
        columns = torch.stack([torch.ones_like(flat), flat, flat.square(), nonzero.double()], dim=1)
        return columns.new_zeros(self.out_features, 4).index_add_(0, task.flatten(), columns)

    def has_valid_statistics(self) -> bool:
        """Return whether the statistics have values that `update_statistics` could have computed."""
        finite = all(bool(values.isfinite().all()) for values in (self.mu, self.nu, self.sigma, self.updates))
        return finite and bool((self.sigma > 0).all() and (self.nu >= 0).all() and (self.updates >= 0).all())

    def accepts(self, moments: Tensor) -> bool:
        """Return False if an update with these moments would change mu or sigma of a task too much.

        `moments` is the result of `target_moments` for the batch. `_wrong_scale` defines what "too much" means.
        """
        mu, _, sigma, _ = self._next_statistics(moments)
        return not bool((self._wrong_scale(mu, sigma) & (moments[:, 0] > 0)).any())

    @torch.no_grad()
    def update_statistics(self, moments: Tensor) -> None:
        """Update the statistics with `moments`, the result of `target_moments`, and rescale the last layer.

        The rescaling preserves the unnormalised values of each task. Exception: if the statistics of a task change too
        much (`_wrong_scale`), the task's row of the layer is not rescaled, and the task's normalised values stay the
        same. Nothing changes for a task without value targets in the batch.
        """
        mu, nu, sigma, updates = self._next_statistics(moments)
        has_targets = moments[:, 0] > 0
        rescale = has_targets & ~self._wrong_scale(mu, sigma)
        weight = self.weight.double() * (self.sigma / sigma).unsqueeze(1)
        bias = (self.sigma * self.bias.double() + self.mu - mu) / sigma
        changes = (
            (self.weight, weight, rescale.unsqueeze(1)),
            (self.bias, bias, rescale),
            (self.mu, mu, has_targets),
            (self.nu, nu, has_targets),
            (self.sigma, sigma, has_targets),
            (self.updates, updates, has_targets),
        )
        for old, new, rows in changes:
            old.copy_(torch.where(rows, new.to(old.dtype), old))

    def _wrong_scale(self, next_mu: Tensor, next_sigma: Tensor) -> Tensor:
        """Return a bool [K]: True for each task whose mu or sigma an update would change too much.

        `next_mu` and `next_sigma` are the statistics after the update. "Too much" means that sigma grows by more than
        the factor MAX_SIGMA_GROWTH, or that mu moves by more than sigma. The result is always False if the option
        `debias` is off, and for tasks that have had WARMUP_UPDATES updates with a nonzero reward.
        """
        jumps = (next_sigma > MAX_SIGMA_GROWTH * self.sigma) | ((next_mu - self.mu).abs() > self.sigma)
        return jumps & (self.updates < WARMUP_UPDATES) & self.options.debias

    def _next_statistics(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the values that mu, nu, sigma and `updates` would have after an update, each [K].

        `moments` is the result of `target_moments`. For a task without value targets in the batch, the returned numbers
        have no meaning and must not be used.
        """
        o = self.options
        count, total, squares, num_rewards = moments.unbind(1)
        mean = total / count.clamp(min=1)
        second = squares / count.clamp(min=1)
        updates = self.updates + (num_rewards > 0)
        beta = torch.full_like(mean, o.beta)
        if o.debias:
            beta = torch.where(num_rewards > 0, (1 / (updates + 1)).clamp(min=o.beta), beta)
            beta = torch.where(updates > 0, beta, 0.0)
        mu = self.mu.lerp(mean, beta)
        nu = self.nu.lerp(second, beta)
        if o.average == "moments":
            sigma = _standard_deviation(mu, nu).clamp(o.min_sigma, o.max_sigma)
        else:
            sigma = self.sigma.lerp(_standard_deviation(mean, second).clamp(o.min_sigma, o.max_sigma), beta)
        return mu, nu, sigma, updates


def _standard_deviation(mean: Tensor, second_moment: Tensor) -> Tensor:
    return (second_moment - mean.square()).clamp(min=0).sqrt()
