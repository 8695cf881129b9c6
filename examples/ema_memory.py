"""Example of a user-defined memory.

bestiary train toy/catch --memory examples/ema_memory.py:Ema --memory.max-decay 0.9
"""

import torch
import torch.nn as nn
from torch import Tensor

State = tuple[Tensor, ...]


class Ema(nn.Module):
    """Concatenation of the input and its exponential moving average, with one trained decay rate per unit."""

    def __init__(self, input_size: int, *, max_decay: float = 0.95):
        super().__init__()
        self.decay_logit = nn.Parameter(torch.linspace(0.05, max_decay, input_size).logit())
        self.output_size = 2 * input_size

    def initial_state(self, batch_size: int) -> State:
        return (self.decay_logit.new_zeros(batch_size, len(self.decay_logit)),)

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        """Map x [T,B,D], done [T,B] and the state ([B,D],) to the output [T,B,2*D] and the final state."""
        (average,) = state
        decay = self.decay_logit.sigmoid()  # decay rate of each unit, [D]
        averages = []
        for x_t, done_t in zip(x, done, strict=True):
            average = average * ~done_t[:, None]  # reset at the start of an episode
            average = decay * average + (1 - decay) * x_t
            averages.append(average)
        return torch.cat([x, torch.stack(averages)], dim=-1), (average,)
