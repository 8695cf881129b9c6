"""Probability distributions over actions."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Categorical:
    """Categorical distributions over A discrete actions. In shapes, "..." stands for any leading axes, usually T,B."""

    logits: Tensor  # [...,A], unnormalised log-probabilities

    @cached_property
    def log_probs(self) -> Tensor:
        """The log-probabilities of all actions, [...,A]."""
        return F.log_softmax(self.logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one random action from each distribution. Return the actions [...]."""
        flat = self.log_probs.exp().reshape(-1, self.logits.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).view(self.logits.shape[:-1])

    def is_finite(self) -> bool:
        """Return True if all logits are finite."""
        return bool(torch.isfinite(self.logits).all())

    def mode(self) -> Tensor:
        """Return the most probable actions [...]."""
        return self.logits.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probabilities [...] of actions [...]."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropies [...] of the distributions, in nats."""
        log_probs = self.log_probs
        return -(log_probs.exp() * log_probs).sum(dim=-1)

    def kl_divergence(self, other: "Categorical") -> Tensor:
        """Return the KL divergences KL(self || other), [...]."""
        log_probs = self.log_probs
        return (log_probs.exp() * (log_probs - other.log_probs)).sum(dim=-1)

    def __getitem__(self, index: slice) -> "Categorical":
        """Return the distributions that a slice of the first axis selects."""
        return Categorical(self.logits[index])
