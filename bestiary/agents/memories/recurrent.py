"""LSTM and GRU memories with episode resets inside a sequence.

PyTorch's recurrent layers are fastest if they process many steps in one call, but they cannot reset their state during
the call. This module therefore cuts the sequence at each step at which a row of the batch starts a new episode. It
calls the layer once for each piece. Before each call, it sets the state of the rows that start an episode to zero. The
result is the same as if each step were processed in its own call.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults
from bestiary.agents.memories.base import State
from bestiary.utils.options import option


class Recurrent(nn.Module, MemoryDefaults):
    """Base class of LSTM and GRU. The state consists of `num_state_tensors` tensors [B,layers,hidden]."""

    num_state_tensors: int

    @dataclass(frozen=True)
    class Options:
        hidden: int = option(256, "number of hidden units per layer", low=1)
        layers: int = option(1, "number of stacked layers", low=1, high=100)

    def __init__(self, core: nn.RNNBase):
        super().__init__()
        self.core = core
        self.output_size = core.hidden_size

    def initial_state(self, batch_size: int) -> State:
        weight = next(self.parameters())  # the state has the same device and type as the weights
        shape = (batch_size, self.core.num_layers, self.core.hidden_size)
        return tuple(weight.new_zeros(shape) for _ in range(self.num_state_tensors))

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        length = x.shape[0]
        any_done = done.any(dim=1).tolist() if length > 1 else []
        cuts = [0, *(t for t in range(1, length) if any_done[t]), length]
        outputs = []
        for start, stop in itertools.pairwise(cuts):
            keep = (~done[start]).view(-1, 1, 1)  # [B,1,1]
            output, state = self._run(x[start:stop], tuple(torch.where(keep, s, 0.0) for s in state))
            outputs.append(output)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], state

    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run PyTorch's layer over x [T,B,D] without resets. Return the outputs [T,B,hidden] and the new state."""
        layers_first = tuple(s.transpose(0, 1).contiguous() for s in state)  # [layers,B,hidden]
        if self.num_state_tensors == 1:
            output, after = self.core(x, layers_first[0])
            return output, (after.transpose(0, 1),)
        output, after = self.core(x, layers_first)
        return output, tuple(s.transpose(0, 1) for s in after)


class LSTM(Recurrent):
    """Long short-term memory. The state consists of the output h and the cell c."""

    num_state_tensors = 2

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.LSTM(input_size, options.hidden, options.layers))


class GRU(Recurrent):
    """Gated recurrent unit. The state consists of the output h."""

    num_state_tensors = 1

    def __init__(self, input_size: int, options: Recurrent.Options = Recurrent.Options()):
        super().__init__(nn.GRU(input_size, options.hidden, options.layers))
