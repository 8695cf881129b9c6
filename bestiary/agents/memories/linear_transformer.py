"""Linear transformer (Katharopoulos et al. 2020): a memory like DeltaNet, but with the sum rule.

Each step adds the outer product of a key and a value to a matrix, and then reads the value for a query (see
`kernels.sum_seq`). The sum rule never removes a value, so the matrix can grow with the length of an episode.
"""

from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from bestiary.agents.memories.base import State
from bestiary.agents.memories.delta_net import FEATURE_MAPS
from bestiary.agents.memories.fast_weights import (
    FastWeightMemory,
    LayerMetrics,
    TruncationOptions,
    merge_heads,
    record_metrics,
    split_heads,
)
from bestiary.kernels import sum_seq
from bestiary.utils.options import option


class LinearTransformer(FastWeightMemory):
    """Fast-weight memory in which each head has one matrix. Each step adds a value to the value stored for a key."""

    @dataclass(frozen=True)
    class Options(TruncationOptions):
        feature_map: str = option("elu", "function that is applied to keys and queries", choices=tuple(FEATURE_MAPS))

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [SumMixer(options) for _ in range(options.layers)])


class SumMixer(nn.Module):
    """The recurrent part of one layer of LinearTransformer. Its state is [B,H,E,E]: an E x E matrix per head."""

    def __init__(self, options: LinearTransformer.Options):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * 3 * size, bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, size),)

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        q, k, v = split_heads(self.slow(self.norm(h)), self.options.heads).chunk(3, dim=-1)
        feature_map = FEATURE_MAPS[self.options.feature_map]
        truncate = self.options.truncate == "step"
        y, weights = sum_seq(feature_map(q), feature_map(k), v, done, state[0], truncate=truncate)
        record_metrics(metrics, "sum", (weights,))
        return self.project(merge_heads(y)), (weights,)
