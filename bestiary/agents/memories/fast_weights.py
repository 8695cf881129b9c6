"""Memories that are matrices, written by the network itself as it goes: DeltaNet and self-referential weight matrices.

    h = linear(x)
    h = h + project(mix(h))        for each layer: a mixer, the one part that goes through time,
    h = h + feedforward(h)         and what every transformer has after it

A mixer cuts h into heads of E numbers and gives each a matrix to write to:

    delta      keys, values, queries and a rate, all linear in h, write to and read from a matrix that begins at zero
    srwm       one matrix makes its own output, key, query and rates, and with them changes itself (Irie et al. 2022)
    sr-delta   delta, whose keys, values, queries and rates come from a matrix that changes itself
    fake-sr    srwm that never changes itself: nothing is remembered
    srwm-no-carry   srwm that begins anew with every unroll

The recurrences are `bestiary.kernels`; here is what is around them. Gradients go back through the whole unroll, unless
`truncate` cuts them after every step, as the published code did.

Matrices that rewrite themselves can grow by a quarter a step (1 + b (q·k - |k|²) of it is an eigenvalue), so a learner
watches how large they are, and how strongly they are written to. The numbers stay on the device until the one time an
update that the learner reads all of its numbers, and leaves out the update where one of them is not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.kernels import IMPLEMENTATIONS, delta_seq, srwm_seq
from bestiary.options import option

State = tuple[Tensor, ...]
Measures = dict[str, list[Tensor]]  # what a learner wants to know, by name: a number a layer
RATES = 4  # of a self-referential matrix: for its output, query, key and rate columns


@dataclass(frozen=True)
class Sizes:
    """What all of them have."""

    hidden: int = option(128, "width of what goes from layer to layer", low=1)
    layers: int = option(2, "layers on top of each other", low=1, high=100)
    heads: int = option(8, "matrices side by side in a layer", low=1)
    head_size: int | None = option(None, "numbers that a head sees (none: hidden / heads)", low=1)
    ff: int = option(512, "units of the layer after each mixer", low=1)

    def __post_init__(self) -> None:
        size = self.head_size or self.hidden // self.heads
        if self.heads * size != self.hidden:
            divisors = (h for h in range(1, self.hidden + 1) if self.hidden % h == 0)
            near = f"--memory.heads {min(divisors, key=lambda h: abs(h - self.heads))}"
            fits = near if self.head_size is None else f"--memory.hidden {self.heads * size}"
            raise ValueError(
                f"--memory.heads {self.heads} x head size {size} is not --memory.hidden {self.hidden}; try {fits}"
            )

    @property
    def size(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Recurrence(Sizes):
    """And what those have that go through time."""

    truncate: str = option(
        "none",
        "where gradients end: at the unroll's beginning; or after each step, as published",
        choices=("none", "step"),
    )
    kernel: str = option("auto", "what computes it (auto: numba on CPUs, triton on GPUs)", choices=IMPLEMENTATIONS)

    def how(self, x: Tensor) -> dict[str, Any]:
        """What to call a kernel with. An agent that was trained on a GPU is evaluated on a CPU, by what computes there."""
        own = {"numba": "cpu", "triton": "cuda"}.get(self.kernel, x.device.type)
        return {
            "truncate": self.truncate == "step",
            "implementation": self.kernel if own == x.device.type else "auto",
        }


class FastWeights(nn.Module):
    """Mixers and feed-forward layers by turns. Each mixer says what its state looks like for one environment (`shapes`)."""

    def __init__(self, input_size: int, sizes: Sizes, mixers: Sequence[nn.Module]):
        super().__init__()
        self.input = nn.Linear(input_size, sizes.hidden)
        self.mixers = nn.ModuleList(mixers)
        self.feedforwards = nn.ModuleList(FeedForward(sizes.hidden, sizes.ff) for _ in mixers)
        self.output_size = sizes.hidden

    def initial_state(self, batch_size: int) -> State:
        mixers: Any = self.mixers
        return tuple(self.input.weight.new_zeros(batch_size, *shape) for mixer in mixers for shape in mixer.shapes)

    def forward(self, x: Tensor, done: Tensor, state: State, measures: Measures | None = None) -> tuple[Tensor, State]:
        h, rest, after = self.input(x), list(state), list[Tensor]()
        mixer: Any
        for mixer, feedforward in zip(self.mixers, self.feedforwards, strict=True):
            own, rest = rest[: len(mixer.shapes)], rest[len(mixer.shapes) :]
            mixed, own = mixer(h, done, tuple(own), measures)
            h = feedforward(h + mixed)
            after += own
        return h, tuple(after)

    def watch(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        """The same, and means over layers, heads and batch of what is worth logging."""
        measures: Measures = {}
        y, after = self.forward(x, done, state, measures)
        return y, after, {name: torch.stack(numbers).mean() for name, numbers in measures.items()}


class FeedForward(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.Sequential(nn.Linear(hidden, width), nn.ReLU(), nn.Linear(width, hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.layers(self.norm(h))


@torch.no_grad()
def measure(measures: Measures | None, name: str, matrices: State, rates: Tensor) -> None:
    """How large the matrices [B,H,E,M] of each head are, all together, and the mean rate of writing to them."""
    if measures is not None:
        squares = torch.stack([matrix.square().sum((-2, -1)) for matrix in matrices])  # [parts,B,H]
        measures.setdefault(f"{name}_norm", []).append(squares.sum(0).sqrt().mean())
        measures.setdefault(f"{name}_beta", []).append(rates.float().mean())


def into_heads(x: Tensor, heads: int) -> Tensor:
    """[T,B,H*E] -> [B,H,T,E], as the kernels have it."""
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def out_of_heads(x: Tensor) -> Tensor:
    """[B,H,T,E] -> [T,B,H*E]"""
    return x.permute(2, 0, 1, 3).flatten(-2)


def elu_features(x: Tensor) -> Tensor:
    """Positive, and of sum (nearly) one."""
    x = F.elu(x) + 1
    return x / (x.sum(-1, keepdim=True) + 1e-5)


def silu_features(x: Tensor) -> Tensor:
    return F.normalize(F.silu(x), dim=-1, eps=1e-5)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_features,
    "softmax": lambda x: x.softmax(-1),
    "silu": silu_features,
}


# --- DeltaNet ---


class Delta(FastWeights):
    """DeltaNet: a matrix that associates keys with values, and corrects what it had there before."""

    @dataclass(frozen=True)
    class Options(Recurrence):
        features: str = option("elu", "of keys and queries", choices=tuple(FEATURES))

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [DeltaMixer(options) for _ in range(options.layers)])


class DeltaMixer(nn.Module):
    def __init__(self, options: Delta.Options):
        super().__init__()
        self.options, size, heads = options, options.size, options.heads
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (3 * size + 1), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.shapes = ((heads, size, size),)

    def forward(self, h: Tensor, done: Tensor, state: State, measures: Measures | None = None) -> tuple[Tensor, State]:
        o, feature = self.options, FEATURES[self.options.features]
        made = into_heads(self.slow(self.norm(h)), o.heads)
        read, memory = delta_step(made, done, state[0], feature, o, measures)
        return self.project(out_of_heads(read)), (memory,)


def delta_step(
    made: Tensor,
    done: Tensor,
    memory: Tensor,
    feature: Callable[[Tensor], Tensor],
    o: Recurrence,
    measures: Measures | None,
) -> tuple[Tensor, Tensor]:
    """Query, key, value and rate side by side, [B,H,T,3E+1], through the delta rule."""
    q, k, v, rate = made.split((o.size, o.size, o.size, 1), dim=-1)
    beta = rate.sigmoid()
    read, memory = delta_seq(feature(q), feature(k), v, beta, done, memory, **o.how(v))
    measure(measures, "delta", (memory,), beta)
    return read, memory


# --- self-referential weight matrices ---


class SelfReferential(nn.Module):
    """Base weights of a matrix that changes itself, for each head: columns for its output, query, key and rates.

    The state is how far each has moved from its base."""

    def __init__(self, size: int, heads: int, outputs: int, rate: float):
        super().__init__()
        widths = (outputs, size, size, RATES)
        self.base = nn.ParameterList(torch.randn(heads, size, width) * size**-0.5 for width in widths)
        with torch.no_grad():
            self.base[3].add_(rate)
        self.shapes = tuple((heads, size, width) for width in widths)

    def forward(
        self, x: Tensor, done: Tensor, shift: State, o: Recurrence, measures: Measures | None
    ) -> tuple[Tensor, State]:
        """x [B,H,T,E] -> [B,H,T,outputs]"""
        base = (self.base[0], self.base[1], self.base[2], self.base[3])
        y, shift = srwm_seq(x, done, base, shift, **o.how(x))
        if measures is not None:  # the rates at which the last input would be written next
            scores = torch.einsum("bhe,bhez->bhz", x[:, :, -1].to(base[3].dtype), base[3] + shift[3])
            measure(measures, "shift", shift, scores.sigmoid())
        return y, shift


@dataclass(frozen=True)
class SelfReferentialOptions(Recurrence):
    softmax: bool = option(True, "what a head sees is a softmax of its numbers")
    norm: bool = option(False, "normalise the layer's input first")
    rate: float = option(0.0, "mean of the first weights that make the rates")


class SRWM(FastWeights):
    """A self-referential weight matrix: it makes its own keys, queries and rates, and rewrites itself with them."""

    Options = SelfReferentialOptions

    def __init__(self, input_size: int, options: SelfReferentialOptions = SelfReferentialOptions()):
        super().__init__(input_size, options, [SRWMMixer(options) for _ in range(options.layers)])


class SRWMMixer(nn.Module):
    def __init__(self, options: SelfReferentialOptions):
        super().__init__()
        self.options = options
        self.norm = nn.LayerNorm(options.hidden) if options.norm else nn.Identity()
        self.matrix = SelfReferential(options.size, options.heads, options.size, options.rate)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)
        self.shapes = self.matrix.shapes

    def forward(self, h: Tensor, done: Tensor, state: State, measures: Measures | None = None) -> tuple[Tensor, State]:
        y, state = self.matrix(seen(self.norm(h), self.options), done, state, self.options, measures)
        return self.project(out_of_heads(y)), state


def seen(h: Tensor, o: SelfReferentialOptions) -> Tensor:
    """What the heads see of a layer's input, [B,H,T,E]."""
    x = into_heads(h, o.heads)
    return x.softmax(-1) if o.softmax else x


class SRDelta(FastWeights):
    """DeltaNet, whose slow weights are a self-referential matrix."""

    Options = SelfReferentialOptions

    def __init__(self, input_size: int, options: SelfReferentialOptions = SelfReferentialOptions()):
        super().__init__(input_size, options, [SRDeltaMixer(options) for _ in range(options.layers)])


class SRDeltaMixer(nn.Module):
    def __init__(self, options: SelfReferentialOptions):
        super().__init__()
        self.options, size, heads = options, options.size, options.heads
        self.norm = nn.LayerNorm(options.hidden) if options.norm else nn.Identity()
        self.matrix = SelfReferential(size, heads, 3 * size + 1, options.rate)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)
        self.shapes = (*self.matrix.shapes, (heads, size, size))

    def forward(self, h: Tensor, done: Tensor, state: State, measures: Measures | None = None) -> tuple[Tensor, State]:
        *shift, memory = state
        made, moved = self.matrix(seen(self.norm(h), self.options), done, tuple(shift), self.options, measures)
        read, memory = delta_step(made, done, memory, FEATURES["softmax"], self.options, measures)
        return self.project(out_of_heads(read)), (*moved, memory)


class FakeSR(FastWeights):
    """SRWM without its self: a fixed matrix a head, and nothing remembered. Its input is not a softmax, as published."""

    @dataclass(frozen=True)
    class Options(Sizes):
        softmax: bool = option(False, "what a head sees is a softmax of its numbers")

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [FakeMixer(options) for _ in range(options.layers)])


class FakeMixer(nn.Module):
    shapes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, options: FakeSR.Options):
        super().__init__()
        self.options, size = options, options.size
        self.weight = nn.Parameter(torch.randn(options.heads, size, size) * size**-0.5)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)

    def forward(self, h: Tensor, done: Tensor, state: State, measures: Measures | None = None) -> tuple[Tensor, State]:
        x = h.unflatten(-1, (self.options.heads, -1))  # [T,B,H,E]
        x = x.softmax(-1) if self.options.softmax else x
        return self.project(torch.einsum("tbhe,hem->tbhm", x, self.weight).flatten(-2)), ()


class SRWMNoCarry(nn.Module):
    """SRWM that begins anew with every unroll: what it learns of an episode does not outlive `span` steps."""

    @dataclass(frozen=True)
    class Options(SelfReferentialOptions):
        span: int | None = option(None, "steps after which it begins anew (none: those of an unroll)", low=1)

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__()
        self.span = options.span or 20
        self.inner = SRWM(input_size, options)
        self.output_size = self.inner.output_size

    def initial_state(self, batch_size: int) -> State:
        """The matrices', and how many steps ago the unroll began."""
        age = torch.zeros(batch_size, dtype=torch.int64, device=self.inner.input.weight.device)
        return *self.inner.initial_state(batch_size), age

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        *inner, age = state
        y, after = self.inner(x, done | self._begins(x, age), tuple(inner))
        return y, (*after, (age + len(x)) % self.span)

    def watch(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        *inner, age = state
        y, after, measures = self.inner.watch(x, done | self._begins(x, age), tuple(inner))
        return y, (*after, (age + len(x)) % self.span), measures

    def _begins(self, x: Tensor, age: Tensor) -> Tensor:
        """[T,B]: the entries that an unroll begins with. An actor's rollout begins there, and so does a learner's."""
        return (age + torch.arange(len(x), device=age.device).unsqueeze(1)) % self.span == 0
