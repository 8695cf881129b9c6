"""Snapshots: how weights travel from the learner to the actors, whole.

The learner publishes new tensors and swaps one reference; an actor puts a snapshot's tensors in the place of its own between
two decisions. Nobody ever writes to a published tensor, so no actor can see half an update, and no weight needs to be copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent


@dataclass(frozen=True)
class Snapshot:
    version: int
    tensors: tuple[Tensor, ...]  # parameters, then buffers, in the module's order

    @classmethod
    def of(cls, agent: nn.Module | Agent, version: int, device: torch.device | None = None) -> "Snapshot":
        """The agent's weights now, on the device of those who will act with them."""
        return cls(version, tuple(tensor.detach().to(device, copy=True) for tensor in _tensors(agent)))

    def put_into(self, agent: nn.Module | Agent) -> None:
        """From now on the agent acts with these weights: with these very tensors, so it must not be trained. Buffers are
        copied: a module may write to its own while it acts."""
        for mine, published in zip(_tensors(agent), self.tensors, strict=True):
            if isinstance(mine, nn.Parameter):
                mine.data = laid_out_as(mine, published)
            else:
                mine.copy_(published)


def laid_out_as(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """A tensor of a parameter's shape in the parameter's order in memory, itself where it is so already: convolutions are
    faster in one order than in another, and fused optimizers walk memory, not indices."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, requires_grad=False).copy_(tensor)


def _tensors(agent: nn.Module | Agent) -> Sequence[Tensor]:
    return list(agent.state_dict(keep_vars=True).values())
