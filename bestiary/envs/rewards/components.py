"""Reward components: named numbers that an environment computes in each step. Weighted rewards are built from them."""

from collections.abc import Mapping
from dataclasses import dataclass

from bestiary.step import ArraySpec

SCALAR = ArraySpec((), "float32")  # shape and type of a component in `Step.measures`


@dataclass(frozen=True)
class RewardComponent:
    """Description of one reward component.

    config/reward_clipping_check.py uses `values`, `tied` and `open` to predict how reward clipping changes a reward.
    """

    description: str
    values: tuple[float, ...] = ()  # typical values in a step; empty: unknown
    # Name of another component to which this component is tied, or empty. Tied means that `values` of both components
    # have the same length, and that in a step in which the other component has its k-th value, this component has its
    # k-th value. Example in River Raid: `score` has the values (0, 30, 60, 80, 100, 500), and `fuel_shot` has the
    # values (0, 0, 0, 1, 0, 0), because a depot was shot in each step with 80 points.
    tied: str = ""
    open: bool = False  # True if `values` are only examples and other values are also common


# Components that all environments have.
COMMON_COMPONENTS = {
    "reward": RewardComponent("reward of the environment"),
    "alive": RewardComponent("1 in each step", (1,)),
    "changed": RewardComponent("1 if the action differs from the previous action of the episode", (0, 1)),
}


def resolve_alias(name: str, available: Mapping[str, RewardComponent]) -> str:
    """Return the name of the component for which `name` is an alias. If `name` is not an alias, return `name`.

    Component A is an alias of component B if `A.tied` is the name of B, and A and B have the same typical values. For
    example, `reward` is an alias of `score` in Atari.
    """
    component = available[name]
    other = available.get(component.tied)
    return component.tied if other is not None and component.values == other.values else name
