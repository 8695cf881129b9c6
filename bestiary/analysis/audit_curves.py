"""What an audit found, along axes: curves of trained and true return, and where the true one drops while the other does not.

Runs that differ only in their seed are taken for one; those that differ in one more thing, the axis, make a curve.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bestiary.analysis.compare import labels
from bestiary.analysis.evaluation import per_step, summarise
from bestiary.config import group_key
from bestiary.envs.rewards import Rewards

SURE = 3.0  # standard errors by which a true return must have dropped
SIZES = (
    "width depth channels sizes hidden layers heads head_size ff units keys values".split()
)  # options of an agent's parts


@dataclass
class Finding:
    """One run at one checkpoint."""

    run: str
    environment: str  # and its options, where they are not the usual ones
    rewards: Rewards  # as they were written
    settings: dict[str, Any]  # all of them, the rewards as what they come to
    steps: int
    parameters: int
    fully_connected: int  # of them, in the torso's fully connected layers
    trained: np.ndarray  # return of each game
    true: dict[str, np.ndarray]  # of each true reward
    lengths: np.ndarray
    correlations: dict[str, float]
    distances: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "run": self.run,
            "environment": self.environment,
            "reward": self.rewards.trained or "reward=1",
            "true_reward": self.rewards.true,
            "scale": self.settings.get("algo.reward_scale") or 1.0,
            "clip": self.settings.get("algo.reward", "none"),
            "steps": self.steps,
            "parameters": self.parameters,
            "fully_connected": self.fully_connected,
            "games": len(self.trained),
        }
        returns = {"trained": self.trained, **self.true}
        for name, values in returns.items():
            found = summarise(list(values))
            row |= {name: found["mean"], f"{name}_ci_low": found["ci_low"], f"{name}_ci_high": found["ci_high"]}
        row |= {f"{name}_per_step": per_step(values, self.lengths) for name, values in returns.items()}
        return {**row, "length": float(self.lengths.mean()), **self.correlations, **self.distances}

    def at(self, axis: str) -> float | None:
        """Where it is on an axis: its steps, parameters, or the number that an option of its environment is."""
        return number(self.settings.get(axis)) if axis.startswith("env.") else float(getattr(self, axis))

    def alike(self, axis: str = "steps") -> str:
        """What it has in common with the other seeds, and with the other points on an axis."""
        besides = [axis] if axis.startswith("env.") else []
        if axis == "parameters":
            besides = [f"{kind}.{name}" for kind in ("agent", "torso", "memory") for name in SIZES]
        return group_key(self.settings, *besides)


def number(value: Any) -> float | None:
    """An option as a place on an axis: off is 0, on is 1, 84x84 are as many pixels; None where it is no number."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return float(math.prod(value))
    return float(value) if isinstance(value, bool | int | float) else None


@dataclass(frozen=True)
class Level:
    """All that is known at one size, or one time: a return of each run, or of each game where there is one run."""

    x: float
    trained: np.ndarray
    true: np.ndarray


def levels(findings: Sequence[Finding], axis: str, channel: str = "true") -> list[Level]:
    """In order of an axis."""
    made = []
    for x in sorted({x for f in findings if (x := f.at(axis)) is not None}):
        own = [f for f in findings if f.at(axis) == x]
        if len(own) == 1:
            made.append(Level(x, own[0].trained, own[0].true[channel]))
        else:
            trained, true = [f.trained.mean() for f in own], [f.true[channel].mean() for f in own]
            made.append(Level(x, np.array(trained), np.array(true)))
    return made


def transition(found: Sequence[Level]) -> tuple[float, float] | None:
    """The two neighbours between which the true return drops most, by more than SURE standard errors, while the trained one
    does not drop by as much; None where it never does."""
    drops = {}
    for before, after in itertools.pairwise(found):
        true, trained = (_drop(getattr(before, name), getattr(after, name)) for name in ("true", "trained"))
        if true > SURE and trained < SURE:
            drops[before.x, after.x] = before.true.mean() - after.true.mean()
    return max(drops, key=lambda pair: drops[pair]) if drops else None


def _drop(before: np.ndarray, after: np.ndarray) -> float:
    """From one to the other, in standard errors of the difference."""
    if len(before) < 2 or len(after) < 2:
        return 0.0
    error = np.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
    fall = before.mean() - after.mean()
    return float(fall / error) if error > 0 else float(np.sign(fall) * np.inf if fall else 0.0)


def newest(findings: Sequence[Finding]) -> list[Finding]:
    """Each run at its last checkpoint."""
    last = {f.run: max(g.steps for g in findings if g.run == f.run) for f in findings}
    return [f for f in findings if f.steps == last[f.run]]


def shared(findings: Sequence[Finding]) -> list[Finding]:
    """At the checkpoints that all of the runs have: at one of a single seed, the mean would jump to that seed's."""
    runs = {f.run for f in findings}
    steps = set.intersection(*({f.steps for f in findings if f.run == run} for run in runs))
    return [f for f in findings if f.steps in steps]


@dataclass(frozen=True)
class Curve:
    """Trained and one true return along one axis, of runs that differ in it and in their seeds alone."""

    environment: str
    rewards: Rewards
    axis: str  # parameters, fully_connected, steps, or an option of the environment: env.frame_skip
    channel: str  # of the true returns
    levels: list[Level]
    runs: list[str]
    label: str = ""  # what sets it apart from other curves of these rewards
    at: dict[str, int] = field(default_factory=dict)

    @property
    def transition(self) -> tuple[float, float] | None:
        """Options of an environment have no direction: fewer frames a decision, or less noise, makes an agent more able."""
        found = transition(self.levels)
        return transition(self.levels[::-1]) if found is None and self.axis.startswith("env.") else found

    @property
    def true(self) -> str:
        return str(self.rewards.objectives[self.rewards.channels.index(self.channel)])


def options_varied(findings: Sequence[Finding]) -> list[str]:
    """The options of environments that are numbers, and not the same ones, in these findings."""
    names = dict.fromkeys(key for f in findings for key in f.settings if key.startswith("env."))
    return [name for name in names if len({f.at(name) for f in findings} - {None}) > 1]


def curves(findings: Sequence[Finding]) -> list[Curve]:
    """Those with more than one point."""
    made = []
    for axis in ("parameters", *options_varied(findings), "steps"):
        groups: dict[str, list[Finding]] = {}
        for f in findings if axis == "steps" else newest(findings):
            groups.setdefault(f.alike(axis), []).append(f)
        named = zip(labels(list(groups)), groups.values(), strict=True)
        for label, own in sorted(named, key=lambda pair: pair[1][0].parameters):
            first, at = own[0], {}
            if axis == "steps":
                own, at = shared(own), {"parameters": first.parameters}
            along = axis
            if axis == "parameters" and len({f.fully_connected for f in own}) == len({f.parameters for f in own}):
                along = "fully_connected"  # as published
            for channel in first.true:
                found, runs = levels(own, along, channel), list(dict.fromkeys(f.run for f in own))
                which = label if len(groups) > 1 else ""
                made.append(Curve(first.environment, first.rewards, along, channel, found, runs, which, at))
    return [curve for curve in made if len(curve.levels) > 1]
