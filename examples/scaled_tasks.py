"""Example of user-defined vector environments: three tasks whose rewards differ by factors of 30 and 1,000.

bestiary train examples/scaled_tasks.py:{Small,Medium,Large} --critic popart --runtime serial
bestiary study studies/popart-scales.toml
"""

from typing import ClassVar

import numpy as np

from bestiary.envs.vector_env import VectorEnv, check_actions, initial_step
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step

NUM_TASKS = 3
NUM_CUES = 3
LENGTH = 4  # steps of an episode
VALUES = np.array([1.0, 0.3, 0.0])  # rewards of the three boxes, in units of `scale`: gold, silver, empty


class Boxes(VectorEnv):
    """N games in which each action opens a box: one with gold, one with silver, one that is empty.

    The observation shows the task, a random cue and the step, as one-hot vectors. Task and cue determine which action
    opens which box. The reward is `scale` for gold, 0.3 `scale` for silver and 0 for the empty box. An episode has
    LENGTH steps, so the optimal return is LENGTH `scale`, and a random policy has a mean return of 0.43 times that. If
    rewards are clipped to [-1,1], gold and silver are worth the same in the tasks with a larger scale.
    """

    task_index: ClassVar[int]
    scale: ClassVar[float]

    has_lives = False

    def __init__(self, num_envs: int, seed: int | np.random.SeedSequence):
        self.num_envs = num_envs
        self.tasks = (type(self).__name__,)
        self.observation_spec = {"vector": ArraySpec((NUM_TASKS + NUM_CUES + LENGTH,), "float32")}
        self.action_spec = ActionSpec(("0", "1", "2"))
        self.measures_spec = {"gold": ArraySpec((), "float32")}
        self.generator = np.random.default_rng(seed)
        self.clock = np.zeros(num_envs, np.int64)

    def reset(self) -> Step:
        self.clock[:] = 0
        return initial_step(self._observe(), {"gold": np.zeros(self.num_envs, np.float32)})

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs)

    def recv(self) -> Step:
        box = (self.sent + self.cue + self.task_index) % len(VALUES)  # 0: gold, 1: silver, 2: empty
        self.clock += 1
        done = self.clock == LENGTH
        self.clock[done] = 0
        return Step(
            observation=self._observe(),
            reward=(self.scale * VALUES[box]).astype(np.float32),
            done=done,
            truncated=np.zeros(self.num_envs, bool),
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
            measures={"gold": (box == 0).astype(np.float32)},
        )

    def _observe(self) -> Arrays:
        self.cue = self.generator.integers(NUM_CUES, size=self.num_envs)
        task = np.zeros((self.num_envs, NUM_TASKS), np.float32)
        task[:, self.task_index] = 1
        cue, clock = np.eye(NUM_CUES, dtype=np.float32)[self.cue], np.eye(LENGTH, dtype=np.float32)[self.clock]
        return {"vector": np.concatenate([task, cue, clock], axis=1)}


class Small(Boxes):
    """Rewards of up to 1."""

    task_index = 0
    scale = 1.0


class Medium(Boxes):
    """Rewards of up to 30."""

    task_index = 1
    scale = 30.0


class Large(Boxes):
    """Rewards of up to 1,000."""

    task_index = 2
    scale = 1000.0
