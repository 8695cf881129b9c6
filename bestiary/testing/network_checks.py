"""Check memories, torsos and agents. A torso is treated as a memory with an empty state."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Output
from bestiary.agents.distributions import Categorical
from bestiary.agents.memories.base import State
from bestiary.agents.sequence_checks import (
    Call,
    compare_repeated_calls,
    compare_single_steps,
    find_difference,
    named_state,
    random_inputs,
    run_sequence,
    select_rows,
    state_problems,
    unchanged,
    with_resets,
)
from bestiary.envs.vector_env import EnvInterface
from bestiary.rollout import Inputs, Tensors
from bestiary.testing.problem_report import Report

T, B = 5, 3  # length and batch size of the inputs
# (time step, row) of each `done`. Row 0 has no reset, row 1 has a reset at time step 2, row 2 has resets at 0 and 3.
RESETS = ((0, 2), (2, 1), (3, 2))


@dataclass(frozen=True)
class Subject:
    """The network that is checked, and the function that calls it."""

    report: Report
    module: nn.Module
    call: Call
    initial_state: Callable[[int], State]  # batch size -> initial recurrent state
    interface: EnvInterface  # observations, actions and tasks of the inputs

    def inputs(self, seed: int = 0) -> Inputs:
        """Return random inputs [T,B] without resets."""
        interface = self.interface
        return random_inputs(interface.observation_spec, interface.action_spec.n, len(interface.tasks), T, B, seed)


def check_recurrent(subject: Subject) -> None:
    """Run the checks that memories, torsos and agents have in common."""
    report = subject.report
    inputs = subject.inputs()
    with report.errors_of("initial_state"):
        states = {batch: subject.initial_state(batch) for batch in (1, B)}
    for batch, state in states.items():
        report.require(*state_problems(state, batch, f"initial_state({batch})"))
    with (
        report.errors_of(f"forward with T={T} steps and B={B} trajectories"),
        unchanged(subject.module),
        torch.no_grad(),
    ):
        outputs, later_state = subject.call(inputs, states[B])
    report.require(*shape_problems(subject, outputs))
    report.require(*state_problems(later_state, B, "the state that forward returns", states[B]))
    # If one of these checks fails, the results of the others would be misleading.
    check_finite(subject, outputs, later_state)
    check_inputs_unchanged(subject, later_state)
    check_repeated_call(subject, later_state)
    report.run(
        lambda: check_single_steps(subject, later_state),
        lambda: check_rows(subject, later_state),
        lambda: check_reset(subject, later_state),
        lambda: check_gradient(subject),
        lambda: check_metrics(subject, later_state),
        lambda: check_copy(subject),
    )


def shape_problems(subject: Subject, outputs: Tensors) -> list[str]:
    """Return a problem if the output of a memory or torso has a wrong shape or type."""
    output = outputs.get("output")
    if "output" not in outputs:
        return []
    if not isinstance(output, Tensor):
        return [f"forward returned a {type(output).__name__} as output; expected a tensor"]
    expected = [T, B, subject.module.output_size]
    if list(output.shape) != expected:
        return [f"forward returned shape {list(output.shape)}; expected [T,B,output_size] = {expected}"]
    if output.dtype != torch.float32:
        return [f"forward returned {output.dtype}; expected torch.float32"]
    return []


def output_problems(result: Any, num_actions: int) -> list[str]:
    """Return a list of problems of `result`, which an agent returned for inputs [T,B]."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Output):
        found = (
            ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else type(result).__name__
        )
        return [f"forward returned ({found}); expected (Output, state) with bestiary.agents.agent.Output"]
    output = result[0]
    problems = []
    if not isinstance(output.distribution, Categorical):
        kind = type(output.distribution)
        problems.append(
            f"Output.distribution is a {kind.__module__}.{kind.__name__}; expected "
            "bestiary.agents.distributions.Categorical(logits)"
        )
    elif list(output.distribution.logits.shape) != [T, B, num_actions]:
        shape = list(output.distribution.logits.shape)
        problems.append(f"the logits have shape {shape}; expected [T,B,A] = {[T, B, num_actions]}")
    if not isinstance(output.value, Tensor) or list(output.value.shape) != [T, B]:
        found = f"shape {list(output.value.shape)}" if isinstance(output.value, Tensor) else type(output.value).__name__
        problems.append(f"Output.value has {found}; expected [T,B] = {[T, B]} (.squeeze(-1) removes a last axis of 1)")
    return problems


def check_finite(subject: Subject, outputs: Tensors, state: State) -> None:
    """Check that all entries of the outputs and of the state are finite."""
    for name, tensor in {**outputs, **named_state(state)}.items():
        if not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            subject.report.require(f"{count} of {tensor.numel()} entries of {name} are not finite for random inputs")


def check_repeated_call(subject: Subject, state: State) -> None:
    """Check that two equal calls give equal results."""
    with subject.report.errors_of("the second call of forward"):
        mismatch = compare_repeated_calls(subject.module, subject.call, subject.inputs(seed=1), state)
    if mismatch is not None:
        subject.report.require(mismatch.text)


def check_single_steps(subject: Subject, state: State) -> None:
    """Check that one call with T steps gives the same result as T calls with one step."""
    inputs = with_resets(subject.inputs(seed=1), *RESETS)
    with subject.report.errors_of(f"forward with T=1 step and B={B} trajectories"):
        mismatch = compare_single_steps(subject.module, subject.call, inputs, state)
    if mismatch is not None:
        subject.report.require(mismatch.text)


def check_rows(subject: Subject, state: State) -> None:
    """Check that each row of a batch gives the same result as a batch that contains only this row."""
    inputs = with_resets(subject.inputs(seed=2), *RESETS)
    with subject.report.errors_of(f"forward with T={T} steps and B=1 trajectory"), unchanged(subject.module):
        together = run_sequence(subject.call, inputs, state)
        for row in range(B):
            alone = run_sequence(subject.call, select_rows(inputs, [row]), tuple(s[[row]] for s in state))
            expected = {name: x[[row]] if name.startswith("state[") else x[:, [row]] for name, x in together.items()}
            if (difference := find_difference(alone, expected)) is not None:
                subject.report.require(
                    f"row {row} of a batch of {B} differs from the same row alone {difference}; the outputs of a "
                    "row must not depend on the other rows (remove batch normalisation, and do not mix rows)"
                )


def check_reset(subject: Subject, state: State) -> None:
    """Check that `done` replaces any recurrent state by the initial state.

    For a memory, also check that `done` has no effect if the state is already the initial state.
    """
    report, initial = subject.report, subject.initial_state(B)
    if not initial:
        return
    inputs = subject.inputs(seed=3)
    reset = with_resets(inputs, *((0, row) for row in range(B)))
    with report.errors_of("forward after a reset"), unchanged(subject.module):
        runs = [
            _floats(run_sequence(subject.call, *arguments))
            for arguments in ((reset, initial), (reset, state), (inputs, initial))
        ]
    if (difference := find_difference(runs[0], runs[1])) is not None:
        report.require(
            f"after a reset (done[0] is set), the outputs depend on the old state: they differ {difference}; if "
            "done is set, replace the state by the initial state before the step"
        )
    # This check is only for memories. The output of an agent may change at a reset even if its state does not change,
    # because the agent also replaces the last reward and the last action by zeros.
    if "output" in runs[0] and (difference := find_difference(runs[0], runs[2])) is not None:
        report.require(
            f"a reset does not equal initial_state({B}): the outputs differ {difference}; a reset must restore the "
            "initial state"
        )


def _floats(tensors: Tensors) -> Tensors:
    """Return only the floating-point tensors: `check_reset` ignores integers, which may be counters without a reset."""
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def check_inputs_unchanged(subject: Subject, state: State) -> None:
    """Check that `forward` does not change its arguments (inputs and state) in place, because a rollout stores them."""
    inputs = with_resets(subject.inputs(seed=4), *RESETS)
    saved_inputs, saved_state = copy.deepcopy((inputs, state))
    with subject.report.errors_of("forward"), unchanged(subject.module):
        run_sequence(subject.call, inputs, state)
    for index, (tensor, saved) in enumerate(zip(state, saved_state, strict=True)):
        if not torch.equal(tensor, saved):
            subject.report.require(f"forward changes the tensor state[{index}] of its argument; make a new tensor")
    pairs = [("reward", inputs.reward, saved_inputs.reward), ("done", inputs.done, saved_inputs.done)]
    pairs += [("its input", x, saved_inputs.observation[kind]) for kind, x in inputs.observation.items()]
    for name, tensor, saved in pairs:
        if not torch.equal(tensor, saved):
            subject.report.require(f"forward changes the tensor of {name}; make a new tensor")


def check_gradient(subject: Subject) -> None:
    """Check that all parameters get gradients from the outputs.

    If the network has a recurrent state, its floating-point inputs must get gradients, too.
    """
    report, module = subject.report, subject.module
    inputs = subject.inputs(seed=5)
    observation = {k: x.requires_grad_() if x.is_floating_point() else x for k, x in inputs.observation.items()}
    inputs = replace(inputs, observation=observation)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    memory_input = [x for x in observation.values() if x.requires_grad] if subject.initial_state(1) else []
    targets = [*parameters.values(), *memory_input]
    if not targets:
        return
    generator = torch.Generator().manual_seed(0)
    with report.errors_of("forward with gradients"), unchanged(module):
        outputs, _ = subject.call(inputs, subject.initial_state(B))
        for name, output in outputs.items():
            if not output.requires_grad:
                report.require(f"{name} has no gradient; do not detach it, and do not use torch.no_grad in forward")
        # Sum the outputs with random weights. A plain sum can be constant: for example, the outputs of a softmax always
        # sum to 1. The gradient of a constant sum is zero.
        total = torch.stack([(x * torch.randn(x.shape, generator=generator)).sum() for x in outputs.values()]).sum()
        gradients = torch.autograd.grad(total, targets, allow_unused=True)
    names = [f"parameter {name}" for name in parameters] + ["the input"] * len(memory_input)
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            report.add(f"{name} gets no gradient; use it in forward or remove it")
        elif not torch.isfinite(gradient).all():
            report.add(f"{name} gets a gradient that is not finite")


def check_metrics(subject: Subject, state: State) -> None:
    """If a memory has the method `forward_with_metrics`, check that its results equal those of `forward`."""
    report, module = subject.report, subject.module
    method: Any = getattr(module, "forward_with_metrics", None)
    if method is None:
        return
    inputs = subject.inputs(seed=6)
    with unchanged(module):
        first = run_sequence(subject.call, inputs, state)
    with report.errors_of("forward_with_metrics"), torch.no_grad(), unchanged(module):
        output, after, metrics = method(inputs.observation["vector"], inputs.done, state)
    if (difference := find_difference(first, {"output": output, **named_state(after)})) is not None:
        report.add(f"forward_with_metrics differs from forward {difference}; both must return the same values")
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.shape != ():
            found = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            report.add(f"forward_with_metrics: metric {name} is {found}; expected a scalar tensor")


def check_copy(subject: Subject) -> None:
    """Check that the network can be copied, and that its weights can be loaded into the copy.

    If the network has a recurrent state and parameters, also check that it can be moved to another device.
    """
    report = subject.report
    with report.errors_of("copy.deepcopy (actors use copies of the network)"):
        duplicate: Any = copy.deepcopy(subject.module)
    with report.errors_of("load_state_dict"):
        duplicate.load_state_dict(subject.module.state_dict())
    if not subject.initial_state(1) or next(duplicate.parameters(), None) is None:
        return
    # The device "meta" exists on all machines. Its tensors have shapes, but no values.
    with report.errors_of("initial_state after a move to another device"):
        devices = [s.device.type for s in duplicate.to("meta").initial_state(B)]
    if devices != ["meta"] * len(devices):
        report.add(
            "initial_state does not follow the device of the network, so it fails on a GPU; create its tensors with "
            "new_zeros of a parameter, for example self.layer.weight.new_zeros(batch_size, size)"
        )


def check_masked_inputs(subject: Subject) -> None:
    """Check that an agent ignores the last reward and the last action at the first step of an episode."""
    state = subject.initial_state(B)
    inputs = with_resets(subject.inputs(seed=8), *((0, row) for row in range(B)))
    changed = {
        "reward": replace(inputs, reward=inputs.reward + 0.5),
        "last_action": replace(inputs, last_action=(inputs.last_action + 1) % subject.interface.action_spec.n),
    }
    with unchanged(subject.module):
        expected = run_sequence(subject.call, inputs[:1], state)
        for name, other in changed.items():
            if (difference := find_difference(expected, run_sequence(subject.call, other[:1], state))) is not None:
                subject.report.add(
                    f"inputs.{name} of the previous episode changes the outputs at the first entry of an episode "
                    f"{difference}; multiply it by ~inputs.done"
                )
