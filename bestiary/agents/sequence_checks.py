"""Check that a memory or agent computes the same results in one call with T steps and in T calls with one step.

The actor calls an agent with T = 1, the learner calls it with a whole rollout. If the results of the two kinds of calls
differ, the learner computes other action probabilities than the actor that chose the actions. If a run uses components
from a user's own files, `Config.make_agent` therefore compares the two kinds of calls before training starts.
`bestiary.testing` uses the functions of this module for further checks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Output
from bestiary.agents.distributions import Categorical
from bestiary.agents.memories.base import State
from bestiary.rollout import ArraySpec, Inputs, ObservationSpec, Tensors

# Two tensors count as equal if they differ by at most RELATIVE_TOLERANCE times the largest absolute value of the first
# tensor, plus ABSOLUTE_TOLERANCE. Rounding errors are about 1e-6 of the largest value.
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-6

# Type of a function that calls a memory or an agent: (inputs [T,B], state) -> (outputs [T,B,...] by name, new state).
Call = Callable[[Inputs, State], tuple[Tensors, State]]


def call_agent(agent: Any) -> Call:
    """Return a function that calls an agent and returns (its logits and values by name, its new state)."""

    def call(inputs: Inputs, state: State) -> tuple[Tensors, State]:
        output, state = _pair(agent(inputs, state), "(Output, state)")
        if not isinstance(output, Output):
            raise TypeError(f"forward returned a {type(output).__name__}; expected bestiary.agents.agent.Output")
        if not isinstance(output.distribution, Categorical):
            kind = type(output.distribution)
            raise TypeError(
                f"forward returned an Output whose distribution is a {kind.__module__}.{kind.__name__}; expected "
                "bestiary.agents.distributions.Categorical(logits)"
            )
        return {"logits": output.distribution.logits, "value": output.value}, state

    return call


def call_memory(memory: Any) -> Call:
    """Return a function that calls a memory and returns ({"output": its outputs}, its new state).

    The input of the memory is the observation `vector`.
    """

    def call(inputs: Inputs, state: State) -> tuple[Tensors, State]:
        output, state = _pair(memory(inputs.observation["vector"], inputs.done, state), "(output, state)")
        return {"output": output}, state

    return call


def _pair(result: Any, expected: str) -> Any:
    if not isinstance(result, tuple) or len(result) != 2:
        found = f"{len(result)} values" if isinstance(result, tuple) else f"one {type(result).__name__}"
        raise TypeError(f"forward returned {found}; expected {expected}")
    return result


def random_inputs(
    observation: ObservationSpec, num_actions: int, num_tasks: int, length: int, batch: int, seed: int = 0
) -> Inputs:
    """Return random inputs [T,B] in which no episode starts: `done` is False everywhere."""
    generator = torch.Generator().manual_seed(seed)

    def draw(spec: ArraySpec) -> Tensor:
        shape = (length, batch, *spec.shape)
        if spec.dtype == "uint8":
            return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return torch.randn(shape, generator=generator).to(getattr(torch, spec.dtype))

    return Inputs(
        observation={kind: draw(spec) for kind, spec in observation.items()},
        reward=torch.randn(length, batch, generator=generator),
        done=torch.zeros(length, batch, dtype=torch.bool),
        last_action=torch.randint(num_actions, (length, batch), generator=generator),
        task=torch.randint(num_tasks, (length, batch), generator=generator),
    )


def with_resets(inputs: Inputs, *resets: tuple[int, int]) -> Inputs:
    """Return a copy of the inputs [T,B] in which `done` is True at each pair (time index, batch row) of `resets`."""
    done = inputs.done.clone()
    for entry, row in resets:
        done[entry, row] = True
    return replace(inputs, done=done)


def select_rows(inputs: Inputs, rows: Sequence[int]) -> Inputs:
    """Return the inputs [T,len(rows)] of the environments whose batch indices are `rows`."""
    observation = {kind: x[:, rows] for kind, x in inputs.observation.items()}
    others = (inputs.reward, inputs.done, inputs.last_action, inputs.task)
    return Inputs(observation, *(x[:, rows] for x in others))


@dataclass(frozen=True)
class Difference:
    """The difference between two tensors that should be equal.

    `str(difference)` is the end of a message, for example "two calls differ" + " by 0.1 in logits (largest value 2)".
    """

    name: str  # name of the output or of the state tensor
    size: float  # largest absolute difference; infinite if the shapes differ
    scale: float = 0.0  # largest absolute value of the expected tensor
    shapes: str = ""  # the two shapes, if they differ

    def __str__(self) -> str:
        if self.shapes:
            return f"in the shape of {self.name}, {self.shapes}"
        return f"by {self.size:.3g} in {self.name} (largest value {self.scale:.3g})"


def find_difference(expected: Tensors, found: Tensors) -> Difference | None:
    """Compare tensors by name. Return the largest difference, or None if all are equal except for rounding.

    The difference between tensors of different shapes is infinite. An entry that is infinite or NaN in both tensors
    counts as equal.
    """
    differences = []
    for name, tensor in expected.items():
        other = found[name]
        if tensor.shape != other.shape:
            return Difference(name, float("inf"), shapes=f"{list(tensor.shape)} and {list(other.shape)}")
        if not tensor.numel():
            continue
        a, b = tensor.detach().double(), other.detach().double()
        a_finite, b_finite = a.isfinite(), b.isfinite()
        difference = torch.where(a_finite & b_finite, a - b, torch.where(a_finite == b_finite, 0.0, float("inf")))
        scale = float(torch.where(a_finite, a, 0.0).abs().max())
        size = float(difference.abs().max())
        if size > RELATIVE_TOLERANCE * scale + ABSOLUTE_TOLERANCE:
            differences.append(Difference(name, size, scale))
    return max(differences, key=lambda difference: difference.size, default=None)


def named_state(state: State, floating_only: bool = False) -> Tensors:
    """Return the tensors of a state by name: `state[0]`, `state[1]`, ...

    If `floating_only` is True, leave out integer tensors, for example step counters.
    """
    return {f"state[{i}]": s for i, s in enumerate(state) if s.is_floating_point() or not floating_only}


def state_problems(state: Any, batch: int, what: str, like: State | None = None) -> list[str]:
    """Return a message for each problem of a recurrent state.

    The state must be a flat tuple of tensors with `batch` rows. If another state `like` is given, the tensors of both
    states must have the same shapes and types. If `like` is None, the tensors must not require a gradient. `what` is
    the name of `state` in the messages.
    """
    if not isinstance(state, tuple):
        return [f"{what} is a {type(state).__name__}; expected a flat tuple of tensors, which may be empty"]
    problems = []
    for index, tensor in enumerate(state):
        if not isinstance(tensor, Tensor):
            problems.append(f"{what}[{index}] is a {type(tensor).__name__}; expected a flat tuple of tensors")
        elif tensor.shape[:1] != (batch,):
            problems.append(f"{what}[{index}] has shape {list(tensor.shape)}; expected the batch axis, {batch}, first")
        elif like is None and tensor.requires_grad:
            problems.append(f"{what}[{index}] requires a gradient; return a detached tensor")
    if problems or like is None:
        return problems
    if len(state) != len(like):
        return [f"{what} has {len(state)} tensors, initial_state({batch}) has {len(like)}; the numbers must be equal"]
    for index, (tensor, first) in enumerate(zip(state, like, strict=True)):
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            problems.append(
                f"{what}[{index}] is {tensor.dtype}{list(tensor.shape)}, initial_state({batch})[{index}] is "
                f"{first.dtype}{list(first.shape)}; the types and shapes must be equal"
            )
    return problems


@torch.no_grad()
def run_sequence(call: Call, inputs: Inputs, state: State) -> Tensors:
    """Call the module once with all T steps. Return its outputs and its final state, by name."""
    outputs, state = call(inputs, state)
    return {**outputs, **named_state(state)}


@torch.no_grad()
def run_single_steps(call: Call, inputs: Inputs, state: State) -> Tensors:
    """Call the module T times with one step each. Return the concatenated outputs and the final state, by name."""
    steps = []
    for t in range(len(inputs.done)):
        outputs, state = call(inputs[t : t + 1], state)
        steps.append(outputs)
    return {**{name: torch.cat([step[name] for step in steps]) for name in steps[0]}, **named_state(state)}


@dataclass(frozen=True)
class SequenceMismatch:
    """A difference between two computations that should give the same results.

    The two computations are either one call with T steps and T calls with one step, or two calls with the same inputs.
    """

    layer: str | None  # path of the first layer whose outputs differ, "" for the module itself; None: unknown
    text: str  # error message without the name of the component


def compare_repeated_calls(module: nn.Module, call: Call, inputs: Inputs, state: State) -> SequenceMismatch | None:
    """Call a module twice with the same inputs and compare the results. Return None if they are equal.

    The states of torch's random generator and of the module's buffers are restored afterwards.
    """
    state_before = tuple(tensor.clone() for tensor in state)
    with unchanged(module):
        expected = run_sequence(call, inputs, state)
    for index, (tensor, before) in enumerate(zip(state, state_before, strict=True)):
        if not torch.equal(tensor, before):
            return SequenceMismatch(
                None,
                f"forward changes the tensor {index} of the recurrent state in place; use operations that return a new "
                "tensor, for example state = state * mask instead of state *= mask",
            )
    with unchanged(module):
        torch.rand(1)  # advance the random generator, so that dropout draws other numbers than in the first call
        found = run_sequence(call, inputs, state)
    difference = find_difference(expected, found)
    if difference is None:
        return None
    layer = _first_different_layer(module, call, [inputs], [inputs], state)
    return SequenceMismatch(
        layer,
        f"two calls with the same inputs differ {difference}{_in_layer(module, layer)}; outputs must not be random, "
        "because the learner computes them again (remove dropout or noise, do not change the inputs or the state in "
        "place, and keep no state in attributes)",
    )


def compare_single_steps(module: nn.Module, call: Call, inputs: Inputs, state: State) -> SequenceMismatch | None:
    """Call a module once with T steps, and then T times with one step. Return None if the results are equal.

    To find all mistakes, use `inputs` in which episodes also start after the first step, and a `state` that differs
    from the initial state. The states of torch's random generator and of the module's buffers are restored afterwards.
    """
    length = len(inputs.done)
    with unchanged(module):
        expected = run_sequence(call, inputs, state)
    with unchanged(module):
        found = run_single_steps(call, inputs, state)
    difference = find_difference(expected, found)
    if difference is None:
        return None
    layer = _first_different_layer(module, call, [inputs], [inputs[t : t + 1] for t in range(length)], state)
    advice = "let the outputs of a step depend only on the inputs of this step and row, not on other steps or rows"
    if state:
        advice = (
            "reset the state of row b before step t if done[t,b] is set, and let the outputs of a step depend only on "
            "the inputs of this step and the state of the same row"
        )
    return SequenceMismatch(
        layer,
        f"one call with T={length} steps differs from {length} calls with T=1 {difference}{_in_layer(module, layer)}; "
        f"{advice}",
    )


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Return a context that, at its end, restores torch's random generator and the buffers of a module.

    Buffers are, for example, the running statistics of batch normalisation.
    """
    owners = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    saved = [(owner, name, buffer, buffer.clone()) for owner, name, buffer in owners if buffer is not None]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, values in saved:
                    owner._buffers[name] = buffer.copy_(values)


def _in_layer(module: nn.Module, layer: str | None) -> str:
    """Return the part of a message that names the layer whose outputs differ.

    Return an empty text if the layer is unknown (None) or is the module itself ("").
    """
    if not layer:
        return ""
    return f", first in layer {layer} ({type(module.get_submodule(layer)).__name__})"


def _first_different_layer(
    module: nn.Module, call: Call, first: list[Inputs], second: list[Inputs], state: State
) -> str | None:
    """Return the path of the first layer that has different outputs for equal inputs, or None if none is found.

    `first` and `second` contain the same inputs [T,B], divided into pieces along the time axis in two different ways.
    The module is called once for each piece. Then the outputs of a layer in all calls are concatenated along their
    first axis, which is time, or time merged with the batch. The results must be equal for `first` and `second`.
    """
    with unchanged(module), _recorded_layers(module) as expected:
        _run_calls(call, first, state)
    with unchanged(module), _recorded_layers(module) as found:
        torch.rand(1)
        _run_calls(call, second, state)
    for layer, (inputs, outputs) in expected.items():
        other_inputs, other_outputs = found.get(layer, ([], []))
        if _equal(inputs, other_inputs) and _equal(outputs, other_outputs) is False:
            return layer
    return None


def _equal(first: list[Tensor], second: list[Tensor]) -> bool | None:
    """Concatenate each list of tensors along the first axis. Return True if the two results are equal.

    Return None if the tensors cannot be compared, because their shapes differ or a list is empty.
    """
    if not first or not second or len({tensor.shape[1:] for tensor in [*first, *second]}) > 1:
        return None
    a, b = torch.cat(first), torch.cat(second)
    return find_difference({"": a}, {"": b}) is None if a.shape == b.shape else None


@torch.no_grad()
def _run_calls(call: Call, pieces: Iterable[Inputs], state: State) -> None:
    for piece in pieces:
        _, state = call(piece, state)


@contextmanager
def _recorded_layers(module: nn.Module) -> Iterator[dict[str, tuple[list[Tensor], list[Tensor]]]]:
    """Record the first input tensor and the first output tensor of each call of each layer.

    Return a context that yields {path of the layer: (inputs, outputs)}. The layers are sorted by the time when their
    first call ends.
    """
    records: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def make_hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> None:
            given, returned = _first_tensor(inputs), _first_tensor(output)
            if given is not None and returned is not None and given.dim() and returned.dim():
                record = records.setdefault(name, ([], []))
                record[0].append(given.detach().clone())
                record[1].append(returned.detach().clone())

        return hook

    handles = [layer.register_forward_hook(make_hook(name)) for name, layer in module.named_modules()]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(value: Any) -> Tensor | None:
    """Return the first tensor in a tensor, tuple, list or dict, which may be nested, or None if there is no tensor."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
