"""No memory: an agent that sees only the present."""

import torch.nn as nn
from torch import Tensor


class NoMemory(nn.Module):
    """Hands its input on; its state is the empty tuple."""

    def __init__(self, input_size: int):
        super().__init__()
        self.output_size = input_size

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        return ()

    def forward(self, x: Tensor, done: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        return x, state
