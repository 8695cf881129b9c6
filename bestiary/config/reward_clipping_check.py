"""Check, before training, whether reward scaling and clipping remove differences between rewards.

A reward component (one term of the reward) declares the typical values that it has in a step, `RewardComponent.values`.
All combinations of these values are scaled and clipped as in training. If two different reward functions then give
equal rewards for all combinations, training cannot distinguish them.

If `RewardComponent.open` is set, the declared values are only examples, because the component has too many values. For
instance, a score can be any whole number. Examples are enough to warn that clipping makes two reward functions equal.
They are not enough to compute a scale that avoids clipping, because the largest possible value is unknown.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from bestiary.algorithms.reward_transform import transform_reward
from bestiary.envs.rewards.components import RewardComponent, resolve_alias
from bestiary.envs.rewards.reward_functions import Reward, WeightedReward

MAX_COMBINATIONS = 100_000


def typical_steps(reward: Reward, components: Mapping[str, RewardComponent]) -> dict[str, np.ndarray] | None:
    """Return all combinations of the typical values of a reward's components.

    The result is {component: its values [S]} for S combinations. If the values of a component are determined by another
    component (`RewardComponent.tied`), the two components are not varied separately. Return None if the typical values
    of a component are unknown, or if there are more than MAX_COMBINATIONS combinations.
    """
    if not isinstance(reward, WeightedReward):
        return None
    names = list(dict.fromkeys(term.component for term in reward.terms))
    varied = list(dict.fromkeys(_determining_component(name, components) for name in names))
    if not all(components[name].values for name in (*names, *varied)):
        return None
    sizes = [len(components[name].values) for name in varied]
    if math.prod(sizes) > MAX_COMBINATIONS:
        return None
    indices = np.array(list(itertools.product(*map(range, sizes))))  # [S,V] for V varied components
    return {
        name: np.array(components[name].values, np.float64)[
            indices[:, varied.index(_determining_component(name, components))]
        ]
        for name in names
    }


def _determining_component(name: str, components: Mapping[str, RewardComponent]) -> str:
    """Return the component to which the component `name` is tied, or `name` itself if it is not tied."""
    return components[name].tied or name


def _has_open_values(steps: Mapping[str, np.ndarray], components: Mapping[str, RewardComponent]) -> bool:
    return any(components[name].open for name in steps)


def unclipped_scale(reward: Reward, components: Mapping[str, RewardComponent]) -> float:
    """Return the scale that maps the largest reward of a step, in absolute value, to 1.

    The largest reward is computed from the typical values that each reward component declares. The scale is at most 1:
    smaller rewards are not enlarged. The scale is also 1 if the largest reward is unknown, because a component declares
    no typical values, or declares them only as examples (`RewardComponent.open`).
    """
    steps = typical_steps(reward, components)
    if steps is None or _has_open_values(steps, components):
        return 1.0
    largest = float(np.abs(_raw_rewards(reward, steps)).max())
    return 1.0 if largest <= 1 else float(f"{1 / largest:.6g}")


def transformed_rewards(reward: Reward, steps: dict[str, np.ndarray], mode: str, scale: float) -> np.ndarray:
    """Return the scaled and clipped rewards [S] for S combinations of component values."""
    return transform_reward(torch.from_numpy(_raw_rewards(reward, steps)), mode, scale).numpy()


def _raw_rewards(reward: Reward, steps: dict[str, np.ndarray]) -> np.ndarray:
    """Return the rewards [S] for S combinations of component values, before scaling and clipping.

    Each component is clipped to the limit of its term (`scope.limit`). Other restrictions in the scope of a term, for
    example to the first life, are ignored.
    """
    assert isinstance(reward, WeightedReward)
    total = np.zeros(len(next(iter(steps.values()))))
    for term in reward.terms:
        total += term.weight * np.clip(steps[term.component], -term.scope.limit, term.scope.limit)
    return total


def clipping_warnings(reward: Reward, components: Mapping[str, RewardComponent], mode: str, scale: float) -> list[str]:
    """Return warnings if different rewards become equal by scaling and clipping.

    `mode` and `scale` are the clipping mode and the scale of `transform_reward`.
    """
    steps = typical_steps(reward, components)
    if steps is None or mode in ("none", "return_std"):
        return []
    assert isinstance(reward, WeightedReward)
    raw = _raw_rewards(reward, steps)
    transformed = transformed_rewards(reward, steps, mode, scale)
    default_name = resolve_alias("reward", components)
    default = next((steps[name] for name in steps if resolve_alias(name, components) == default_name), None)
    if default is not None:
        transformed_default = transform_reward(torch.from_numpy(default), mode).numpy()
        if _equal(transformed, transformed_default) and not _equal(raw, default):
            return ["after clipping, the training reward equals the environment's own reward: --reward has no effect"]
    open_values = _has_open_values(steps, components)
    if _equal(transformed, scale * raw) or (open_values and default is not None and _equal(raw, default)):
        return []
    warnings = []
    for k, term in enumerate(reward.terms):
        if len(set(components[term.component].values)) == 1:
            continue  # a component such as `alive` has the same value in all steps
        if not term.weight:
            continue
        without = transformed_rewards(_reweight(reward, k, 0.0), steps, mode, scale)
        enlarged = transformed_rewards(_reweight(reward, k, 1000.0), steps, mode, scale)
        if _equal(transformed, without):
            warnings.append(f"{term} has no effect after clipping")
        elif _equal(transformed, enlarged):
            warnings.append(f"{term} has the same effect after clipping as with any larger weight")
    before, after = len(np.unique(raw.round(6))), len(np.unique(transformed.round(6)))
    if not warnings and before > 4 and after < before / 2 and not open_values:
        warnings.append(f"clipping maps the {before} typical rewards of a step to only {after} different values")
    return warnings


def _reweight(reward: WeightedReward, k: int, factor: float) -> WeightedReward:
    """Return a copy of the reward in which the weight of term k is multiplied by `factor`."""
    terms = list(reward.terms)
    terms[k] = replace(terms[k], weight=terms[k].weight * factor)
    return WeightedReward(tuple(terms))


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.allclose(first, second, atol=1e-9))
