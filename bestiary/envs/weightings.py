"""Weightings of components: how a reward is written, what that means, and what is wrong with those that mean nothing.

    --reward fuel:10                       a named reward and its strength (and :base, where it has one: pacifist:20:10)
    --reward collected=1,expired=-0.5      components and their weights
    --reward pacifist:20,fire=-1           several, added up
    --reward score=1@life=1@max=100        within a scope: only the first life, and at most 100 a step
    --reward my_reward.py:careful          a function of the user's own: measures by name, [N] each -> rewards [N]

Scopes: `steps=A:B` decisions A to B-1 of a game, `life=K` the K-th life, `every=K` each K-th decision of a game, and `max=X`,
which limits the component to [-X,X] before it is weighted.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bestiary import plugins
from bestiary.errors import RunError, UserError
from bestiary.options import convert, suggest
from bestiary.rollout import Arrays, ArraySpec

SCALAR = ArraySpec((), "float32")
LARGEST = 1e30  # of a weight: float32 ends at 3e38, and a component may be large, too


@dataclass(frozen=True)
class Component:
    """One thing that a step can bring. `values` are what it usually is in a step, as far as that is known: for judging what
    clipping leaves of a reward. Values of a component that is `tied` to another belong to that one's, one by one; with the same
    values it is that component. `open`: values are examples only, others are as usual."""

    about: str
    values: tuple[float, ...] = ()
    tied: str = ""
    open: bool = False


GENERIC = {  # of every environment
    "reward": Component("the environment's own reward"),
    "alive": Component("1 in every step", (1,)),
    "changed": Component("1 where the action is another one than before, within an episode", (0, 1)),
}


@dataclass(frozen=True)
class Named:
    """A reward with a name: weights of components, from its strength and its base."""

    about: str
    weights: Callable[[float, float], dict[str, float]]
    base: float | None = None  # what it has where none is given; None: it has no base
    envs: tuple[str, ...] = ()  # where it means something (none: wherever its components are)
    limited: bool = False  # the strength is a limit of its components, not a weight
    charges: str = ""  # the component that its strength is a price of


RIVER_RAID = ("atari/Riverraid",)
NAMED: dict[str, Named] = {
    "fuel": Named(
        "the score, with fuel depots that were shot worth STRENGTH times their 80 points",
        lambda s, _: {"score": 1, "fuel_shot": 80 * (s - 1)},
        envs=RIVER_RAID,
    ),
    "pacifist": Named(
        "BASE in every step, less STRENGTH while a bullet of the player's is on the screen",
        lambda s, base: {"alive": base, "bullet": -s},
        base=10,
        envs=RIVER_RAID,
        charges="bullet",
    ),
    "smooth": Named(
        "BASE in every step, less STRENGTH where the plane moved sideways",
        lambda s, base: {"alive": base, "moved": -s},
        base=10,
        envs=RIVER_RAID,
        charges="moved",
    ),
    "center": Named(
        "BASE in every step, less STRENGTH times a twentieth of the squared distance from the river's middle",
        lambda s, base: {"alive": base, "off_center": -s / 20},
        base=10,
        envs=RIVER_RAID,
        charges="off_center",
    ),
    "survival": Named("STRENGTH in every step, whatever happens", lambda s, _: {"alive": s}),
    "peaceful": Named(
        "the score, less STRENGTH for every press of FIRE", lambda s, _: {"score": 1, "fire": -s}, charges="fire"
    ),
    "steady": Named(
        "the environment's reward, less STRENGTH for every change of action",
        lambda s, _: {"reward": 1, "changed": -s},
        charges="changed",
    ),
    "scaled": Named("STRENGTH times the environment's reward", lambda s, _: {"reward": s}),
    "capped": Named(
        "the environment's reward, at most STRENGTH and at least -STRENGTH a step",
        lambda _s, _: {"reward": 1},
        limited=True,
    ),
}


@dataclass(frozen=True)
class Scope:
    """When a component counts, and how far."""

    first: int = 0
    last: float = math.inf
    life: int = 0  # 0: every
    every: int = 1
    limit: float = math.inf

    def __call__(self, values: np.ndarray, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        counts = (clock >= self.first) & (clock < self.last) & ((clock + 1) % self.every == 0)
        if self.life:
            counts &= life == self.life
        return np.where(counts, np.clip(values, -self.limit, self.limit), 0.0)

    def apart(self, other: "Scope") -> bool:
        """Whether no decision is in both."""
        lives = self.life and other.life and self.life != other.life
        return bool(lives) or self.last <= other.first or other.last <= self.first

    def __str__(self) -> str:
        last = "" if self.last == math.inf else f"{self.last:.0f}"
        words = [f"@steps={self.first}:{last}"] if self.first or last else []
        words += [f"@life={self.life}"] if self.life else []
        words += [f"@every={self.every}"] if self.every > 1 else []
        return "".join([*words, f"@max={self.limit:g}" if self.limit < math.inf else ""])


ALWAYS = Scope()


@dataclass(frozen=True)
class Term:
    component: str
    weight: float
    scope: Scope = ALWAYS

    def __str__(self) -> str:
        return f"{self.component}={self.weight:g}{self.scope}"


@dataclass(frozen=True)
class Weighting:
    """A reward as a weighted sum of components."""

    terms: tuple[Term, ...]

    def __call__(self, measures: Arrays, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        """float32 [N]; `clock` [N] decisions made before in the game, `life` [N] the how-manyeth, from 1."""
        total = np.zeros(len(clock), np.float64)
        for term in self.terms:
            values = measures[term.component]
            total += term.weight * (values if term.scope is ALWAYS else term.scope(values, clock, life))
        with np.errstate(over="ignore"):  # whoever asked looks whether it is finite
            return total.astype(np.float32)

    def __str__(self) -> str:
        return ",".join(map(str, self.terms))


@dataclass(frozen=True)
class Custom:
    """A reward that a function of the user's own makes of the measures."""

    name: str
    function: Callable[[Arrays], Any]

    def __call__(self, measures: Arrays, clock: np.ndarray, life: np.ndarray) -> np.ndarray:
        own = {name: array.copy() for name, array in measures.items()}  # what it writes into is nobody else's
        given = self.function(own)
        found = np.asarray(given, np.float32)
        if given is None or found.shape != clock.shape:
            what = "None" if given is None else f"an array of shape {found.shape}"
            raise RunError(f"gave {what}, not the rewards of {len(clock)} environments, ({len(clock)},)")
        return found

    def __str__(self) -> str:
        return self.name


Reward = Weighting | Custom


def make_reward(text: str | None, available: Mapping[str, Component], env: str, flag: str = "--reward") -> Reward:
    """The reward that a text stands for in an environment with these components; raises UserError with all that is wrong."""
    if text is None:
        return Weighting((Term("reward", 1.0),))
    if plugins.is_plugin(text):
        return Custom(text, plugins.load(text, "reward"))
    problems: list[str] = []
    words: list[_Word] = []
    for part in text.split(","):
        try:
            word = _expand(part, available, env)
            for other in words:
                _check_together(other, word, available)
            words.append(word)
        except ValueError as error:
            problems.append(f"{flag} {text}: {error}")
    if problems:
        raise UserError(*problems)
    total: dict[tuple[str, Scope], float] = {}
    for term in (term for word in sorted(words, key=lambda word: word.listed) for term in word.terms):
        total[term.component, term.scope] = total.get((term.component, term.scope), 0.0) + term.weight
    return Weighting(tuple(Term(component, weight, scope) for (component, scope), weight in total.items()))


def real_name(name: str, available: Mapping[str, Component]) -> str:
    """The component that this one is under another name: in Atari `reward` is `score`."""
    component = available[name]
    tied = available.get(component.tied)
    return component.tied if tied is not None and component.values == tied.values else name


def canonical(reward: Reward, available: Mapping[str, Component]) -> str:
    """The same for all ways to write the same reward; a function of the user's own by what its file says."""
    if isinstance(reward, Custom):
        path, name = plugins.split(reward.name)
        return f"{plugins.digest(path)}:{name}"
    return ",".join(sorted(f"{real_name(t.component, available)}={t.weight!r}{t.scope}" for t in reward.terms))


@dataclass(frozen=True)
class _Word:
    """`fuel:10@life=1` or `alive=1`, and what it comes to."""

    text: str
    name: str
    scope: Scope
    terms: tuple[Term, ...]
    listed: bool  # a component and its weight


def _check_together(one: _Word, other: _Word, available: Mapping[str, Component]) -> None:
    """Raise ValueError where two words of a reward count something twice that each of them means to count once."""
    if one.listed == other.listed and one.scope == other.scope and one.name == other.name:
        raise ValueError(f"{one.name} is there twice; give it once, or each in a scope of its own")
    if one.scope.apart(other.scope):
        return

    def counted(word: _Word) -> dict[str, Term]:
        return {real_name(term.component, available): term for term in word.terms}

    shared = counted(one).keys() & counted(other).keys()
    if one.listed and other.listed:
        if shared and one.scope == other.scope:
            raise ValueError(f"{one.name} and {other.name} are the same thing here; give one of them")
    elif one.listed or other.listed:
        named, listed = (other, one) if one.listed else (one, other)
        for name in shared:
            raise ValueError(
                f"{named.name} and {listed.name}=... contradict each other: {named.name} already has "
                f"{counted(named)[name]}; leave one out"
            )
    elif shared - {"alive"}:  # a base in every step may well be the sum of two
        name = next(iter(shared - {"alive"}))
        ways = [(one, counted(other)), (other, counted(one))]
        more = [[whole.text, *(str(term) for key, term in rest.items() if key not in shared)] for whole, rest in ways]
        best = next((",".join(words) for words in more if len(words) > 1), None)
        raise ValueError(
            f"{one.name} and {other.name} both have {name} in them, which would count twice: "
            + (f"write {best}" if best else "leave one out")
        )


def _expand(text: str, available: Mapping[str, Component], env: str) -> _Word:
    body, *scopes = (part.strip() for part in text.split("@"))
    scope = _scope(scopes)
    if "=" in body:
        name, _, weight = (part.strip() for part in body.partition("="))
        if name not in available:
            raise ValueError(
                f"{env} has no component {name}{suggest(name, available)}; it has {', '.join(available)}"
                + (f" (a named reward is written {name}:STRENGTH)" if name in NAMED else "")
            )
        term = Term(name, _number(weight, f"the weight of {name}"), scope)
        return _Word(text.strip(), name, scope, (term,), listed=True)
    name, *numbers = (part.strip() for part in body.split(":"))
    if name not in NAMED:
        known = [*fitting(available, env), *available]
        hint = f" (a component is written {name}=WEIGHT)" if name in available else suggest(name, known)
        raise ValueError(f"there is no reward {name or body!r}{hint}; for {env} there is {', '.join(known)}")
    reward = NAMED[name]
    if name not in fitting(available, env):
        where = ", ".join(reward.envs) or f"environments with {' and '.join(reward.weights(1, 1))}"
        raise ValueError(f"{name} is a reward of {where}, not of {env}")
    if not numbers:
        raise ValueError(f"{name} needs a strength, such as {name}:10")
    if len(numbers) > (1 if reward.base is None else 2):
        raise ValueError(f"{name} is written {name}:STRENGTH{'' if reward.base is None else ':BASE'}")
    strength = _number(numbers[0], f"the strength of {name}")
    base = _number(numbers[1], f"the base of {name}") if len(numbers) > 1 else reward.base or 0.0
    if reward.charges and strength < 0:
        raise ValueError(
            f"{name}:{numbers[0]} would pay for what it is there to charge for: write {name}:{numbers[0].lstrip('-')} "
            f"(or, to pay for it, {reward.charges}=WEIGHT)"
        )
    within = scope
    if reward.limited:
        if strength <= 0:
            raise ValueError(f"{name}:{numbers[0]}: a limit must be above 0")
        within = replace(scope, limit=min(scope.limit, strength))
    weights = reward.weights(strength, base)
    terms = tuple(Term(component, weight, within) for component, weight in weights.items())
    return _Word(text.strip(), name, scope, terms, listed=False)


def _number(text: str, what: str) -> float:
    try:
        found = float(convert(text, float))
    except ValueError:
        raise ValueError(f"{what} is {text!r}, which is no number") from None
    if abs(found) > LARGEST:
        raise ValueError(f"{what} is {text}: at most {LARGEST:g}, because rewards are float32")
    return found


def _scope(words: list[str]) -> Scope:
    scope = ALWAYS
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        try:
            if name == "steps" and equals:
                first, colon, last = value.partition(":")
                window = int(convert(first or "0", int)), float(convert(last, int)) if last else math.inf
                if not colon or not 0 <= window[0] < window[1]:
                    raise ValueError
                scope = replace(scope, first=window[0], last=window[1])
            elif name in ("life", "every") and equals:
                if (count := int(convert(value, int))) < 1:
                    raise ValueError
                scope = replace(scope, life=count) if name == "life" else replace(scope, every=count)
            elif name == "max" and equals:
                if (limit := float(convert(value, float))) <= 0:
                    raise ValueError
                scope = replace(scope, limit=limit)
            else:
                name = ""
                raise ValueError
        except ValueError:
            right = {"steps": "@steps=0:500", "life": "@life=1", "every": "@every=4", "max": "@max=100"}
            which = right.get(name, ", ".join(right.values()))
            raise ValueError(f"@{word} is no scope: it is written {which}") from None
    return scope


def fitting(available: Mapping[str, Component], env: str) -> list[str]:
    """The named rewards that mean something in an environment."""
    return [
        name
        for name, reward in NAMED.items()
        if (not reward.envs or env in reward.envs) and set(reward.weights(1.0, 1.0)) <= set(available)
    ]
