"""Check of an agent with components from users' files, before training starts."""

from collections.abc import Mapping
from typing import Any

import torch

from bestiary.agents.agent import Agent
from bestiary.agents.component_output_checks import checked_outputs, registration_problem
from bestiary.agents.sequence_checks import (
    call_agent,
    compare_repeated_calls,
    compare_single_steps,
    random_inputs,
    state_problems,
    unchanged,
    with_resets,
)
from bestiary.config.components import ComponentConfig
from bestiary.envs.vector_env import EnvInterface
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef


def check_forward_pass(agent: Agent, interface: EnvInterface, components: Mapping[str, ComponentConfig]) -> None:
    """Run the agent on a small random batch, so that errors in plug-ins are found before training starts.

    Raises:
        UserError: a module keeps layers in a plain list; the forward pass raises an exception; a component returns a
            value of a wrong type or shape; the values or recurrent states have a wrong shape; two equal calls give
            different outputs; or one call with T=2 steps gives other outputs than two calls with T=1. The outputs are
            also compared at resets of the recurrent state.
    """
    T, B = 2, 3
    names = {kind: component.name for kind, component in components.items() if isinstance(component.name, PluginRef)}
    own = ", ".join(names.values()) or "the agent"
    inputs = random_inputs(interface.observation_spec, interface.action_spec.n, len(interface.tasks), T, B)
    call = call_agent(agent)
    module: Any = agent
    if (problem := registration_problem(module)) is not None:
        raise UserError(f"{own}: {problem} (see docs/extending.md)")
    length = T
    try:
        with torch.no_grad(), unchanged(module):
            initial = agent.initial_state(B)
            _raise_state_problems(own, state_problems(initial, B, f"initial_state({B})"))
            with checked_outputs(module, names, f"test batch of T={T} steps and B={B} trajectories"):
                outputs, state = call(inputs, initial)
        shape = tuple(outputs["value"].shape)
        logits_shape = tuple(outputs["logits"].shape)
        problems = state_problems(state, B, "the state that forward returns", initial)
        if shape == (T, B) and not problems:
            length = 1
            # Add resets of trajectory 2 in step 0 and of trajectory 1 in step 1.
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
    if logits_shape != (T, B, interface.action_spec.n):
        raise UserError(
            f"{own}: the logits of the action distribution have shape {logits_shape} for a test batch of T={T} steps "
            f"and B={B} trajectories; expected [T,B,A] = ({T}, {B}, {interface.action_spec.n}) where A is action.n"
        )
    _raise_state_problems(own, problems)
    if mismatch is not None:
        kind = (mismatch.layer or "agent").split(".")[0]
        kind = kind if kind in components else "agent"
        # If the component that was found is not a plug-in, one of the plug-ins that it calls is faulty.
        faulty = f"{kind} {components[kind].name}" if kind in names else own
        raise UserError(f"{faulty}: {mismatch.text} (see docs/extending.md#memory)")


def _raise_state_problems(own: str, problems: list[str]) -> None:
    """Raise UserError with the problems of a recurrent state, if there are any. The messages start with `own`."""
    if problems:
        raise UserError(*(f"{own}: {problem} (see docs/extending.md#memory)" for problem in problems))
