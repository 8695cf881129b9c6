"""LSTM and GRU, with resets inside the sequence.

PyTorch's recurrent layers run fastest over many steps at once but know no resets. So the sequence is cut where any row of
the batch starts a new episode, and the rows that do have their state zeroed there: the same as one step at a time.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

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
        length = x.shape[0]
        opened = done.any(dim=1).tolist() if length > 1 else []
        cuts = [0, *(t for t in range(1, length) if opened[t]), length]
        outputs = []
        for start, stop in itertools.pairwise(cuts):
            keep = (~done[start]).view(-1, 1, 1)  # [B,1,1]
            output, state = self._run(x[start:stop], tuple(torch.where(keep, s, 0.0) for s in state))
            outputs.append(output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], state

    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        layered = tuple(s.transpose(0, 1).contiguous() for s in state)  # [B,L,H] -> [L,B,H], as PyTorch has it
        output, after = self.core(x, layered if self.parts > 1 else layered[0])
        return output, tuple(s.transpose(0, 1) for s in (after if self.parts > 1 else (after,)))


class LSTM(Recurrent):
    """Long short-term memory; its state is (h, c)."""

    parts = 2

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.LSTM(input_size, options.hidden, options.layers))


class GRU(Recurrent):
    """Gated recurrent unit; its state is (h,)."""

    parts = 1

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.GRU(input_size, options.hidden, options.layers))
