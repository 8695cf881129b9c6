"""What is rewarded: components that environments emit, and weightings of them that are trained on or only watched.

    --reward fuel:10                       a named reward and its strength (and :base, where it has one: pacifist:20:10)
    --reward collected=1,expired=-0.5      components and their weights
    --reward pacifist:20,fire=-1           several, added up
    --reward score=1@life=1@max=100        within a scope: only the first life, and at most 100 a step
    --reward my_reward.py:careful          a function of the user's own: measures by name, [N] each -> rewards [N]

Scopes: `steps=A:B` decisions A to B-1 of a game, `life=K` the K-th life, `every=K` each K-th decision of a game, and `max=X`,
which limits the component to [-X,X] before it is weighted.

A RewardedPool is a pool whose reward is the trained weighting. Its measures have every component, the trained reward as
`trained`, and each true one as `true`, `true_2`, ...: nothing of a true reward reaches the agent or the learner.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bestiary import plugins
from bestiary.envs.pool import Pool
from bestiary.errors import RunError, UserError
from bestiary.options import convert, suggest
from bestiary.rollout import Arrays, ArraySpec, Step

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
class Rewards:
    """What a run trains on and what it only watches, as its user wrote it; None: the environment's own reward."""

    trained: str | None = None
    true: str | None = None

    @property
    def plain(self) -> bool:
        """Nothing was asked for: pools are left as they are."""
        return self.trained is None and self.true is None

    @property
    def channels(self) -> tuple[str, ...]:
        """The true rewards by the names that their measures have."""
        if self.plain:
            return ()
        return tuple("true" if k == 0 else f"true_{k + 1}" for k in range(len(self.objectives)))

    @property
    def objectives(self) -> list[str | None]:
        """The true rewards, each as it was written; several stand between semicolons."""
        return [self.true] if self.true is None else [part.strip() for part in self.true.split(";")]


PLAIN = Rewards()


# --- weightings ---


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


def leader(name: str, available: Mapping[str, Component]) -> str:
    """The component that this one is under another name: in Atari `reward` is `score`."""
    component = available[name]
    tied = available.get(component.tied)
    return component.tied if tied is not None and component.values == tied.values else name


def canonical(reward: Reward, available: Mapping[str, Component]) -> str:
    """The same for all ways to write the same reward; a function of the user's own by what its file says."""
    if isinstance(reward, Custom):
        path, name = plugins.split(reward.name)
        return f"{plugins.digest(path)}:{name}"
    return ",".join(sorted(f"{leader(t.component, available)}={t.weight!r}{t.scope}" for t in reward.terms))


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
        return {leader(term.component, available): term for term in word.terms}

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
        terms = (Term(name, _number(weight, f"the weight of {name}"), scope),)
        return _Word(text.strip(), name, scope, terms, listed=True)
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


# --- pools ---


def components_of(pool: Pool) -> dict[str, Component]:
    """Everything that a reward in this pool can be made of: what every environment has, what this one says that it has, and
    whatever else it measures in one number."""
    own: Mapping[str, Component] = getattr(pool, "components", {})
    measured = {
        name: Component("a measure of the environment") for name, s in pool.measures_spec.items() if not s.shape
    }
    return {**GENERIC, **measured, **own}


def idle(reward: Reward, pool: Pool) -> list[str]:
    """Which terms of a reward can never count in a pool, as far as it says how its games go: a line each."""
    lives, longest = getattr(pool, "has_lives", True), getattr(pool, "longest_game", None) or math.inf
    found = []
    for term in reward.terms if isinstance(reward, Weighting) else ():
        scope = term.scope
        if scope.life > 1 and not lives:
            found.append(f"{term} never counts: {pool.tasks[0]} has one life")
        elif scope.first >= longest or scope.every > longest:
            found.append(f"{term} never counts: a game of {pool.tasks[0]} has at most {longest} decisions")
    return found


class RewardedPool:
    """A pool whose reward is a weighting of its components, with true rewards beside it as measures."""

    def __init__(self, pool: Pool, rewards: Rewards):
        if hasattr(pool, "watch"):
            pool.watch()
        self.inner, self.num_envs, self.rewards = pool, pool.num_envs, rewards
        self.components = components_of(pool)
        env, problems = pool.tasks[0], list[str]()
        made: list[Reward] = []
        wanted = [("--reward", rewards.trained), *(("--true-reward", text) for text in rewards.objectives)]
        for flag, text in wanted:
            try:
                made.append(make_reward(text, self.components, env, flag))
                problems += [f"{flag} {text}: {line}" for line in idle(made[-1], pool)]
            except UserError as error:
                problems += error.problems
        if problems:
            pool.close()
            raise UserError(*dict.fromkeys(problems))
        self.trained, self.true = made[0], dict(zip(rewards.channels, made[1:], strict=True))
        self.observation_spec, self.action_spec = pool.observation_spec, pool.action_spec
        self.tasks, self.frames_per_step, self.saveable = pool.tasks, pool.frames_per_step, pool.saveable
        self.stacked: dict[str, int] = getattr(pool, "stacked", {})
        added = [*self.components, "trained", *self.true]
        self.measures_spec = {**pool.measures_spec, **dict.fromkeys(added, SCALAR)}
        self.clock = np.zeros(self.num_envs, np.int64)  # decisions of the running game
        self.life = np.ones(self.num_envs, np.int64)  # the how-manyeth of it
        self.before = np.full(self.num_envs, -1, np.int64)  # the last action of the episode
        self.sent = np.zeros(self.num_envs, np.int64)

    def add(self, channel: str, text: str | None) -> None:
        """Measure one more reward, under a name of its own; before the first reset."""
        self.true[channel] = make_reward(text, self.components, self.tasks[0])
        self.measures_spec |= {channel: SCALAR}

    def reset(self) -> Step:
        step = self.inner.reset()
        self.clock[:], self.life[:], self.before[:] = 0, 1, -1
        nothing = {name: np.zeros(self.num_envs, np.float32) for name in self.measures_spec}
        return replace(step, measures={**nothing, **step.measures})

    def send(self, actions: np.ndarray) -> None:
        self.inner.send(actions)
        self.sent = np.array(actions, np.int64)

    def recv(self) -> Step:
        step = self.inner.recv()
        measures: Arrays = {
            **step.measures,
            "reward": step.reward,
            "alive": np.ones(self.num_envs, np.float32),
            "changed": ((self.sent != self.before) & (self.before >= 0)).astype(np.float32),
        }
        found = {"trained": self._judge(self.trained, measures, "--reward")}
        found |= {name: self._judge(reward, measures, "--true-reward") for name, reward in self.true.items()}
        lost = measures["lives_lost"] if "lives_lost" in measures else step.done & ~step.game_over
        self.clock = np.where(step.game_over, 0, self.clock + 1)
        self.life = np.where(step.game_over, 1, self.life + lost.astype(np.int64))
        self.before = np.where(step.done, -1, self.sent)
        return replace(step, reward=found["trained"].copy(), measures={**measures, **found})

    def _judge(self, reward: Reward, measures: Arrays, flag: str) -> np.ndarray:
        try:
            found = reward(measures, self.clock, self.life)
        except RunError as error:
            raise RunError(f"{flag} {reward} {error}") from error
        except Exception as error:
            cause = plugins.blame(error) or f"{type(error).__name__}: {error}"
            raise RunError(f"{flag} {reward} failed: {cause}") from error
        if not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found))[0])
            raise RunError(
                f"{flag} {reward} is {found[row]} in decision {self.clock[row] + 1} of a game of environment {row}: a reward "
                "is a finite number"
            )
        return found

    def render(self) -> list[np.ndarray]:
        return self.inner.render()

    def save(self) -> Arrays:
        if not self.saveable:
            return {}
        own = {"clock": self.clock, "life": self.life, "before": self.before}
        return {**self.inner.save(), **{f"reward.{name}": array.copy() for name, array in own.items()}}

    def load(self, state: Arrays) -> None:
        own = {name: state[f"reward.{name}"].copy() for name in ("clock", "life", "before")}
        self.clock, self.life, self.before = own["clock"], own["life"], own["before"]
        self.inner.load({name: array for name, array in state.items() if not name.startswith("reward.")})

    def close(self) -> None:
        self.inner.close()


def bare(pool: Pool) -> Any:
    """The pool itself, whatever reward is laid over it."""
    return pool.inner if isinstance(pool, RewardedPool) else pool


def try_rewards(pool: RewardedPool) -> None:
    """One step, so that a function of the user's own that fails or gives something else is found before any work."""
    if any(isinstance(reward, Custom) for reward in (pool.trained, *pool.true.values())):
        pool.reset()
        pool.send(np.zeros(pool.num_envs, np.int64))
        try:
            pool.recv()
        except RunError as error:
            raise UserError(str(error)) from error
