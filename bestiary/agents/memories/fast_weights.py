"""Common code of fast-weight memories: layers whose recurrent state is a matrix that the network itself writes to.

    h = linear(x)
    h = h + project(mix(h))        each layer: first a mixer, which is the only recurrent part,
    h = h + feedforward(h)         then the feed-forward block of a transformer

A mixer splits h into H heads of E features each. Each head has one or more matrices. The memories differ in the mixer:

    delta          a linear layer computes keys, values, queries and learning rates from h. Keys, values and learning
                   rates update a matrix that starts at zero; queries read from this matrix (`delta_net.py`).
    srwm           a self-referential matrix computes an output, a key, a query and learning rates from h. It updates
                   itself with the key, the query and the learning rates (Irie et al. 2022, `self_referential.py`).
    sr-delta       like delta, but a self-referential matrix computes keys, values, queries and learning rates.
    fake-sr        like srwm, but the matrix does not change, so the agent has no memory (a control experiment).
    srwm-no-carry  like srwm, but the state is reset at fixed intervals, by default at the start of each rollout.
    linear-transformer, recurrent-delta, delta-rnn, delta-delta
                   variants of delta (`linear_transformer.py`, `recurrent_delta.py`, `delta_delta.py`).

The recurrences are in `bestiary.kernels`. Gradients pass through the whole rollout, unless the option `truncate` cuts
them after each step, as in the code of Irie et al. (2022).

A matrix that updates itself can grow without limit. An update multiplies the matrix by I + b k (q - k)^T (identity
matrix I, key k, query q, learning rate b). One eigenvalue of this factor is 1 + b (q.k - |k|^2). It is at most 1.25,
because |q| <= 1 and b <= 1. Repeated equal updates can therefore enlarge the matrix by 25 % per step. In a single step,
the Euclidean norm of the matrix can grow even more, because I + b k (q - k)^T is not symmetric. For example, it can
grow by the factor sqrt(2) if k and q select different rows and b = 1.

The learner therefore logs the norms and the learning rates of the matrices, and skips an update if one of these metrics
is not finite. The metrics stay on the device until the learner reads all metrics of an update together, because each
read has to wait for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults
from bestiary.agents.memories.base import State
from bestiary.kernels import IMPLEMENTATIONS
from bestiary.utils.options import option

LayerMetrics = dict[str, list[Tensor]]  # name of a metric -> one scalar tensor per layer


@dataclass(frozen=True)
class FastWeightOptions:
    """The sizes of a fast-weight memory."""

    hidden: int = option(128, "number of features between the layers (width of the residual stream)", low=1)
    layers: int = option(2, "number of layers", low=1, high=100)
    heads: int = option(8, "number of heads per layer", low=1)
    head_size: int | None = option(None, "number of features per head (default: hidden / heads)", low=1)
    ff: int = option(512, "number of hidden units of each feed-forward block", low=1)

    def __post_init__(self) -> None:
        size = self.head_size or self.hidden // self.heads
        if self.heads * size == self.hidden:
            return
        if self.head_size is None:
            divisors = (h for h in range(1, self.hidden + 1) if self.hidden % h == 0)
            suggestion = f"--memory.heads {min(divisors, key=lambda h: abs(h - self.heads))}"
        else:
            suggestion = f"--memory.hidden {self.heads * size}"
        raise ValueError(
            f"--memory.heads {self.heads} x head size {size} must equal --memory.hidden {self.hidden}; try {suggestion}"
        )

    @property
    def size(self) -> int:
        """The number of features per head, E."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class TruncationOptions(FastWeightOptions):
    """Options of a fast-weight memory that has a recurrent state: sizes and truncation of gradients."""

    truncate: str = option(
        "none",
        "truncation of gradients through time (none: no truncation; step: after each step, as in the code of Irie et "
        "al. 2022)",
        choices=("none", "step"),
    )


@dataclass(frozen=True)
class RecurrenceOptions(TruncationOptions):
    """Options of a fast-weight memory whose recurrence can be computed by several kernels."""

    kernel: str = option(
        "auto", "implementation of the recurrence (auto: numba on CPUs, triton on GPUs)", choices=IMPLEMENTATIONS
    )

    def kernel_arguments(self, x: Tensor) -> dict[str, Any]:
        """Return the keyword arguments `truncate` and `implementation` of a kernel call with inputs x.

        If the chosen kernel does not run on the device of x, return the implementation `auto` instead. For example, an
        agent that was trained on a GPU with `triton` can then be evaluated on a CPU.
        """
        device = {"numba": "cpu", "triton": "cuda"}.get(self.kernel, x.device.type)
        return {
            "truncate": self.truncate == "step",
            "implementation": self.kernel if device == x.device.type else "auto",
        }


class FastWeightMemory(nn.Module, MemoryDefaults):
    """A sequence of layers, each of which is a mixer (the recurrent part) and a feed-forward block.

    The state is a tuple with the state tensors of the first mixer, then those of the second mixer, and so on. The
    attribute `state_shapes` of a mixer contains the shapes of its state tensors, without the batch axis.
    """

    def __init__(self, input_size: int, options: FastWeightOptions, mixers: Sequence[nn.Module]):
        super().__init__()
        self.input = nn.Linear(input_size, options.hidden)
        self.mixers = nn.ModuleList(mixers)
        self.feedforwards = nn.ModuleList(FeedForward(options.hidden, options.ff) for _ in mixers)
        self.output_size = options.hidden

    def initial_state(self, batch_size: int) -> State:
        mixers: Any = self.mixers
        return tuple(
            self.input.weight.new_zeros(batch_size, *shape) for mixer in mixers for shape in mixer.state_shapes
        )

    def forward(
        self, x: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        h = self.input(x)
        remaining = list(state)
        after: list[Tensor] = []
        mixer: Any
        for mixer, feedforward in zip(self.mixers, self.feedforwards, strict=True):
            count = len(mixer.state_shapes)
            mixed, mixer_state = mixer(h, done, tuple(remaining[:count]), metrics)
            h = feedforward(h + mixed)
            after += mixer_state
            remaining = remaining[count:]
        return h, tuple(after)

    def forward_with_metrics(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        """Return the results of `forward` and metrics by name, which are means over layers, heads and batch."""
        metrics: LayerMetrics = {}
        y, after = self.forward(x, done, state, metrics)
        return y, after, {name: torch.stack(values).mean() for name, values in metrics.items()}


class FeedForward(nn.Module):
    """Residual block: h + linear(relu(linear(layer_norm(h))))."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.Sequential(nn.Linear(hidden, width), nn.ReLU(), nn.Linear(width, hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.layers(self.norm(h))


@torch.no_grad()
def record_metrics(metrics: LayerMetrics | None, name: str, matrices: State, betas: Tensor | None = None) -> None:
    """Append two metrics of one layer to `metrics`: the norm of its fast weights and its mean learning rate.

    The names of the metrics are `{name}_norm` and `{name}_beta`. `matrices` are one or more tensors [B,H,E,columns],
    `betas` are the learning rates; if `betas` is None, only the norm is appended. The norm of a head is the Euclidean
    norm of all entries of its matrices. The metric is the mean of this norm over heads and batch. If `metrics` is None,
    do nothing.
    """
    if metrics is not None:
        squares = torch.stack([matrix.square().sum((-2, -1)) for matrix in matrices])  # [len(matrices),B,H]
        metrics.setdefault(f"{name}_norm", []).append(squares.sum(0).sqrt().mean())
        if betas is not None:
            metrics.setdefault(f"{name}_beta", []).append(betas.float().mean())


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Split features into heads: [T,B,H*E] -> [B,H,T,E], the order of axes in the kernels."""
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def merge_heads(x: Tensor) -> Tensor:
    """Merge the features of all heads: [B,H,T,E] -> [T,B,H*E], the inverse of `split_heads`."""
    return x.permute(2, 0, 1, 3).flatten(-2)
