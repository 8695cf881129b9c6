"""Example of a user-defined vector environment.

bestiary train examples/signal_env.py:Signal --length 8
"""

import numpy as np

from bestiary.envs.vector_env import VectorEnv, initial_step, spawn_seeds
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step


class Signal(VectorEnv):
    """In each step, the left or the right lamp is on. The reward is 1 if the action names the lamp that is on.

    An episode has `length` steps.
    """

    default_steps = 50_000
    has_lives = False

    def __init__(self, num_envs: int, seed: int | np.random.SeedSequence, *, length: int = 10):
        self.num_envs = num_envs
        self.observation_spec = {"vector": ArraySpec((2,), "float32")}
        self.action_spec = ActionSpec(("left", "right"))
        self.measures_spec = {"correct": ArraySpec((), "float32")}
        self.tasks = ("signal",)
        self.length = length
        self.generators = [np.random.default_rng(s) for s in spawn_seeds(seed, num_envs)]  # one per environment
        self.clock = np.zeros(num_envs, np.int64)  # steps since the start of the episode

    def reset(self) -> Step:
        self.clock[:] = 0
        return initial_step(self._observe(), {"correct": np.zeros(self.num_envs, np.float32)})

    def send(self, actions: np.ndarray) -> None:
        self.actions = actions

    def recv(self) -> Step:
        correct = (self.actions == self.lamp).astype(np.float32)
        self.clock += 1
        done = self.clock == self.length
        self.clock[done] = 0
        return Step(
            observation=self._observe(),  # in rows with `done`, this is the first observation of the next episode
            reward=correct,
            done=done,
            truncated=np.zeros(self.num_envs, bool),
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
            measures={"correct": correct},
        )

    def _observe(self) -> Arrays:
        self.lamp = np.array([generator.integers(2) for generator in self.generators])
        return {"vector": np.eye(2, dtype=np.float32)[self.lamp]}
