"""The interface of memories, and `NoMemory` for agents without a memory."""

from typing import Protocol

import torch.nn as nn
from torch import Tensor

from bestiary.agents.defaults import MemoryDefaults

State = tuple[Tensor, ...]  # recurrent state: a flat tuple of tensors, batch axis first


class Memory(Protocol):
    """The recurrent part of an agent.

    One call with T steps must compute the same outputs as T calls with one step each.
    """

    output_size: int

    def initial_state(self, batch_size: int) -> State:
        """Return the state at the start of an episode: all zeros."""

    def __call__(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        """Process x [T,B,D], D inputs per step. Return the outputs [T,B,output_size] and the state after the last step.

        `done` [T,B] marks the first entries of episodes. If done[t,b] is set, the state of row b is reset before x[t,b]
        is processed.
        """

    def forward_with_metrics(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        """Do the same as `__call__` and also return metrics (default: no metrics). The learner calls this method."""


class NoMemory(nn.Module, MemoryDefaults):
    """A memory that returns its input unchanged. Its state is the empty tuple."""

    def __init__(self, input_size: int):
        super().__init__()
        self.output_size = input_size

    def initial_state(self, batch_size: int) -> State:
        return ()

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state
