"""The Pool: N environments that step together. Every family of environments returns one.

The loop that every user of a pool runs:

    step = pool.reset()                  # all rows done: each opens its first episode
    while True:
        pool.send(actions)               # int64 [N]; returns at once where the pool has threads of its own
        step = pool.recv()               # all N rows, row i is environment i

A pool resets finished episodes itself. Where `step.done[i]`, the observation already opens the next episode; where it was
a time limit that ended the last one, `step.truncated[i]` is set and `step.final` holds what it ended on. No step that an
agent did not decide is ever seen.

A pool that has more to tell about what a step brought than its reward may have a method `watch()`, called before `reset` where
rewards are made of components (envs/weightings.py): it then adds them to `measures_spec` and to the measures of its steps, and
names and explains them in `components`. Any other measure of one number is a component as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from bestiary.errors import UserError
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, ObservationSpec, Step


class Pool(Protocol):
    num_envs: int
    observation_spec: ObservationSpec
    action_spec: ActionSpec
    measures_spec: dict[str, ArraySpec]
    tasks: tuple[str, ...]  # the names of the tasks; step.task counts into them
    frames_per_step: int  # emulator frames that one decision lasts
    saveable: bool  # save() and load() bring it back exactly
    # A pool may also have `stacked`: for a kind of picture, how many frames it shows side by side. It promises that each
    # shows the frames before it and one more, and in a new episode one frame many times (`FrameStack`): what travels far
    # is then only the newest. And, for judging rewards before any work: `has_lives`, False where a game is one episode,
    # and `longest_game`, the decisions that it has at most. And, for lenses: `whole_screen`, True where what is rendered is
    # all that the agent sees and nothing else, at whatever size.

    def reset(self) -> Step: ...

    def send(self, actions: np.ndarray) -> None: ...

    def recv(self) -> Step: ...

    def render(self) -> list[np.ndarray]:
        """RGB pictures uint8 [H,W,3], one an environment; only for pools made with `render=True`."""
        ...

    def save(self) -> Arrays:
        """The pool's whole state as arrays, between a recv and a send; empty where it cannot be saved."""
        ...

    def load(self, state: Arrays) -> None:
        """Bring back a saved state, in a pool just made with the same name, options and seed (instead of reset)."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Interface:
    """What an agent has to know of a pool; for those that have no pool themselves."""

    observation_spec: ObservationSpec
    action_spec: ActionSpec
    tasks: tuple[str, ...]

    @classmethod
    def of(cls, pool: Pool) -> "Interface":
        return cls(pool.observation_spec, pool.action_spec, pool.tasks)


def first_step(observation: Arrays, measures: Arrays) -> Step:
    """The step that opens a pool: every row starts an episode, nothing has been earned."""
    n = len(next(iter(observation.values())))
    no = np.zeros(n, bool)
    return Step(observation, np.zeros(n, np.float32), np.ones(n, bool), no, no.copy(), np.zeros(n, np.int64), measures)


def spawn_seeds(seed: int | np.random.SeedSequence, count: int) -> list[int]:
    """One independent 31-bit seed for each environment of a pool."""
    sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    return [int(child.generate_state(1)[0] >> 1) for child in sequence.spawn(count)]


def check_actions(actions: np.ndarray, spec: ActionSpec, num_envs: int) -> np.ndarray:
    """EnvPool takes actions out of range silently; a pool of ours does not."""
    whole = actions.dtype.kind in "iu" and actions.shape == (num_envs,)
    if not whole or actions.min(initial=0) < 0 or actions.max(initial=0) >= spec.n:
        raise ValueError(f"actions must be {num_envs} whole numbers in 0..{spec.n - 1}, got {actions!r}")
    return actions


def place_of(action: str, pool: Pool, who: object) -> int:
    """Where a pool has the action of this name; `who` is named where it has none."""
    names = pool.action_spec.names
    if action not in names:
        raise UserError(
            f"{who}: cannot follow where {action} is played; it has only {', '.join(names)} in {pool.tasks[0]}"
        )
    return names.index(action)


def check_finite(step: Step, names: Sequence[str]) -> str | None:
    """Which environment and value are not finite, in words; None where all are."""
    every, cut = np.arange(len(step.reward)), np.flatnonzero(step.truncated)
    suspects = [("reward", step.reward, every)]
    suspects += [(f"observation {kind}", array, every) for kind, array in step.observation.items()]
    suspects += [(f"final observation {kind}", array, cut) for kind, array in step.final.items()]
    for what, array, rows in suspects:
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(rows[np.argwhere(~np.isfinite(array))[0][0]])
            return f"environment {row} ({names[int(step.task[row])]}) gave a {what} that is not finite"
    return None
