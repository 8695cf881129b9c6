"""Reward functions: weighted sums of reward components, and functions from a user's file.

A reward function is called once per step. It receives the measures of N environments and returns N rewards. Measures
are named numbers that the environments report in each step, for example `lives`. All reward components are measures.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.envs.rewards.components import RewardComponent, resolve_alias
from bestiary.step import Arrays
from bestiary.utils import plugins
from bestiary.utils.errors import RunError
from bestiary.utils.plugin_names import PluginRef


@dataclass(frozen=True)
class Scope:
    """The steps of a game in which a reward term counts, and the limit to which the term's component is clipped."""

    first: int = 0  # the term counts from this step of the game on; the first step is 0
    last: float = math.inf  # the term counts only before this step of the game
    life: int = 0  # the term counts only in this life of the game; the first life is 1; 0: all lives
    every: int = 1  # the term counts only in each `every`-th step of a game; 1: in all steps
    limit: float = math.inf  # the component is clipped to [-limit, limit] before it is multiplied by the weight

    def __call__(self, values: np.ndarray, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        """Return the clipped values [N]. The result is zero in environments whose current step is not in the scope.

        Args:
            values: values of the component, [N].
            clock: number of earlier steps of the current game, int64 [N].
            life: index of the current life of the game, int64 [N]; the first life is 1.
        """
        counts = (clock >= self.first) & (clock < self.last) & ((clock + 1) % self.every == 0)
        if self.life:
            counts &= life == self.life
        return np.where(counts, np.clip(values, -self.limit, self.limit), 0.0)

    def is_disjoint(self, other: "Scope") -> bool:
        """Return True if two scopes name different lives, or if their step ranges do not overlap.

        No step is then in both scopes. The field `every` is ignored.
        """
        different_lives = self.life and other.life and self.life != other.life
        return bool(different_lives) or self.last <= other.first or other.last <= self.first

    def __str__(self) -> str:
        last = "" if self.last == math.inf else f"{self.last:.0f}"
        parts = [f"@steps={self.first}:{last}"] if self.first or last else []
        parts += [f"@life={self.life}"] if self.life else []
        parts += [f"@every={self.every}"] if self.every > 1 else []
        parts += [f"@max={self.limit:g}"] if self.limit < math.inf else []
        return "".join(parts)


ALWAYS = Scope()


@dataclass(frozen=True)
class Term:
    """One term of a weighted reward: a component, its weight and its scope."""

    component: str
    weight: float
    scope: Scope = ALWAYS

    def __str__(self) -> str:
        return f"{self.component}={self.weight:g}{self.scope}"


@dataclass(frozen=True)
class WeightedReward:
    """A weighted sum of reward components."""

    terms: tuple[Term, ...]

    def __call__(self, measures: Arrays, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        """Return the rewards, float32 [N].

        Args:
            measures: {name of a component: its values [N]}.
            clock: number of earlier steps of the current game, int64 [N].
            life: index of the current life of the game, int64 [N]; the first life is 1.
        """
        total = np.zeros(len(clock), np.float64)
        for term in self.terms:
            values = measures[term.component]
            total += term.weight * (values if term.scope is ALWAYS else term.scope(values, clock, life))
        with np.errstate(over="ignore"):  # an infinite reward is reported later, by RewardWrapper
            return total.astype(np.float32)

    def __str__(self) -> str:
        return ",".join(map(str, self.terms))


@dataclass(frozen=True)
class CustomReward:
    """A reward computed by a function from a user's file."""

    name: PluginRef  # path/to/file.py:function
    function: Callable[[Arrays], Any]  # {name: measure [N]} -> rewards [N]

    def __call__(self, measures: Arrays, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        """Return the rewards, float32 [N]. Raise RunError if the user's function returns None or a wrong shape.

        `clock` and `life` are not passed to the user's function.
        """
        copies = {name: array.copy() for name, array in measures.items()}  # the function may write into its arguments
        returned = self.function(copies)
        rewards = np.asarray(returned, np.float32)
        if returned is None or rewards.shape != clock.shape:
            what = "None" if returned is None else f"an array of shape {rewards.shape}"
            raise RunError(f"returned {what}; it must return one reward per environment, shape ({len(clock)},)")
        return rewards

    def __str__(self) -> str:
        return self.name


Reward = WeightedReward | CustomReward


def canonical_reward(reward: Reward, available: Mapping[str, RewardComponent]) -> str:
    """Return a text that identifies a reward. Equal rewards have equal texts, even if the user wrote them differently.

    The text of a custom reward consists of the hash of the user's file and the name of the function.
    """
    if isinstance(reward, CustomReward):
        return f"{plugins.content_hash(reward.name)}:{reward.name.attribute}"
    return ",".join(sorted(f"{resolve_alias(t.component, available)}={t.weight!r}{t.scope}" for t in reward.terms))
