"""Defaults of the optional attributes and methods of agents, torsos, memories and critics.

The built-in components inherit from these classes. A user's component is any `nn.Module` with the required methods
(docs/extending.md). `with_defaults` adds the optional attributes that the user's component does not define, so that
callers need no `hasattr`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor

from bestiary.agents.run_context import RunContext


class ComponentDefaults:
    """Default of `derive_options`, the optional method of all kinds of components."""

    @classmethod
    def derive_options(cls, options: Any, context: RunContext) -> Any:
        """Return the options, with values for those that the user did not set. By default, return them unchanged."""
        return options


class AgentDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of agents."""

    components: ClassVar[tuple[str, ...]] = ()  # which of "torso", "memory" and "critic" the constructor accepts
    # New default values that this agent sets for other options, by config key, for example {"algo.lr": 3e-4}.
    config_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    has_attention: Any = False  # True if the output has `extras["attention"]`
    uses_last_reward: Any = None  # True if the last reward is an input of the agent; None: unknown
    clamps_last_reward: Any = True  # True if the agent clamps the last reward to [-1,1]
    uses_last_action: Any = False  # True if the last action is an input of the agent


class TorsoDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of torsos."""

    extra_inputs: tuple[str, ...] = ("reward", "action")  # meaning of `--agent.extra-inputs auto` with this torso
    map_shape: Any = None  # shape (C, h, w) of the feature map; None if the torso has no convolutions
    # True if the torso has the methods `encode` (the part before the fully connected layers) and `project` (the rest).
    has_encoder: bool = False
    # True if the method `calibrate(observation)` must be called before training with observations of a random policy.
    needs_calibration: Any = False


class MemoryDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of memories."""

    def forward_with_metrics(self: Any, x: Tensor, done: Tensor, state: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Return the outputs and the new state, as `forward` does, and scalar metrics, which go to metrics.csv."""
        return *self(x, done, state), {}


class CriticDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of critics."""

    keeps_statistics: bool = False  # True if the critic normalises value targets with running statistics, like PopArt

    def accepts(self, moments: Tensor) -> bool:
        """Return False if the learner must update the running statistics before it can use the gradient of a batch.

        `moments` is the result of the critic's method `target_moments` for the batch. By default, return True.
        """
        return True


DEFAULTS: dict[str, type] = {
    "agent": AgentDefaults,
    "torso": TorsoDefaults,
    "memory": MemoryDefaults,
    "critic": CriticDefaults,
}


# First parts of the keys of `config_defaults`: kinds of components.
CONFIG_KINDS = ("algo", "agent", "torso", "memory", "critic", "env")
# Attribute that names other objects -> the names that it may contain, by kind of component.
NAME_ATTRIBUTES = {
    "agent": ("components", ("torso", "memory", "critic")),
    "torso": ("extra_inputs", ("reward", "action")),
}


def attribute_problem(component: Any, kind: str) -> str | None:
    """Return a message if an optional class attribute of a component has a wrong type or unknown names, else None."""
    if kind not in NAME_ATTRIBUTES:
        return None
    attribute, known = NAME_ATTRIBUTES[kind]
    value = getattr(component, attribute, ())
    if not isinstance(value, tuple) or not set(value) <= set(known):
        return f"{attribute} is {value!r}; expected a tuple of names, each one of {', '.join(known)}"
    defaults = getattr(component, "config_defaults", {})
    # Other options have the form "memory.hidden". Whether they exist depends on the chosen components.
    unknown = [key for key in defaults if key.partition(".")[0] not in CONFIG_KINDS]
    if unknown:
        return f"config_defaults has the key {unknown[0]!r}; expected keys such as 'memory' or 'algo.lr'"
    return None


@cache
def with_defaults(component: Any, kind: str) -> Any:
    """Return a subclass of a component class that also inherits the defaults of its kind (a key of DEFAULTS).

    Return `component` itself if it already inherits them, if it is not a class, or if the kind has no defaults.
    """
    defaults = DEFAULTS.get(kind)
    if defaults is None or not isinstance(component, type) or issubclass(component, defaults):
        return component
    return type(component.__name__, (component, defaults), {"__module__": component.__module__})
