"""The interface of memories, and `NoMemory` for agents without a memory."""

from typing import Protocol

import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults

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

        If done[t,b] is True, entry t is the first entry of an episode in row b of the batch. The memory then resets the
        state of row b before it processes x[t,b].
        """

    def forward_with_metrics(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        """Return the results of `__call__`, and scalar metrics by name (by default none).

        Agents call this method instead of `__call__` if gradients are enabled.
        """


class NoMemory(nn.Module, MemoryDefaults):
    """A memory that returns its input unchanged. Its state is the empty tuple."""

    def __init__(self, input_size: int):
        super().__init__()
        self.output_size = input_size

    def initial_state(self, batch_size: int) -> State:
        return ()

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state
