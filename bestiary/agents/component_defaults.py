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
    """Default of `derive_options`, a method that any component (agent, torso, memory, critic) may define."""

    @classmethod
    def derive_options(cls, options: Any, context: RunContext) -> Any:
        """Return `options` with values for the options that the user did not set. By default, return them unchanged."""
        return options


class AgentDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of agents."""

    components: ClassVar[tuple[str, ...]] = ()  # parts that the constructor takes: "torso", "memory", "critic"
    # Options of the run that have another default with this agent: config key -> default, as in {"algo.lr": 3e-4}.
    config_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    has_attention: Any = False  # True if `Output.extras` has the key "attention"
    uses_last_reward: Any = None  # True if the last reward is an input of the agent; None: unknown
    clamps_last_reward: Any = True  # True if the agent clamps the last reward to [-1,1]
    uses_last_action: Any = False  # True if the last action is an input of the agent


class TorsoDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of torsos."""

    extra_inputs: tuple[str, ...] = ("reward", "action")  # what `--agent.extra-inputs auto` selects with this torso
    map_shape: Any = None  # shape (C, h, w) of the feature map; None if the torso has no convolutions
    # True if the torso has two further methods: `encode` computes the part before the fully connected layers, `project`
    # applies the fully connected layers.
    has_encoder: bool = False
    # True if the torso has a method `calibrate`, which must be called once before training. Its argument is a dict of
    # observations collected by a random policy.
    needs_calibration: Any = False


class MemoryDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of memories."""

    def forward_with_metrics(self: Any, x: Tensor, done: Tensor, state: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Return the outputs and the new state of `forward`, and scalar metrics that are written to metrics.csv."""
        return *self(x, done, state), {}


class CriticDefaults(ComponentDefaults):
    """Default values of the optional attributes and methods of critics."""

    classifies: bool = False  # True if the value loss is the cross-entropy of two histograms, as in HL-Gauss
    keeps_statistics: bool = False  # True if the critic normalises value targets with running statistics, as in PopArt

    def accepts(self, moments: Tensor) -> bool:
        """Return False if the learner must update the running statistics before it computes the gradient of a batch.

        `moments` is the result of the critic's method `target_moments` for the batch. By default, the result is True:
        the current statistics can be used.
        """
        return True


DEFAULTS: dict[str, type] = {
    "agent": AgentDefaults,
    "torso": TorsoDefaults,
    "memory": MemoryDefaults,
    "critic": CriticDefaults,
}


# Kinds of components. Each key of `config_defaults` is a kind or starts with a kind, for example "algo.lr".
CONFIG_KINDS = ("algo", "agent", "torso", "memory", "critic", "env")
# Class attributes that must be tuples of given names: kind of component -> (attribute, allowed names).
NAME_ATTRIBUTES = {
    "agent": ("components", ("torso", "memory", "critic")),
    "torso": ("extra_inputs", ("reward", "action")),
}


def attribute_problem(component: Any, kind: str) -> str | None:
    """Return a message if an optional class attribute of a component has an invalid value, else None.

    Examples: the attribute `extra_inputs` of a torso must be a tuple that contains only "reward" and "action"; the keys
    of `config_defaults` must be names of options.
    """
    if kind not in NAME_ATTRIBUTES:
        return None
    attribute, known = NAME_ATTRIBUTES[kind]
    value = getattr(component, attribute, ())
    if not isinstance(value, tuple) or not set(value) <= set(known):
        return f"{attribute} is {value!r}; expected a tuple of names, each one of {', '.join(known)}"
    defaults = getattr(component, "config_defaults", {})
    # Check only the part of a key before the dot. Whether for example "memory.hidden" exists depends on the memory.
    unknown = [key for key in defaults if key.partition(".")[0] not in CONFIG_KINDS]
    if unknown:
        return f"config_defaults has the key {unknown[0]!r}; expected keys such as 'memory' or 'algo.lr'"
    return None


@cache
def with_defaults(component: Any, kind: str) -> Any:
    """Return a subclass of the class `component` that also inherits from the class `DEFAULTS[kind]`.

    Return `component` itself if it already inherits from that class, if it is not a class, or if DEFAULTS has no entry
    for `kind`.
    """
    defaults = DEFAULTS.get(kind)
    if defaults is None or not isinstance(component, type) or issubclass(component, defaults):
        return component
    return type(component.__name__, (component, defaults), {"__module__": component.__module__})
