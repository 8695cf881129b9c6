"""DeltaProduct (Siems et al. 2025): a DeltaNet that applies the delta rule several times per step.

A step computes one query q, and n keys k_j, values v_j and learning rates b_j. It writes n times and then reads:

    for j = 1, ..., n:   W <- W + k_j ⊗ b_j (v_j - k_j W)
    out = q W

The n writes multiply the old matrix by a product of n factors I - b_j k_j^T k_j. Keys have unit length. A learning rate
of 2 makes such a factor a reflection, and the product of two reflections is a rotation. In the memory `delta`, learning
rates are at most 1, so no factor has a negative eigenvalue, and no step can change the sign of a stored value. By
default, the learning rates of `delta-product` are between 0 and 2 (Grazzi et al. 2024).

Letters of shapes: H heads, E features per head, n writes per step.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
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


class DeltaProduct(FastWeightMemory):
    """Fast-weight memory that applies the delta rule several times per step, with learning rates of up to 2."""

    @dataclass(frozen=True)
    class Options(RecurrenceOptions):
        writes: int = option(2, "number of applications of the delta rule per step", low=1, high=64)
        max_beta: float = option(
            2.0,
            "upper bound of the learning rates (1: as in delta; above 1: a write can negate a stored value)",
            above=0,
            high=2,
        )
        feature_map: str = option("unit", "function that is applied to keys and queries", choices=("unit", "silu"))

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [DeltaProductMixer(options) for _ in range(options.layers)])


class DeltaProductMixer(nn.Module):
    """The recurrent part of one layer of DeltaProduct. Its state is one tensor [B,H,E,E]: an E x E matrix per head."""

    def __init__(self, options: DeltaProduct.Options):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (size + options.writes * (2 * size + 1)), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, size),)

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        o = self.options
        feature_map = FEATURE_MAPS[o.feature_map]
        columns = split_heads(self.slow(self.norm(h)), o.heads)  # [B,H,T,E+n(2E+1)]
        q, writes = columns.split((o.size, o.writes * (2 * o.size + 1)), dim=-1)
        k, v, beta_logit = writes.unflatten(-1, (o.writes, -1)).split((o.size, o.size, 1), dim=-1)  # [B,H,T,n,...]
        beta = o.max_beta * beta_logit.sigmoid()
        arguments = o.kernel_arguments(v)
        # Cut gradients between steps, that is after every `writes` writes, and not between the writes of one step.
        arguments["truncate"] = o.writes if arguments["truncate"] else 0
        y, weights = delta_seq(
            feature_map(q).repeat_interleave(o.writes, dim=2),
            feature_map(k).flatten(2, 3),
            v.flatten(2, 3),
            beta.flatten(2, 3),
            first_writes(done, o.writes),
            state[0],
            **arguments,
        )
        record_metrics(metrics, "delta", (weights,), beta)
        return self.project(merge_heads(y[:, :, o.writes - 1 :: o.writes])), (weights,)


def first_writes(done: Tensor, writes: int) -> Tensor:
    """Return bool [T*n,B] for n writes per step: `done` [T,B] at the first write of each step, False at the others."""
    resets = torch.zeros(len(done), writes, done.shape[1], dtype=torch.bool, device=done.device)
    resets[:, 0] = done
    return resets.flatten(0, 1)
