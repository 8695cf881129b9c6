"""Gated DeltaNet (Yang et al. 2024): DeltaNet in which each head also forgets a part of its matrix at each step.

Each step first multiplies the matrix W of a head by a factor a between 0 and 1, the decay, and then applies the delta
rule with the query q, the key k, the value v and the learning rate b:

    W <- a W
    W <- W + k ⊗ b (v - k W)               out = q W
    a = exp(-r softplus(x + c))            r > 0 and c are trained numbers of the head, x is computed from the input

The delta rule replaces single values; the decay can erase the whole matrix within one step. The initial r and c are
those of Mamba 2 (Dao and Gu 2024): r is uniform in [1,16], and softplus(c) log-uniform in [0.001,0.1].

Letters of shapes: H heads, E features per head.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.memories.base import State
from bestiary.agents.memories.delta_net import FEATURE_MAPS
from bestiary.agents.memories.fast_weights import (
    FastWeightMemory,
    LayerMetrics,
    RecurrenceOptions,
    merge_heads,
    record_metrics,
    split_heads,
)
from bestiary.kernels import delta_seq
from bestiary.utils.options import option


class GatedDelta(FastWeightMemory):
    """Fast-weight memory with the delta rule and a decay of the matrices that depends on the input."""

    @dataclass(frozen=True)
    class Options(RecurrenceOptions):
        feature_map: str = option("silu", "function that is applied to keys and queries", choices=tuple(FEATURE_MAPS))

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [GatedDeltaMixer(options) for _ in range(options.layers)])


class GatedDeltaMixer(nn.Module):
    """The recurrent part of one layer of GatedDelta. Its state is one tensor [B,H,E,E]: an E x E matrix per head."""

    def __init__(self, options: GatedDelta.Options):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (3 * size + 2), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())  # log r
        initial = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.decay_bias = nn.Parameter(initial.expm1().log())  # c, so that softplus(c) = initial
        self.state_shapes = ((heads, size, size),)

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        size = self.options.size
        columns = split_heads(self.slow(self.norm(h)), self.options.heads)  # [B,H,T,3E+2]
        q, k, v, beta_logit, decay_logit = columns.split((size, size, size, 1, 1), dim=-1)
        beta = beta_logit.sigmoid()
        rate, bias = self.log_rate.exp()[:, None, None], self.decay_bias[:, None, None]
        decay = (-rate * F.softplus(decay_logit.float() + bias)).exp()
        feature_map = FEATURE_MAPS[self.options.feature_map]
        arguments = self.options.kernel_arguments(v)
        y, weights = delta_seq(feature_map(q), feature_map(k), v, beta, done, state[0], decay=decay, **arguments)
        record_metrics(metrics, "delta", (weights,), beta)
        if metrics is not None:
            metrics.setdefault("delta_decay", []).append(decay.detach().mean())
        return self.project(merge_heads(y)), (weights,)
