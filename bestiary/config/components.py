"""Lookup and construction of the components of a run: algorithm, agent, torso, memory and critic.

A component name is either a key of its registry or `path/to/file.py:Name` for a class in a user's file (a plug-in).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from bestiary.agents import AGENTS
from bestiary.agents.agent import Agent
from bestiary.agents.critics import CRITICS
from bestiary.agents.defaults import attribute_problem, with_defaults
from bestiary.agents.memories import MEMORIES
from bestiary.agents.output_checks import checked_outputs
from bestiary.agents.sequence_checks import (
    call_agent,
    compare_repeated_calls,
    compare_single_steps,
    random_inputs,
    state_problems,
    unchanged,
    with_resets,
)
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.algorithms.base import algorithm_problem
from bestiary.envs.vector_env import EnvInterface
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct, suggest

REGISTRIES: dict[str, Mapping[str, type]] = {
    "algo": ALGORITHMS,
    "agent": AGENTS,
    "torso": TORSOS,
    "memory": MEMORIES,
    "critic": CRITICS,
}

# Attributes and methods that a plug-in class must have, by kind of component.
REQUIRED_ATTRIBUTES = {
    "algo": ("loss",),
    "agent": ("forward", "initial_state"),
    "torso": ("forward",),
    "memory": ("forward", "initial_state"),
    "critic": ("forward",),
}


@dataclass(frozen=True)
class ComponentConfig:
    """The name of a component and its options."""

    name: str
    options: Any  # instance of the options dataclass of the component


def lookup_component(kind: str, name: str) -> Any:
    """Return the class of the component with this name. Raise UserError if there is none."""
    if plugins.is_plugin(name):
        component = plugins.load(name, kind, REQUIRED_ATTRIBUTES[kind])
        if kind == "algo" and (problem := algorithm_problem(component)) is not None:
            raise UserError(f"--algo {name}: {problem} (see docs/extending.md#algorithm)")
        component = with_defaults(component, kind)
        if (problem := attribute_problem(component, kind)) is not None:
            raise UserError(f"--{kind} {name}: {problem} (see docs/extending.md#{kind})")
        return component
    if name not in REGISTRIES[kind]:
        known = ", ".join(REGISTRIES[kind])
        raise UserError(f"--{kind} {name}: unknown; expected one of {known}{suggest(name, REGISTRIES[kind])}")
    return REGISTRIES[kind][name]


def construct_component(kind: str, component: ComponentConfig, *args: Any, **inner: Any) -> Any:
    """Construct a component. If the constructor of a plug-in fails, raise UserError."""
    try:
        return construct(lookup_component(kind, component.name), *args, options=component.options, **inner)
    except UserError:
        raise
    except Exception as error:
        if plugins.is_plugin(component.name):
            location = plugins.error_location(error, plugins.plugin_files())
            where = "" if location is None else f" ({location})"
            raise UserError(f"{component.name}: the constructor failed: {plugins.error_line(error)}{where}") from error
        raise


def build_module(kind: str, component: ComponentConfig, num_tasks: int, inputs: Any) -> nn.Module:
    """Construct a torso, memory or critic.

    For a torso, `inputs` is the observation spec. For a memory or critic, it is the number of input features.
    """
    if kind == "critic":
        return construct_component(kind, component, inputs, num_tasks)
    module = construct_component(kind, component, inputs)
    if not hasattr(module, "output_size"):
        raise UserError(
            f"{component.name}: not a usable {kind}: the constructor must set self.output_size (see docs/extending.md)"
        )
    return module


def check_forward_pass(agent: Agent, interface: EnvInterface, components: Mapping[str, ComponentConfig]) -> None:
    """Run the agent on a small random batch, so that errors in plug-ins are found before training starts.

    Raises:
        UserError: the forward pass raises an exception, a component returns a value of a wrong type or shape, the
            values or recurrent states have a wrong shape, two equal calls give different outputs, or one call with T=2
            steps gives other outputs than two calls with T=1. The last two tests include resets of the recurrent state.
    """
    T, B = 2, 3
    names = {kind: component.name for kind, component in components.items() if plugins.is_plugin(component.name)}
    own = ", ".join(names.values()) or "the agent"
    inputs = random_inputs(interface.observation_spec, interface.action_spec.n, len(interface.tasks), T, B)
    call = call_agent(agent)
    module: Any = agent
    length = T
    try:
        with torch.no_grad(), unchanged(module):
            initial = agent.initial_state(B)
            _raise_state_problems(own, state_problems(initial, B, f"initial_state({B})"))
            with checked_outputs(module, names, f"test batch of T={T} steps and B={B} trajectories"):
                outputs, state = call(inputs, initial)
        shape = tuple(outputs["value"].shape)
        problems = state_problems(state, B, "the state that forward returns", initial)
        if shape == (T, B) and not problems:
            length = 1
            inputs = with_resets(inputs, (0, 2), (1, 1))
            mismatch = compare_repeated_calls(module, call, inputs, state)
            mismatch = mismatch or compare_single_steps(module, call, inputs, state)
    except UserError:
        raise
    except Exception as error:
        location = plugins.error_location(error, plugins.plugin_files())
        where = "" if location is None else f" ({location})"
        raise UserError(
            f"{own}: the forward pass fails on a test batch of T={length} steps and B={B} trajectories: "
            f"{plugins.error_line(error)}{where}"
        ) from error
    if shape != (T, B):
        raise UserError(
            f"the agent's values have shape {shape} for a test batch of T={T} steps and B={B} trajectories; "
            f"expected ({T}, {B})"
        )
    _raise_state_problems(own, problems)
    if mismatch is not None:
        kind = (mismatch.layer or "agent").split(".")[0]
        kind = kind if kind in components else "agent"
        raise UserError(f"{kind} {components[kind].name}: {mismatch.text} (see docs/extending.md#memory)")


def _raise_state_problems(own: str, problems: list[str]) -> None:
    """Raise UserError if there are problems of a recurrent state. `own` names the components of the user."""
    if problems:
        raise UserError(*(f"{own}: {problem} (see docs/extending.md#memory)" for problem in problems))
