"""What is rewarded: components that environments emit, and weightings of them (envs/weightings.py) that are trained on or only
watched.

A RewardedPool is a pool whose reward is the trained weighting. Its measures have every component, the trained reward as
`trained`, and each true one as `true`, `true_2`, ...: nothing of a true reward reaches the agent or the learner.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bestiary import plugins
from bestiary.envs.pool import Pool
from bestiary.envs.weightings import GENERIC, SCALAR, Component, Custom, Reward, Weighting, make_reward
from bestiary.errors import RunError, UserError
from bestiary.rollout import Arrays, Step


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
