"""LSTM and GRU, with resets inside the sequence. The weights are PyTorch's own layers'; `recurrences.py` runs them."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.memories.recurrences import GRUSequence, LSTMSequence
from bestiary.options import option

State = tuple[Tensor, ...]


class Recurrent(nn.Module):
    """What LSTM and GRU share: a state of `parts` tensors [B, layers, hidden]."""

    parts: int

    @dataclass(frozen=True)
    class Options:
        hidden: int = option(256, "units", low=1)
        layers: int = option(1, "layers on top of each other", low=1, high=100)

    def __init__(self, core: nn.RNNBase):
        super().__init__()
        self.core = core
        self.output_size = core.hidden_size

    def initial_state(self, batch_size: int) -> State:
        weight = next(self.parameters())  # for its device and type
        shape = (batch_size, self.core.num_layers, self.core.hidden_size)
        return tuple(weight.new_zeros(shape) for _ in range(self.parts))

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        weights = self.core.all_weights  # of each layer: for the input, for the state, and a bias for each
        with torch.autocast(x.device.type, enabled=False):  # what is carried from step to step keeps all its digits
            x, resets = x.to(weights[0][0].dtype), done.unsqueeze(-1)
            after = []
            for layer, (w, u, b, b_u) in enumerate(weights):
                x, carried = self.through(x, resets, tuple(s[:, layer] for s in state), (w, u, b, b_u))
                after.append(carried)
        return x, tuple(torch.stack(parts, dim=1) for parts in zip(*after, strict=True))

    def through(self, x: Tensor, resets: Tensor, state: State, weights: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        """One layer over the whole sequence."""
        raise NotImplementedError


class LSTM(Recurrent):
    """Long short-term memory; its state is (h, c)."""

    parts = 2

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.LSTM(input_size, options.hidden, options.layers))

    def through(self, x: Tensor, resets: Tensor, state: State, weights: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        w, u, b, b_u = weights
        y, c = LSTMSequence.apply(F.linear(x, w, b + b_u), resets, *state, u)
        return y, (y[-1], c)


class GRU(Recurrent):
    """Gated recurrent unit; its state is (h,)."""

    parts = 1

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.GRU(input_size, options.hidden, options.layers))

    def through(self, x: Tensor, resets: Tensor, state: State, weights: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        w, u, b, b_u = weights
        y = GRUSequence.apply(F.linear(x, w, b), resets, *state, u, b_u)
        return y, (y[-1],)
