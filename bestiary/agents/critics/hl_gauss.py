"""HL-Gauss (Imani and White 2018, Farebrother et al. 2024): values are learned by classification.

The range of values [low, high] of a task is divided into m bins of equal width w, with the edges e_0, ..., e_m and the
centres c_1, ..., c_m. The network outputs m logits per task. The value is the mean of the distribution p:

    p = softmax(logits)                    V = sum_i p_i c_i

A value target v is converted to a histogram q. Its entries are the probabilities of the bins under a normal
distribution, divided by the probability of the whole range. The normal distribution has the mean v and the standard
deviation s = `sigma_ratio` w. Phi is the distribution function of the standard normal distribution. The value loss is
the cross-entropy of q and p:

    q_i = (Phi((e_i - v) / s) - Phi((e_{i-1} - v) / s)) / (Phi((e_m - v) / s) - Phi((e_0 - v) / s))
    L = - sum_i q_i log p_i

The size of the gradient of L does not depend on the scale of the rewards. A target outside the range is replaced by the
nearest end of the range.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.component_defaults import CriticDefaults
from bestiary.agents.critics.estimate import ValueEstimate
from bestiary.utils.errors import UserError
from bestiary.utils.options import option


@dataclass(kw_only=True)
class HistogramEstimate(ValueEstimate):
    """The histograms that `HLGauss` outputs. `normalised` contains their means, in units of the rewards."""

    logits: Tensor  # [T,B,m], with gradient
    low: Tensor  # [T,B], lower end of the range of values
    high: Tensor  # [T,B], upper end of the range of values
    sigma_ratio: float  # standard deviation of the normal distribution of a target, in bin widths

    def loss(self, targets: Tensor) -> Tensor:
        histograms = target_histograms(targets, self.low, self.high, self.logits.shape[-1], self.sigma_ratio)
        return -(histograms * F.log_softmax(self.logits, dim=-1)).sum(-1)

    def metrics(self, targets: Tensor) -> dict[str, Tensor]:
        return {"targets_outside": ((targets < self.low) | (targets > self.high)).sum().float()}

    def __getitem__(self, entries: slice | int) -> "HistogramEstimate":
        return HistogramEstimate(
            self.normalised[entries],
            logits=self.logits[entries],
            low=self.low[entries],
            high=self.high[entries],
            sigma_ratio=self.sigma_ratio,
        )


@torch.no_grad()
def target_histograms(targets: Tensor, low: Tensor, high: Tensor, bins: int, sigma_ratio: float) -> Tensor:
    """Return the histograms [...,bins] of value targets [...]: q in the docstring of this module.

    `low` and `high` [...] are the ends of the range of values.
    """
    # Measure positions in bins, so that the width of a bin is 1 and float32 is precise for ranges of any size.
    position = (targets.clamp(low, high) - low) / (high - low) * bins
    edges = torch.arange(bins + 1, dtype=position.dtype, device=position.device)
    distribution = torch.erf((edges - position.unsqueeze(-1)) / (math.sqrt(2) * sigma_ratio))
    mass = distribution.diff(dim=-1)
    return mass / mass.sum(-1, keepdim=True)


class HLGauss(nn.Module, CriticDefaults):
    """Critic with one histogram of values per task. See the module docstring."""

    low: Tensor  # [K], lower end of the range of values of each of the K tasks
    high: Tensor  # [K], upper end of the range
    classifies = True

    @dataclass(frozen=True)
    class Options:
        low: tuple[float, ...] = option(
            (-10.0,), "lower end of the range of values, in units of the clipped rewards: one number, or one per task"
        )
        high: tuple[float, ...] = option(
            (10.0,), "upper end of the range of values, in units of the clipped rewards: one number, or one per task"
        )
        bins: int = option(51, "number of bins of the histogram", low=2, high=10_000)
        sigma_ratio: float = option(
            0.75,
            "standard deviation, in bin widths, of the normal distribution from which the histogram of a value target "
            "is computed",
            above=0,
            high=1000,
        )

        def __post_init__(self) -> None:
            if len(self.low) > 1 and len(self.high) > 1 and len(self.low) != len(self.high):
                raise ValueError(
                    f"--critic.low has {len(self.low)} numbers, but --critic.high has {len(self.high)}; give one "
                    "number, or one number per task"
                )
            for low, high in self.ranges(max(len(self.low), len(self.high))):
                if not low < high:
                    raise ValueError(f"--critic.low {low:g} must be below --critic.high {high:g}")

        def ranges(self, tasks: int) -> list[tuple[float, float]]:
            """Return the range of values of each task."""
            lows, highs = (ends * tasks if len(ends) == 1 else ends for ends in (self.low, self.high))
            return list(zip(lows, highs, strict=True))

    def __init__(self, input_size: int, tasks: int = 1, options: Options = Options()):
        super().__init__()
        for name in ("low", "high"):
            given = len(getattr(options, name))
            if given not in (1, tasks):
                raise UserError(
                    f"--critic.{name}: {given} numbers for {_count(tasks, 'task')}; give one number, or one per task"
                )
        self.options = options
        # The first axis of both parameters is the task, so that a warm start can match the rows of tasks.
        self.weight = nn.Parameter(0.01 * torch.randn(tasks, options.bins, input_size))
        self.bias = nn.Parameter(torch.zeros(tasks, options.bins))
        low, high = (torch.tensor(ends) for ends in zip(*options.ranges(tasks), strict=True))
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, x: Tensor, task: Tensor) -> HistogramEstimate:
        bins = self.options.bins
        logits = F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).float()  # [T,B,K*m]
        logits = logits.unflatten(-1, (-1, bins))
        logits = logits.gather(-2, task[..., None, None].expand(*task.shape, 1, bins)).squeeze(-2)  # [T,B,m]
        low, high = self.low[task], self.high[task]
        centres = (torch.arange(bins, dtype=low.dtype, device=low.device) + 0.5) / bins  # [m], scaled to [0,1]
        values = low + (high - low) * (logits.softmax(-1) * centres).sum(-1)
        return HistogramEstimate(values, logits=logits, low=low, high=high, sigma_ratio=self.options.sigma_ratio)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
