"""Critics: what a situation is worth. `critic(x [T,B,F], task [T,B]) -> Worth`.

    shared      one value for all tasks
    per-task    a value for each task, in the units of its rewards
    popart      a value for each task, in units that follow the task's returns (below)

PopArt (van Hasselt et al. 2016, Hessel et al. 2019). Tasks whose returns differ in scale would drown each other's gradients. So
the network's output n for a task is normalised: it is worth sigma n + mu, with mu and sigma the mean and deviation of what
the value should have been so far. Once an update they move,

    mu' = (1 - beta) mu + beta E[v]      nu' = (1 - beta) nu + beta E[v^2]      sigma' = sqrt(nu' - mu'^2)

and the last layer with them, so that nothing that was learnt is lost:

    w' = w sigma / sigma'                b' = (sigma b + mu - mu') / sigma'

They begin as mu = 0 and sigma = 1. Moved from there by a beta of 3e-4, they would take thousands of updates to get to a game
whose returns are in the hundreds, and meanwhile the network would have to give out hundreds itself, which ruins it. So (unless
`debias` is off, which is how the papers write it) statistics are at first plain averages of all that was seen, the beginning
counted as one: the t-th update of a task moves them by the larger of beta and 1 / (t + 1). And where, in one of a task's first
hundred updates, sigma grows by more than a quarter or mu moves by more than a sigma, errors were measured by a scale that did
not fit: nothing is learnt from that update, and there is no value worth preserving; the task's critic, which knew nothing,
begins at the mean instead of at zero. Later such leaps are rewards that are rare, and those are to be learnt from.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.options import option

GROWTH = 1.25  # of a deviation in one update: with more, one of a task's first updates only moves the statistics
FIRST = 100  # updates


@dataclass
class Worth:
    """Values [T,B] as the network gives them, `normalised`, and what makes them values in the units of the rewards."""

    normalised: Tensor  # [T,B], with a gradient
    mean: Tensor | float = 0.0  # [T,B], of the task
    deviation: Tensor | float = 1.0  # [T,B]

    @property
    def value(self) -> Tensor:
        """[T,B] in the units of the rewards."""
        if isinstance(self.mean, float):
            return self.normalised
        return self.normalised.detach() * self.deviation + self.mean

    def normalise(self, values: Tensor) -> Tensor:
        """Values in the units of the rewards, as the network should give them."""
        return values if isinstance(self.mean, float) else (values - self.mean) / self.deviation

    def scale(self, differences: Tensor) -> Tensor:
        """Differences of such values, in the network's units."""
        return differences if isinstance(self.deviation, float) else differences / self.deviation

    def __getitem__(self, entries: slice | int) -> "Worth":
        def some(x: Tensor | float) -> Tensor | float:
            return x[entries] if isinstance(x, Tensor) else x

        return Worth(self.normalised[entries], some(self.mean), some(self.deviation))


class Shared(nn.Linear):
    """One value, whatever the task."""

    def __init__(self, input_size: int, tasks: int = 1):
        super().__init__(input_size, 1)

    def forward(self, x: Tensor, task: Tensor) -> Worth:  # type: ignore[override]
        return Worth(super().forward(x).squeeze(-1))


class PerTask(nn.Linear):
    """A value for each task, none of them normalised."""

    def __init__(self, input_size: int, tasks: int = 1):
        super().__init__(input_size, tasks)

    def forward(self, x: Tensor, task: Tensor) -> Worth:  # type: ignore[override]
        return Worth(_own(super().forward(x), task))


class PopArt(nn.Linear):
    """A value for each task, normalised by the mean and deviation of its targets. The statistics are the checkpoint's, too."""

    mu: Tensor
    nu: Tensor
    sigma: Tensor
    updates: Tensor

    @dataclass(frozen=True)
    class Options:
        beta: float = option(3e-4, "share of the newest targets in the statistics, once an update", above=0, high=1)
        average: str = option(
            "moments",
            "what is averaged: first and second moments; or mean and deviation within an update's batch, as one fork did",
            choices=("moments", "deviations"),
        )
        debias: bool = option(
            True, "begin with plain averages, and learn nothing from targets that are far beyond them"
        )
        low: float = option(1e-4, "least deviation", above=0)
        high: float = option(1e6, "greatest deviation", above=0)

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError(f"--critic.low {self.low:g} is above --critic.high {self.high:g}")

    def __init__(self, input_size: int, tasks: int = 1, options: Options = Options()):
        super().__init__(input_size, tasks)
        self.options = options
        self.register_buffer("mu", torch.zeros(tasks, dtype=torch.float64))
        self.register_buffer("nu", torch.ones(tasks, dtype=torch.float64))
        self.register_buffer("sigma", torch.ones(tasks, dtype=torch.float64))
        self.register_buffer("updates", torch.zeros(tasks, dtype=torch.float64))  # that had targets of the task

    def forward(self, x: Tensor, task: Tensor) -> Worth:  # type: ignore[override]
        return Worth(_own(super().forward(x), task), self.mu[task].float(), self.sigma[task].float())

    def moments(self, targets: Tensor, task: Tensor) -> Tensor:
        """[K,3] of targets [T,B]: for each task how many, their sum, the sum of their squares. Those of groups add up."""
        flat = targets.detach().double().flatten()
        columns = torch.stack([torch.ones_like(flat), flat, flat.square()], dim=1)
        return columns.new_zeros(self.out_features, 3).index_add_(0, task.flatten(), columns)

    def fits(self, moments: Tensor) -> bool:
        """Whether the statistics are of the size of an update's targets, so that there is something to learn from them."""
        mu, _, sigma, _ = self._moved(moments)
        return not bool((self._beginning(mu, sigma) & (moments[:, 0] > 0)).any())

    @torch.no_grad()
    def adapt(self, moments: Tensor) -> None:
        """Take in the targets of an update, and change the weights so that every value stays what it was; where statistics only
        begin to be right, that it is as far from the mean as it was, in deviations."""
        mu, nu, sigma, updates = self._moved(moments)
        seen, known = moments[:, 0] > 0, ~self._beginning(mu, sigma)
        weight = self.weight.double() * (self.sigma / sigma).unsqueeze(1)
        bias = (self.sigma * self.bias.double() + self.mu - mu) / sigma
        statistics = ((self.mu, mu), (self.nu, nu), (self.sigma, sigma), (self.updates, updates))
        layer = ((self.weight, weight, (seen & known).unsqueeze(1)), (self.bias, bias, seen & known))
        for old, new, rows in (*layer, *((*pair, seen) for pair in statistics)):
            old.copy_(torch.where(rows, new.to(old.dtype), old))  # a task without targets keeps every bit

    def _beginning(self, mu: Tensor, sigma: Tensor) -> Tensor:
        """Of which tasks the statistics that would be next say that those so far are not to be measured by."""
        leaps = (sigma > GROWTH * self.sigma) | ((mu - self.mu).abs() > self.sigma)
        return leaps & (self.updates < FIRST) & self.options.debias

    def _moved(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mu, nu, sigma and updates [K] of tasks that had the targets of an update; of others they mean nothing."""
        o, (count, total, squares) = self.options, moments.unbind(1)
        mean, second = total / count.clamp(min=1), squares / count.clamp(min=1)
        updates = self.updates + 1
        beta = (1 / (updates + 1)).clamp(min=o.beta) if o.debias else torch.full_like(updates, o.beta)
        mu, nu = self.mu.lerp(mean, beta), self.nu.lerp(second, beta)
        if o.average == "moments":
            sigma = _deviation(mu, nu).clamp(o.low, o.high)
        else:
            sigma = self.sigma.lerp(_deviation(mean, second).clamp(o.low, o.high), beta)
        return mu, nu, sigma, updates


def _deviation(mean: Tensor, second: Tensor) -> Tensor:
    return (second - mean.square()).clamp(min=0).sqrt()


def _own(values: Tensor, task: Tensor) -> Tensor:
    """Of values [T,B,K], those of each entry's own task [T,B]."""
    return values.gather(-1, task.unsqueeze(-1)).squeeze(-1)


CRITICS: dict[str, type[nn.Module]] = {"shared": Shared, "per-task": PerTask, "popart": PopArt}
