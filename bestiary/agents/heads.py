"""From a feature to a decision: distributions over actions."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Categorical:
    """A distribution over A discrete actions, [...,A] in front of it any shape."""

    logits: Tensor  # [...,A], unnormalised as the network gave them

    @cached_property
    def log_probs(self) -> Tensor:
        return F.log_softmax(self.logits, dim=-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        flat = self.log_probs.exp().reshape(-1, self.logits.shape[-1])
        return torch.multinomial(flat, 1, generator=generator).view(self.logits.shape[:-1])

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.logits).all())

    def mode(self) -> Tensor:
        return self.logits.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        log_probs = self.log_probs
        return -(log_probs.exp() * log_probs).sum(dim=-1)

    def distance(self, other: "Categorical") -> Tensor:
        """KL(self || other)."""
        mine = self.log_probs
        return (mine.exp() * (mine - other.log_probs)).sum(dim=-1)

    def __getitem__(self, index: slice) -> "Categorical":
        return Categorical(self.logits[index])
