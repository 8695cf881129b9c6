"""What scaling and clipping leave of a reward, before a run is spent on finding out.

A component says what it usually is in a step (`Component.values`). All the rewards that such steps could bring, raw, are put
through the same scale and clip as the learner's: where two settings come out the same there, no agent can tell them apart.
Of a game whose scores are whole numbers and no more is known, whole numbers of every size stand in: enough to tell what two
settings have in common, not enough to tell what scale would fit.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from bestiary.algorithms.rewards import squash
from bestiary.envs.weightings import Component, Reward, Weighting, real_name

MANY = 100_000  # steps to look at


def usual_steps(reward: Reward, components: Mapping[str, Component]) -> dict[str, np.ndarray] | None:
    """Every combination of the usual values of a reward's components, [S] each; None where one's are not known."""
    if not isinstance(reward, Weighting):
        return None
    names = list(dict.fromkeys(term.component for term in reward.terms))
    groups = list(dict.fromkeys(_leader(name, components) for name in names))
    if not all(components[name].values for name in (*names, *groups)):
        return None
    sizes = [len(components[group].values) for group in groups]
    if math.prod(sizes) > MANY:
        return None
    places = np.array(list(itertools.product(*map(range, sizes))))  # [S, groups]
    return {
        name: np.array(components[name].values, np.float64)[places[:, groups.index(_leader(name, components))]]
        for name in names
    }


def _leader(name: str, components: Mapping[str, Component]) -> str:
    return components[name].tied or name


def _open(steps: Mapping[str, np.ndarray], components: Mapping[str, Component]) -> bool:
    return any(components[name].open for name in steps)


def fitting_scale(reward: Reward, components: Mapping[str, Component]) -> float:
    """The factor with which the largest usual reward of a step is 1 (never above 1; 1 where nothing is known)."""
    steps = usual_steps(reward, components)
    if steps is None or _open(steps, components):
        return 1.0
    largest = float(np.abs(_raw(reward, steps)).max())
    return 1.0 if largest <= 1 else float(f"{1 / largest:.6g}")


def learnt(reward: Reward, steps: dict[str, np.ndarray], mode: str, scale: float) -> np.ndarray:
    """[S]: what is learnt from in each step."""
    return squash(torch.from_numpy(_raw(reward, steps)), mode, scale).numpy()


def _raw(reward: Reward, steps: dict[str, np.ndarray]) -> np.ndarray:
    """Within the scopes of all terms: a limit counts, time does not."""
    assert isinstance(reward, Weighting)
    total = np.zeros(len(next(iter(steps.values()))))
    for term in reward.terms:
        total += term.weight * np.clip(steps[term.component], -term.scope.limit, term.scope.limit)
    return total


def complaints(reward: Reward, components: Mapping[str, Component], mode: str, scale: float) -> list[str]:
    """What an agent cannot learn of a reward because of the clip, one line each; nothing where all of it gets through."""
    steps = usual_steps(reward, components)
    if steps is None or mode == "none":
        return []
    assert isinstance(reward, Weighting)
    raw, seen = _raw(reward, steps), learnt(reward, steps, mode, scale)
    plain = next(
        (steps[name] for name in steps if real_name(name, components) == real_name("reward", components)), None
    )
    if plain is not None and _same(seen, squash(torch.from_numpy(plain), mode).numpy()) and not _same(raw, plain):
        return ["what is learnt from is what would be without --reward"]
    if _same(seen, scale * raw) or (_open(steps, components) and plain is not None and _same(raw, plain)):
        return []
    found = []
    for k, term in enumerate(reward.terms):
        if len(set(components[term.component].values)) == 1:
            continue  # the same in every step: alive
        without, more = (learnt(_reweighted(reward, k, factor), steps, mode, scale) for factor in (0.0, 1000.0))
        if term.weight and _same(seen, without):
            found.append(f"{term} makes no difference: what is learnt from is as without it")
        elif term.weight and _same(seen, more):
            found.append(f"{term} is learnt from just as if its weight were larger")
    distinct, left = len(np.unique(raw.round(6))), len(np.unique(seen.round(6)))
    if not found and distinct > 4 and left < distinct / 2 and not _open(steps, components):
        found.append(f"of {distinct} different rewards that a step can bring, {left} are left")
    return found


def _reweighted(reward: Weighting, k: int, factor: float) -> Weighting:
    terms = list(reward.terms)
    terms[k] = replace(terms[k], weight=terms[k].weight * factor)
    return Weighting(tuple(terms))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one, other, atol=1e-9))
