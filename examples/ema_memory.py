"""A memory of your own: `bestiary train toy/catch --memory examples/ema_memory.py:Ema --memory.slowest 0.9`."""

import torch
import torch.nn as nn
from torch import Tensor

State = tuple[Tensor, ...]


class Ema(nn.Module):
    """The present, and beside it an exponential moving average of the past; every unit learns its own rate."""

    def __init__(self, input_size: int, *, slowest: float = 0.95):
        super().__init__()
        self.rate = nn.Parameter(torch.linspace(0.05, slowest, input_size).logit())
        self.output_size = 2 * input_size

    def initial_state(self, batch_size: int) -> State:
        return (self.rate.new_zeros(batch_size, len(self.rate)),)

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        """x [T,B,D], done [T,B], state ([B,D],) -> y [T,B,2*D] and the state after the last step."""
        (average,) = state
        keep = self.rate.sigmoid()  # [D]
        averages = []
        for x_t, done_t in zip(x, done, strict=True):
            average = average * ~done_t[:, None]  # an episode that opens here knows nothing of the one before
            average = keep * average + (1 - keep) * x_t
            averages.append(average)
        return torch.cat([x, torch.stack(averages)], dim=-1), (average,)
