"""The output of critics, `ValueEstimate`, and the selection of the values of a task."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ValueEstimate:
    """The normalised values that a critic outputs, and the statistics that convert them to units of the rewards.

    If the critic does not normalise, `mu` and `sigma` are floats, and `normalised` contains the unnormalised values.
    """

    normalised: Tensor  # [T,B], with gradient
    mu: Tensor | float = 0.0  # [T,B]: for each entry, the running mean of its task's value targets
    sigma: Tensor | float = 1.0  # [T,B]: for each entry, the running standard deviation of its task's value targets
    max_error: float = math.inf  # maximum absolute value of normalised errors and advantages

    @property
    def value(self) -> Tensor:
        """The values [T,B] in units of the rewards. If the critic normalises, they are detached (no gradient)."""
        if isinstance(self.mu, float):
            return self.normalised
        return self.normalised.detach() * self.sigma + self.mu

    def normalise(self, values: Tensor) -> Tensor:
        """Convert values [T,B] in units of the rewards to normalised values.

        Each result is clamped so that it differs from the critic's own output, `normalised`, by at most `max_error`.
        """
        if isinstance(self.mu, float):
            return values
        own = self.normalised.detach()
        return torch.clamp((values - self.mu) / self.sigma, own - self.max_error, own + self.max_error)

    def normalise_difference(self, differences: Tensor) -> Tensor:
        """Convert differences of values [T,B], for example advantages, to differences of normalised values.

        The result is clamped to [-max_error, max_error].
        """
        if isinstance(self.sigma, float):
            return differences
        return (differences / self.sigma).clamp(-self.max_error, self.max_error)

    def loss(self, targets: Tensor) -> Tensor:
        """Return the value loss of each entry, [T,B], given value targets [T,B] in units of the rewards."""
        return 0.5 * (self.normalise(targets) - self.normalised).square()

    def metrics(self, targets: Tensor) -> dict[str, Tensor]:
        """Return metrics of a batch by name, each summed over all entries. By default, there are none."""
        return {}

    def __getitem__(self, entries: slice | int) -> "ValueEstimate":
        """Return the estimates at one time index or in a slice of the time axis."""

        def select(x: Tensor | float) -> Tensor | float:
            return x[entries] if isinstance(x, Tensor) else x

        return ValueEstimate(self.normalised[entries], select(self.mu), select(self.sigma), self.max_error)


def select_task(values: Tensor, task: Tensor) -> Tensor:
    """Select one of the K values [T,B,K] of each entry by the task index [T,B] of the entry.

    Return the values [T,B].
    """
    return values.gather(-1, task.unsqueeze(-1)).squeeze(-1)
