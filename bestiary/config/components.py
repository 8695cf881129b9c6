"""Lookup and construction of the components of a run: algorithm, agent, torso, memory and critic.

A component name is either a key of its registry or `path/to/file.py:Name` for a class in a user's file (a plug-in).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from bestiary.agents import AGENTS
from bestiary.agents.component_defaults import attribute_problem, with_defaults
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.algorithms.contract_checks import algorithm_problem
from bestiary.config.foreign_components import foreign_component_hint
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct, suggest
from bestiary.utils.plugin_names import PluginRef

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

    name: str  # key of the component's registry, or a PluginRef for a class in a user's file
    options: Any  # instance of the options dataclass of the component


def lookup_component(kind: str, name: str) -> Any:
    """Return the class of a component. Raise UserError if the name is unknown or a plug-in class is not usable."""
    if isinstance(name, PluginRef):
        component = plugins.load(name, kind, REQUIRED_ATTRIBUTES[kind])
        if kind == "algo" and (problem := algorithm_problem(component)) is not None:
            raise UserError(f"--algo {name}: {problem} (see docs/extending.md#algorithm)")
        component = with_defaults(component, kind)
        if (problem := attribute_problem(component, kind)) is not None:
            raise UserError(f"--{kind} {name}: {problem} (see docs/extending.md#{kind})")
        return component
    if name not in REGISTRIES[kind]:
        known = ", ".join(REGISTRIES[kind])
        hint = foreign_component_hint(kind, name) or suggest(name, REGISTRIES[kind])
        raise UserError(f"--{kind} {name}: unknown; expected one of {known}{hint}")
    return REGISTRIES[kind][name]


def construct_component(kind: str, component: ComponentConfig, *args: Any, **inner: Any) -> Any:
    """Construct a component. Pass `args`, the options of the component and `inner` to its constructor.

    Raise UserError if the component is a plug-in and its constructor raises an exception, or if an algorithm does not
    set `self.options`.
    """
    try:
        constructed = construct(lookup_component(kind, component.name), *args, options=component.options, **inner)
    except UserError:
        raise
    except Exception as error:
        if isinstance(component.name, PluginRef):
            location = plugins.error_location(error, plugins.plugin_files())
            where = "" if location is None else f" ({location})"
            raise UserError(f"{component.name}: the constructor failed: {plugins.error_line(error)}{where}") from error
        raise
    if kind == "algo" and not hasattr(constructed, "options"):
        raise UserError(
            f"{component.name}: the constructor must call super().__init__(options), which sets self.options"
        )
    return constructed


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
    if not isinstance(module.output_size, int) or module.output_size < 1:
        raise UserError(
            f"{component.name}: output_size is {module.output_size!r}; expected an integer of at least 1 "
            "(see docs/extending.md)"
        )
    return module
