"""Delta-delta network (Irie et al. 2021): a DeltaNet whose linear layer is itself replaced by a DeltaNet.

Each head has two matrices. The first matrix computes a query, a key, a value and a learning rate, with which the delta
rule updates and reads the second matrix. The delta rule also updates the first matrix.

Letters of shapes: H heads, E features per head.
"""

import torch.nn as nn
from torch import Tensor

from bestiary.agents.memories.base import State
from bestiary.agents.memories.delta_net import FEATURE_MAPS, DeltaNet, apply_delta_rule
from bestiary.agents.memories.fast_weights import FastWeightMemory, LayerMetrics, merge_heads, split_heads


class DeltaDelta(FastWeightMemory):
    """Fast-weight memory with two matrices per head: the first matrix computes the updates of the second matrix."""

    Options = DeltaNet.Options

    def __init__(self, input_size: int, options: DeltaNet.Options = DeltaNet.Options()):
        super().__init__(input_size, options, [DeltaDeltaMixer(options) for _ in range(options.layers)])


class DeltaDeltaMixer(nn.Module):
    """The recurrent part of one layer of DeltaDelta.

    Its state consists of the two matrices, [B,H,E,3E+1] and [B,H,E,E].
    """

    def __init__(self, options: DeltaNet.Options):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (5 * size + 2), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, 3 * size + 1), (heads, size, size))

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        feature_map = FEATURE_MAPS[self.options.feature_map]
        first, second = state
        y = split_heads(self.slow(self.norm(h)), self.options.heads)
        y, first = apply_delta_rule(y, done, first, feature_map, self.options, metrics)
        y, second = apply_delta_rule(y, done, second, feature_map, self.options, metrics)
        return self.project(merge_heads(y)), (first, second)
