"""DeltaNet (Schlag et al. 2021): a memory whose state is a matrix that maps keys to values.

The delta rule updates the matrix at each step (see `DeltaNet`).

Letters of shapes: H heads, E features per head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.memories.base import State
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


def elu_features(x: Tensor) -> Tensor:
    """Return elu(x) + 1, divided by its sum over the last axis, so that the features add up to nearly 1."""
    x = F.elu(x) + 1
    return x / (x.sum(-1, keepdim=True) + 1e-5)


def silu_features(x: Tensor) -> Tensor:
    """Return silu(x), divided by its Euclidean norm over the last axis."""
    return F.normalize(F.silu(x), dim=-1, eps=1e-5)


def unit_features(x: Tensor) -> Tensor:
    """Return x, divided by its Euclidean norm over the last axis."""
    return F.normalize(x, dim=-1, eps=1e-5)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_features,
    "softmax": lambda x: x.softmax(-1),
    "silu": silu_features,
    "unit": unit_features,
}


class DeltaNet(FastWeightMemory):
    """Fast-weight memory in which each head has one matrix that maps keys to values.

    The delta rule writes a new value for a key: the value stored for the key moves towards the new value, by a fraction
    beta (the learning rate) of the difference.
    """

    @dataclass(frozen=True)
    class Options(RecurrenceOptions):
        feature_map: str = option("elu", "function that is applied to keys and queries", choices=tuple(FEATURE_MAPS))

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [DeltaMixer(options) for _ in range(options.layers)])


class DeltaMixer(nn.Module):
    """The recurrent part of one layer of DeltaNet. Its state is one tensor [B,H,E,E]: an E x E matrix per head."""

    def __init__(self, options: DeltaNet.Options):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (3 * size + 1), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, size),)

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        qkvb = split_heads(self.slow(self.norm(h)), self.options.heads)
        feature_map = FEATURE_MAPS[self.options.feature_map]
        y, weights = apply_delta_rule(qkvb, done, state[0], feature_map, self.options, metrics)
        return self.project(merge_heads(y)), (weights,)


def apply_delta_rule(
    qkvb: Tensor,
    done: Tensor,
    weights: Tensor,
    feature_map: Callable[[Tensor], Tensor],
    options: RecurrenceOptions,
    metrics: LayerMetrics | None,
) -> tuple[Tensor, Tensor]:
    """Run the delta rule over a sequence.

    Args:
        qkvb: queries and keys (E features each), values (M features) and one learning-rate logit, concatenated,
            [B,H,T,2E+M+1].
        done: bool [T,B]; True at the first step of each episode.
        weights: fast weights (the matrices that are written) before the first step, [B,H,E,M].
        feature_map: function that is applied to queries and keys.
        options: the size of the heads (E) and the kernel that computes the recurrence.
        metrics: dict to which the function adds the metrics `delta_norm` and `delta_beta`; None: compute no metrics.

    Return the outputs [B,H,T,M] and the fast weights after the last step [B,H,E,M].
    """
    size = options.size
    q, k, v, beta_logit = qkvb.split((size, size, weights.shape[-1], 1), dim=-1)
    beta = beta_logit.sigmoid()
    y, weights = delta_seq(feature_map(q), feature_map(k), v, beta, done, weights, **options.kernel_arguments(v))
    record_metrics(metrics, "delta", (weights,), beta)
    return y, weights
