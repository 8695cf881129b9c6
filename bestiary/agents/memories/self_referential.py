"""Memories with self-referential weight matrices (SRWM, Irie et al. 2022).

A self-referential matrix is a weight matrix that computes its own updates. Its columns form four blocks. The input is
multiplied by each block. The first product is the output of the layer. The other three products give the query, the
key and the four learning rates (betas), one for the update of each block.

Letters of shapes: H heads, E features per head.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults
from bestiary.agents.memories.base import State
from bestiary.agents.memories.delta_net import FEATURE_MAPS, apply_delta_rule
from bestiary.agents.memories.fast_weights import (
    FastWeightMemory,
    FastWeightOptions,
    LayerMetrics,
    RecurrenceOptions,
    merge_heads,
    record_metrics,
    split_heads,
)
from bestiary.agents.run_context import RunContext
from bestiary.kernels import srwm_seq
from bestiary.utils.options import option

NUM_BETAS = 4  # number of learning rates: one for each block of columns (output, query, key, learning rates)


@dataclass(frozen=True)
class SelfReferentialOptions(RecurrenceOptions):
    """Options of memories with self-referential matrices (see the docstring of this module)."""

    softmax: bool = option(True, "apply a softmax to the inputs of each head")
    norm: bool = option(False, "apply layer norm to the inputs of each layer")
    beta_init: float = option(0.0, "mean of the initial weights that compute the learning rates")


class SelfReferentialMatrix(nn.Module):
    """One self-referential matrix per head.

    The columns of a matrix form four blocks: output, query, key and learning rates (betas). The parameters `base` are
    the weights at the start of an episode. The state (`shift`) has one tensor [B,H,E,columns] per block: the current
    weights minus `base`.
    """

    def __init__(self, size: int, heads: int, outputs: int, beta_init: float):
        super().__init__()
        widths = (outputs, size, size, NUM_BETAS)
        self.base = nn.ParameterList(torch.randn(heads, size, width) * size**-0.5 for width in widths)
        with torch.no_grad():
            self.base[3].add_(beta_init)
        self.state_shapes = tuple((heads, size, width) for width in widths)

    def forward(
        self, x: Tensor, done: Tensor, shift: State, options: RecurrenceOptions, metrics: LayerMetrics | None
    ) -> tuple[Tensor, State]:
        """Process x [B,H,T,E]: B batch entries, H heads, T steps, E features per head.

        `shift` is the state before the first step. Return the outputs [B,H,T,outputs] and the state after the last
        step.
        """
        base = (self.base[0], self.base[1], self.base[2], self.base[3])
        y, shift = srwm_seq(x, done, base, shift, **options.kernel_arguments(x))
        if metrics is not None:
            # Record the learning rates that the final weights compute from the last input.
            logits = torch.einsum("bhe,bhez->bhz", x[:, :, -1].to(base[3].dtype), base[3] + shift[3])
            record_metrics(metrics, "shift", shift, logits.sigmoid())
        return y, shift


def head_inputs(h: Tensor, options: SelfReferentialOptions) -> Tensor:
    """Return the inputs of the heads [B,H,T,E], given the input h [T,B,hidden] of a layer."""
    x = split_heads(h, options.heads)
    return x.softmax(-1) if options.softmax else x


class SRWM(FastWeightMemory):
    """Memory of self-referential matrices. Each matrix computes the key, query and learning rates of its own update."""

    Options = SelfReferentialOptions

    def __init__(self, input_size: int, options: SelfReferentialOptions = SelfReferentialOptions()):
        super().__init__(input_size, options, [SRWMMixer(options) for _ in range(options.layers)])


class SRWMMixer(nn.Module):
    """The recurrent part of one layer of SRWM: a self-referential matrix per head, then a linear layer."""

    def __init__(self, options: SelfReferentialOptions):
        super().__init__()
        self.options = options
        self.norm = nn.LayerNorm(options.hidden) if options.norm else nn.Identity()
        self.matrix = SelfReferentialMatrix(options.size, options.heads, options.size, options.beta_init)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)
        self.state_shapes = self.matrix.state_shapes

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        x = head_inputs(self.norm(h), self.options)
        y, state = self.matrix(x, done, state, self.options, metrics)
        return self.project(merge_heads(y)), state


class SRDelta(FastWeightMemory):
    """DeltaNet in which a self-referential matrix computes keys, values, queries and learning rates.

    In DeltaNet itself, a linear layer (the slow weights) computes them.
    """

    Options = SelfReferentialOptions

    def __init__(self, input_size: int, options: SelfReferentialOptions = SelfReferentialOptions()):
        super().__init__(input_size, options, [SRDeltaMixer(options) for _ in range(options.layers)])


class SRDeltaMixer(nn.Module):
    """The recurrent part of one layer of SRDelta.

    Its state is the state of the self-referential matrix, followed by the fast weights of the delta rule.
    """

    def __init__(self, options: SelfReferentialOptions):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden) if options.norm else nn.Identity()
        self.matrix = SelfReferentialMatrix(size, heads, 3 * size + 1, options.beta_init)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)
        self.state_shapes = (*self.matrix.state_shapes, (heads, size, size))

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        *shift, weights = state
        x = head_inputs(self.norm(h), self.options)
        qkvb, new_shift = self.matrix(x, done, tuple(shift), self.options, metrics)
        y, weights = apply_delta_rule(qkvb, done, weights, FEATURE_MAPS["softmax"], self.options, metrics)
        return self.project(merge_heads(y)), (*new_shift, weights)


class FakeSR(FastWeightMemory):
    """Control experiment for SRWM: the matrix of each head does not change during an episode, so there is no memory.

    By default, no softmax is applied to the inputs of the heads, as in the code of Irie et al. (2022).
    """

    @dataclass(frozen=True)
    class Options(FastWeightOptions):
        softmax: bool = option(False, "apply a softmax to the inputs of each head")

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__(input_size, options, [FakeSRMixer(options) for _ in range(options.layers)])


class FakeSRMixer(nn.Module):
    """The mixer of one layer of FakeSR: a constant matrix per head, so there is no state."""

    state_shapes: tuple[tuple[int, ...], ...] = ()

    def __init__(self, options: FakeSR.Options):
        super().__init__()
        size = options.size
        self.options = options
        self.weight = nn.Parameter(torch.randn(options.heads, size, size) * size**-0.5)
        self.project = nn.Linear(options.hidden, options.hidden, bias=False)

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        x = h.unflatten(-1, (self.options.heads, -1))  # [T,B,H,E]
        x = x.softmax(-1) if self.options.softmax else x
        return self.project(torch.einsum("tbhe,hem->tbhm", x, self.weight).flatten(-2)), ()


class SRWMNoCarry(nn.Module, MemoryDefaults):
    """SRWM whose state is reset every `reset_interval` steps, by default at the start of each training sequence.

    The state consists of the tensors of the SRWM's state, followed by a step counter, int64 [B]. The counter starts at
    0 and returns to 0 every `reset_interval` steps.

    If the user does not set `reset_interval`, `derive_options` sets it to the length of the rollouts that actors
    collect (for PPO, the option `sequence_length`). If `derive_options` is not called, `reset_interval` is 20.
    """

    @dataclass(frozen=True)
    class Options(SelfReferentialOptions):
        reset_interval: int | None = option(
            None,
            "number of steps between two resets of the state (default: rollout length; PPO: sequence length)",
            low=1,
        )

    @classmethod
    def derive_options(cls, options: Options, context: RunContext) -> Options:
        """Return the options. If the user did not set `reset_interval`, set it to the length of training sequences.

        This is the rollout length, or for PPO the option `sequence_length`.
        """
        return replace(options, reset_interval=options.reset_interval or context.sequence_length)

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__()
        self.reset_interval = options.reset_interval or 20
        self.inner = SRWM(input_size, options)
        self.output_size = self.inner.output_size

    def initial_state(self, batch_size: int) -> State:
        age = torch.zeros(batch_size, dtype=torch.int64, device=self.inner.input.weight.device)
        return *self.inner.initial_state(batch_size), age

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        *inner, age = state
        y, after = self.inner(x, done | self._resets(x, age), tuple(inner))
        return y, (*after, (age + len(x)) % self.reset_interval)

    def forward_with_metrics(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State, dict[str, Tensor]]:
        *inner, age = state
        y, after, metrics = self.inner.forward_with_metrics(x, done | self._resets(x, age), tuple(inner))
        return y, (*after, (age + len(x)) % self.reset_interval), metrics

    def _resets(self, x: Tensor, age: Tensor) -> Tensor:
        """Return a bool [T,B]: entry [t,b] is True if the state of batch row b must be reset before step t.

        `age` [B] is a step counter, modulo `reset_interval`. It is part of the recurrent state, so actor and learner
        compute the same resets.
        """
        return (age + torch.arange(len(x), device=age.device).unsqueeze(1)) % self.reset_interval == 0
