"""Versioned copies of the agent's weights, which the learner sends to the actors.

The learner publishes new weights as a new object with new tensors, and an actor loads this object between two steps.
Published tensors are never changed. Therefore an actor never sees a partial update, and it can use the tensors without
copying them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent


@dataclass(frozen=True)
class Weights:
    """Immutable weights of an agent."""

    version: int  # number of updates before these weights were copied; skipped updates are not counted
    tensors: tuple[Tensor, ...]  # parameters and buffers in the order of the agent's state_dict

    @classmethod
    def from_agent(cls, agent: nn.Module | Agent, version: int, device: torch.device | None = None) -> "Weights":
        """Return a copy of the agent's current weights on a device (None: the device of the agent)."""
        return cls(version, tuple(tensor.detach().to(device, copy=True) for tensor in _tensors(agent)))

    def load_into(self, agent: nn.Module | Agent) -> None:
        """Load these weights into an agent that is used only for acting.

        The agent must not be trained afterwards, because its parameters usually share memory with these tensors.
        Buffers are copied, because a module may change its buffers during inference.
        """
        for own, published in zip(_tensors(agent), self.tensors, strict=True):
            if isinstance(own, nn.Parameter):
                own.data = match_memory_layout(own, published)
            else:
                own.copy_(published)


def match_memory_layout(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """Return the tensor if it has the same strides as the parameter, otherwise a copy with the parameter's strides.

    Equal strides are needed for two reasons. (1) The speed of convolutions depends on the strides. (2) Fused optimizers
    update the parameter element at a memory position with the gradient element at the same memory position. If the
    strides differ, the element at this position is the gradient of another parameter element.
    """
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, requires_grad=False).copy_(tensor)


def _tensors(agent: nn.Module | Agent) -> Sequence[Tensor]:
    """Return the parameters and buffers in the order of the agent's state_dict."""
    return list(agent.state_dict(keep_vars=True).values())
