"""Example of user-defined vector environments: three tasks whose rewards differ in size and in frequency.

bestiary train examples/lock_tasks.py:{Frequent,Rare,Late} --critic popart
"""

from typing import ClassVar

import numpy as np

from bestiary.envs.vector_env import VectorEnv, check_actions, initial_step
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step

NUM_TASKS = 3


class Lock(VectorEnv):
    """N combination locks. An episode ends after a wrong digit or after the last digit.

    Each digit has 3 values, so a uniformly random policy opens the lock in one of 3^digits episodes. The observation is
    the task and the number of digits entered so far, as a one-hot vector.
    """

    task_index: ClassVar[int]
    reward_per_digit: ClassVar[float] = 0.0
    reward_at_end: ClassVar[float] = 0.0
    first_rewarded_step: ClassVar[int] = 0  # in earlier steps of the training, the reward is 0

    saveable = True
    has_lives = False

    def __init__(self, num_envs: int, seed: int | np.random.SeedSequence, *, digits: int = 7):
        self.num_envs = num_envs
        self.digits = digits
        self.combination = np.random.default_rng(self.task_index).integers(3, size=digits)
        self.tasks = (type(self).__name__,)
        self.observation_spec = {"vector": ArraySpec((NUM_TASKS * digits,), "float32")}
        self.action_spec = ActionSpec(("0", "1", "2"))
        self.measures_spec = {}
        self.entered = np.zeros(num_envs, np.int64)  # number of digits entered so far
        self.num_steps = np.zeros(1, np.int64)  # number of steps since the start of the training

    def reset(self) -> Step:
        self.entered[:] = 0
        return initial_step(self._observe(), {})

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs)

    def recv(self) -> Step:
        correct = self.sent == self.combination[self.entered]
        opened = correct & (self.entered == self.digits - 1)
        done = ~correct | opened
        self.entered = np.where(done, 0, self.entered + 1)
        reward = self.reward_per_digit * correct + self.reward_at_end * opened
        reward *= self.num_steps >= self.first_rewarded_step
        self.num_steps += 1
        return Step(
            observation=self._observe(),
            reward=reward.astype(np.float32),
            done=done,
            truncated=np.zeros(self.num_envs, bool),
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
        )

    def _observe(self) -> Arrays:
        return {
            "vector": np.eye(NUM_TASKS * self.digits, dtype=np.float32)[self.task_index * self.digits + self.entered]
        }

    def save(self) -> Arrays:
        return {"entered": self.entered.copy(), "num_steps": self.num_steps.copy()}

    def load(self, state: Arrays) -> None:
        self.entered = state["entered"].copy()
        self.num_steps = state["num_steps"].copy()


class Frequent(Lock):
    """Reward 10 for each correct digit."""

    task_index = 0
    reward_per_digit = 10.0


class Rare(Lock):
    """Reward 1 for opening the lock."""

    task_index = 1
    reward_at_end = 1.0


class Late(Lock):
    """Reward 100 for opening the lock, but 0 in the first 10,000 steps of each environment."""

    task_index = 2
    reward_at_end = 100.0
    first_rewarded_step = 10_000
