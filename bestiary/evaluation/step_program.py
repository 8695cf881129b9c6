"""The exported form of an agent: a function of tensors that computes one step for several environments.

    logits, value, next_state = program(observation, reward, done, last_action, task, state)

The first axis of all tensors is the batch. `agent_export.py` writes this function to files.
"""

import copy
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from bestiary.agents.agent import Agent
from bestiary.agents.memories.base import State
from bestiary.envs.vector_env import EnvInterface
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec, Tensors
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.plugins import error_line

# Largest allowed difference between an output of the agent and of the exported program. If the output contains numbers
# above 1, the difference is divided by the largest number.
TOLERANCE = 1e-5
MAX_BATCH = 65_536  # upper bound of the batch size that is declared in exported programs

StepArguments = tuple[Tensors, Tensor, Tensor, Tensor, Tensor, State]
StepResults = tuple[Tensor, Tensor, State]


class StepProgram(nn.Module):
    """Module that computes one step of an agent for a batch of environments."""

    def __init__(self, agent: Agent):
        super().__init__()
        self.agent = agent

    def forward(
        self,
        observation: Tensors,  # [B,...] by name
        reward: Tensor,  # float32 [B], rewards of the last actions
        done: Tensor,  # bool [B], True: the observation is the first one of an episode
        last_action: Tensor,  # int64 [B]
        task: Tensor,  # int64 [B]
        state: State,  # recurrent state before the step
    ) -> StepResults:
        """Return the logits [B,A] of the policy, the values [B] and the recurrent state after the step."""
        one_step = {kind: array.unsqueeze(0) for kind, array in observation.items()}
        others = (x.unsqueeze(0) for x in (reward, done, last_action, task))
        output, state = self.agent(Inputs(one_step, *others), state)
        return output.distribution.logits.squeeze(0), output.value.squeeze(0), state


@dataclass(frozen=True)
class StepExample:
    """Creates random arguments of a step program, for tracing and for checks of exported programs."""

    agent: Agent
    observation_spec: ObservationSpec
    action_spec: ActionSpec
    num_tasks: int

    @classmethod
    def of(cls, agent: Agent, interface: EnvInterface) -> "StepExample":
        """Return a StepExample for an agent that was trained on environments with this interface."""
        return cls(agent, interface.observation_spec, interface.action_spec, len(interface.tasks))

    def arguments(self, batch: int, seed: int, state: State | None = None) -> StepArguments:
        """Return random arguments of one step.

        A third of the rows start an episode. If `state` is None, the recurrent state is random, too. Integer tensors of
        a state are counters: they start at 0.
        """
        g = torch.Generator().manual_seed(seed)
        observation = {
            name: torch.randint(0, 256, (batch, *spec.shape), dtype=torch.uint8, generator=g)
            if spec.dtype == "uint8"
            else torch.randn((batch, *spec.shape), generator=g)
            for name, spec in self.observation_spec.items()
        }
        if state is None:
            zeros = self.agent.initial_state(batch)
            state = tuple(torch.randn(s.shape, generator=g) if s.is_floating_point() else s for s in zeros)
        return (
            observation,
            torch.randn(batch, generator=g),
            torch.rand(batch, generator=g) < 1 / 3,
            torch.randint(0, self.action_spec.n, (batch,), generator=g),
            torch.randint(0, self.num_tasks, (batch,), generator=g),
            state,
        )


def trace(program: StepProgram, example: StepExample, flag: str) -> Any:
    """Return the program as a `torch.export.ExportedProgram` that accepts batches of any size.

    Raises:
        UserError: torch cannot trace the agent, for example because its Python code depends on values of tensors.
    """
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    arguments = example.arguments(3, seed=0)
    shapes = {
        "observation": {name: {0: batch} for name in example.observation_spec},
        **{name: {0: batch} for name in ("reward", "done", "last_action", "task")},
        "state": tuple({0: batch} for _ in arguments[-1]),
    }
    try:
        with hidden_exporter_messages(), torch.no_grad():
            return torch.export.export(program, arguments, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise UserError(
            f"{flag}: the agent cannot be expressed as a graph of tensor operations ({error_line(error)}); "
            "its code must not depend on the values of tensors (--format npz and --format minari export rollouts)"
        ) from error


@contextmanager
def hidden_exporter_messages() -> Iterator[None]:
    """Hide messages of torch's exporters about packages that agents do not use and about partial graphs."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def in_float64(exported: Any) -> Any:
    """Return a module that computes an exported program with 64-bit numbers. Its arguments are still float32.

    The outputs of this module show which of two float32 results is more accurate. Libraries add numbers in different
    orders, which changes the outputs of a deep network by more than TOLERANCE.
    """
    with hidden_exporter_messages():
        module = copy.deepcopy(exported.module(check_guards=False))
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
        elif node.op == "call_function":
            node.args = map_aggregate(node.args, _widen)
            node.kwargs = map_aggregate(node.kwargs, _widen)
    module.recompile()
    module.double()
    return lambda *arguments: module(*tree_map(_widen, arguments))


def _widen(x: Any) -> Any:
    """Return the argument of an operation in float64.

    A floating-point tensor is converted to float64, and the dtype torch.float32 becomes torch.float64. Any other
    argument is returned unchanged.
    """
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    return torch.float64 if x is torch.float32 else x


def check_equal(program: StepProgram, exported: Any, example: StepExample, run: Any, flag: str) -> float:
    """Compare an exported program with the agent on random states, in episodes with random resets.

    `run(arguments)` runs the written program and returns the results as NumPy arrays or tensors: logits, value, and
    each tensor of the state. These results are compared with the results of the agent in float64. Return the largest
    difference. In a tensor with numbers above 1, differences are divided by the largest number.

    Raises:
        RunError: a difference is larger than TOLERANCE, and larger than twice the rounding error of the agent itself.
    """
    exact_program = in_float64(exported)
    largest = 0.0
    for arguments in _random_steps(program, example):
        with torch.no_grad():
            exact = _flatten(exact_program(*arguments))
            own = _flatten(program(*arguments))
        for expected, rounded, found in zip(exact, own, run(arguments), strict=True):
            scale = max(1.0, float(expected.abs().max()))
            rounding = float((rounded - expected).abs().max()) / scale
            difference = float((torch.as_tensor(found) - expected).abs().max()) / scale
            if not difference <= max(TOLERANCE, 2 * rounding):  # also if it is not a number
                raise RunError(
                    f"{flag}: the exported program differs from the agent by {difference:.1e}, so it is not written; "
                    "choose another format"
                )
            largest = max(largest, difference)
    return largest


def _flatten(results: StepResults) -> list[Tensor]:
    logits, value, state = results
    return [logits, value, *state]


def _random_steps(program: StepProgram, example: StepExample) -> Iterator[StepArguments]:
    """Yield the arguments of all steps of several sequences, one per batch size, which start in random states."""
    for batch in (1, 2, 5):
        state = None
        for step in range(6):
            arguments = example.arguments(batch, seed=100 * batch + step, state=state)
            yield arguments
            with torch.no_grad():
                state = program(*arguments)[2]
