"""Residual feed-forward blocks without a recurrent part: the control experiment "deep FF" of Irie et al. (2022)."""

from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults
from bestiary.agents.memories.base import State
from bestiary.agents.memories.fast_weights import FeedForward
from bestiary.utils.options import option


class DeepFeedForward(nn.Module, MemoryDefaults):
    """A linear layer and the feed-forward blocks of a fast-weight memory. The agent has no memory."""

    @dataclass(frozen=True)
    class Options:
        hidden: int = option(128, "number of features between the blocks (width of the residual stream)", low=1)
        layers: int = option(2, "number of blocks", low=1, high=100)
        ff: int = option(512, "number of hidden units of each block", low=1)

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__()
        self.input = nn.Linear(input_size, options.hidden)
        self.feedforwards = nn.Sequential(*(FeedForward(options.hidden, options.ff) for _ in range(options.layers)))
        self.output_size = options.hidden

    def initial_state(self, batch_size: int) -> State:
        return ()

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        return self.feedforwards(self.input(x)), state
