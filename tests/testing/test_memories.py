"""check_memory: built-in memories pass, and each kind of mistake gets its own line."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.memories import MEMORIES
from bestiary.agents.run_context import RunContext
from bestiary.testing import check_memory
from bestiary.utils.options import option
from tests.testing.helpers import assert_one_problem, find_problems

State = tuple[Tensor, ...]


@pytest.mark.parametrize("name", MEMORIES)
def test_builtin_memories_pass(name: str) -> None:
    check_memory(name)


class Sum(nn.Module):
    """A correct memory: the running sum of a linear layer. The tests below break it in one place each."""

    def __init__(self, input_size: int, *, size: int = 4):
        super().__init__()
        self.layer = nn.Linear(input_size, size)
        self.output_size = size

    def initial_state(self, batch_size: int) -> Any:
        return (self.layer.weight.new_zeros(batch_size, self.output_size),)

    def reset(self, total: Tensor, done: Tensor) -> Tensor:
        return torch.where(done[:, None], 0.0, total)

    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        (total,) = state
        outputs = []
        for x_t, done_t in zip(self.layer(x), done, strict=True):
            total = self.reset(total, done_t) + x_t
            outputs.append(total)
        return torch.stack(outputs), (total,)


def test_correct_memory_passes_as_a_class_and_with_options() -> None:
    check_memory(Sum)
    check_memory(Sum, 3, size=7)
    check_memory("lstm", hidden=8, layers=2)


class DerivedSize(Sum):
    """A correct memory whose size, if it is not given, depends on the rollout length and the number of actions."""

    @dataclass(frozen=True)
    class Options:
        size: int | None = option(None, "number of outputs")

    @classmethod
    def derive_options(cls, options: Options, context: RunContext) -> Options:
        return replace(options, size=options.size or context.sequence_length + context.interface.action_spec.n)

    def __init__(self, input_size: int, options: Options):
        assert options.size is not None
        super().__init__(input_size, size=options.size)


def test_options_that_depend_on_the_run_are_derived() -> None:
    check_memory(DerivedSize)
    check_memory(DerivedSize, size=3)


class LstmWithoutResetInTheMiddle(nn.Module):
    def __init__(self, input_size: int):
        super().__init__()
        self.core = nn.LSTM(input_size, 6)
        self.output_size = 6

    def initial_state(self, batch_size: int) -> State:
        zeros = next(self.core.parameters()).new_zeros(batch_size, 6)
        return zeros, zeros

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = (torch.where(done[0, :, None], 0.0, s)[None] for s in state)  # correct only for T = 1
        output, (h, c) = self.core(x, (h, c))
        return output, (h[0], c[0])


def test_missing_reset_inside_a_sequence_names_the_layer_and_the_difference() -> None:
    problems = find_problems(check_memory, LstmWithoutResetInTheMiddle)
    assert_one_problem(problems, "T=5 steps differs from 5 calls with T=1 by 0.", "layer core (LSTM)", "done[t,b]")


class IgnoresDone(Sum):
    def reset(self, total: Tensor, done: Tensor) -> Tensor:
        return total


class ResetsAllRows(Sum):
    def reset(self, total: Tensor, done: Tensor) -> Tensor:
        return torch.zeros_like(total) if done.any() else total


class ResetsToOnes(Sum):
    def reset(self, total: Tensor, done: Tensor) -> Tensor:
        return torch.where(done[:, None], 1.0, total)


class MixesRows(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        return super().forward(x - x.mean(1, keepdim=True), done, state)


class Dropout(Sum):
    def __init__(self, input_size: int):
        super().__init__(input_size)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        return super().forward(self.dropout(x), done, state)


class Detached(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        output, state = super().forward(x, done, state)
        return output.detach(), state


class UnusedParameter(Sum):
    def __init__(self, input_size: int):
        super().__init__(input_size)
        self.forgotten = nn.Parameter(torch.zeros(3))


class WritesIntoItsState(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        output, (total,) = super().forward(x, done, state)
        state[0].copy_(total.detach())
        return output, (total,)


class Infinite(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        output, state = super().forward(x, done, state)
        return output / 0.0, state


class BatchSecond(Sum):
    def initial_state(self, batch_size: int) -> Any:
        return (super().initial_state(batch_size)[0][None],)


class OnlyOnCpu(Sum):
    def initial_state(self, batch_size: int) -> Any:
        return (torch.zeros(batch_size, self.output_size),)


class NestedState(Sum):
    def initial_state(self, batch_size: int) -> Any:
        return (super().initial_state(batch_size),)


class ListState(Sum):
    def initial_state(self, batch_size: int) -> Any:
        return list(super().initial_state(batch_size))


class LearnedState(Sum):
    def initial_state(self, batch_size: int) -> Any:
        return (self.layer.bias.expand(batch_size, -1),)


class OtherStateShape(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        output, (total,) = super().forward(x, done, state)
        return output, (total, total)


class WrongOutputSize(Sum):
    def __init__(self, input_size: int):
        super().__init__(input_size)
        self.output_size = 5

    def initial_state(self, batch_size: int) -> Any:
        return (self.layer.weight.new_zeros(batch_size, 4),)


class NoOutputSize(Sum):
    def __init__(self, input_size: int):
        super().__init__(input_size)
        del self.output_size


class OnlyOutput(Sum):
    def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
        return super().forward(x, done, state)[0]


class OtherMetrics(Sum):
    def forward_with_metrics(self, x: Tensor, done: Tensor, state: State) -> Any:
        output, state = self(x, done, state)
        return output + 1, state, {"norm": output.abs()}


WRONG_MEMORIES: list[tuple[type, list[tuple[str, ...]]]] = [
    (IgnoresDone, [("after a reset", "depend on the old state", "differ by")]),
    (
        ResetsAllRows,
        [("row 0 of a batch of 3 differs from the same row alone by",)],
    ),
    (ResetsToOnes, [("a reset does not equal initial_state(3)", "differ by 1 in")]),
    (MixesRows, [("row 0 of a batch of 3 differs from the same row alone by",)]),
    (Dropout, [("two calls with the same inputs differ by", "layer dropout (Dropout)", "random")]),
    (Detached, [("output has no gradient", "detach")]),
    (UnusedParameter, [("parameter forgotten gets no gradient",)]),
    (WritesIntoItsState, [("forward changes the tensor state[0]",)]),
    (Infinite, [("60 of 60 entries of output are not finite",)]),
    (BatchSecond, [("initial_state(3)[0] has shape [1, 3, 4]", "batch axis, 3, first")]),
    (OnlyOnCpu, [("initial_state does not follow the device", "GPU", "new_zeros")]),
    (NestedState, [("initial_state(1)[0] is a tuple", "flat tuple")]),
    (ListState, [("initial_state(1) is a list", "flat tuple")]),
    (LearnedState, [("initial_state(1)[0] requires a gradient", "detached")]),
    (OtherStateShape, [("forward returns has 2 tensors", "initial_state(3) has 1")]),
    (WrongOutputSize, [("forward returned shape [5, 3, 4]", "[5, 3, 5]")]),
    (NoOutputSize, [("output_size is None", "constructor must set")]),
    (OnlyOutput, [("forward returned one Tensor", "(output, state)")]),
    (
        OtherMetrics,
        [
            ("forward_with_metrics differs from forward by 1 in output",),
            ("metric norm is a tensor [5, 3, 4]", "scalar"),
        ],
    ),
]


@pytest.mark.parametrize(("memory", "expected"), WRONG_MEMORIES, ids=[memory.__name__ for memory, _ in WRONG_MEMORIES])
def test_each_mistake_in_a_memory_has_its_line(memory: type, expected: list[tuple[str, ...]]) -> None:
    problems = find_problems(check_memory, memory)
    assert all(problem.startswith(f"{memory.__name__}: ") for problem in problems)
    assert len(problems) == len(expected)
    for problem, facts in zip(problems, expected, strict=True):
        for fact in facts:
            assert fact in problem


def test_all_problems_are_reported_together() -> None:
    class Several(IgnoresDone):
        def __init__(self, input_size: int):
            super().__init__(input_size)
            self.forgotten = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor, done: Tensor, state: State) -> Any:
            return super().forward(x - x.mean(1, keepdim=True), done, state)

    assert len(find_problems(check_memory, Several)) == 3
