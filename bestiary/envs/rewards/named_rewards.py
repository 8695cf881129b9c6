"""Named rewards: predefined weighted sums of reward components, for example `pacifist:20:10`.

The first number is the strength; the description of each named reward says what the strength does. Some named rewards
have a second, optional number: the base, a constant reward per step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bestiary.envs.rewards.components import RewardComponent


@dataclass(frozen=True)
class NamedReward:
    """A predefined reward. `weights(strength, base)` returns a dict: reward component -> its weight in the sum."""

    description: str
    weights: Callable[[float, float], dict[str, float]]
    base: float | None = None  # default of the base, a constant reward per step; None: this reward has no base
    is_limit: bool = False  # True if the strength is a limit: the components are clipped to [-strength, strength]
    penalises: str = ""  # name of the penalised component, or empty; if set, the strength must not be negative


# A named reward is available in each environment that has all components in the reward's `weights`.
NAMED_REWARDS: dict[str, NamedReward] = {
    "fuel": NamedReward(
        "the score, but a shot fuel depot is worth STRENGTH x 80 points instead of 80",
        lambda strength, _: {"score": 1, "fuel_shot": 80 * (strength - 1)},
    ),
    "pacifist": NamedReward(
        "BASE per step, minus STRENGTH while a bullet of the player is on the screen",
        lambda strength, base: {"alive": base, "bullet": -strength},
        base=10,
        penalises="bullet",
    ),
    "smooth": NamedReward(
        "BASE per step, minus STRENGTH if the plane moved sideways (warehouse: if the robot changed its cell)",
        lambda strength, base: {"alive": base, "moved": -strength},
        base=10,
        penalises="moved",
    ),
    "center": NamedReward(
        "BASE per step, minus STRENGTH / 20 times the squared distance from the middle of the river",
        lambda strength, base: {"alive": base, "off_center": -strength / 20},
        base=10,
        penalises="off_center",
    ),
    "survival": NamedReward("STRENGTH per step", lambda strength, _: {"alive": strength}),
    "peaceful": NamedReward(
        "the score, minus STRENGTH for each press of FIRE",
        lambda strength, _: {"score": 1, "fire": -strength},
        penalises="fire",
    ),
    "steady": NamedReward(
        "the reward of the environment, minus STRENGTH for each change of action",
        lambda strength, _: {"reward": 1, "changed": -strength},
        penalises="changed",
    ),
    "scaled": NamedReward("STRENGTH times the reward of the environment", lambda strength, _: {"reward": strength}),
    "capped": NamedReward(
        "the reward of the environment, clipped to [-STRENGTH, STRENGTH] in each step",
        lambda _strength, _: {"reward": 1},
        is_limit=True,
    ),
}


def available_named_rewards(available: Mapping[str, RewardComponent]) -> list[str]:
    """Return the names of the named rewards that can be computed from the components in `available`."""
    return [name for name, reward in NAMED_REWARDS.items() if set(reward.weights(1.0, 1.0)) <= set(available)]
