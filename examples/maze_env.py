"""An environment of your own: `bestiary train examples/maze_env.py:Maze --size 9`."""

from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Discrete

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right
WALL, FLOOR, GOAL, PLAYER = np.array([(0, 0, 0), (40, 40, 40), (0, 120, 0), (255, 200, 0)], np.uint8)


class Maze(Env):
    """Find the way from anywhere in a maze to its far corner: +1 there, -0.01 for each step before."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None, *, size: int = 9):
        if size < 5 or size % 2 == 0:
            raise ValueError(f"a maze's size is odd and at least 5, not {size}")
        self.render_mode, self.size, self.goal = render_mode, size, (size - 2, size - 2)
        self.observation_space = Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = Discrete(len(MOVES))
        self.floor = np.zeros((size, size), bool)
        self._carve(np.array([1, 1]), np.random.default_rng(size))  # one maze for each size

    def _carve(self, cell: np.ndarray, rng: np.random.Generator) -> None:
        """Open a way to every cell not yet reached, in random order: exactly one way then joins any two."""
        self.floor[tuple(cell)] = True
        for move in rng.permutation(MOVES):
            beyond = cell + 2 * move
            if (beyond > 0).all() and (beyond < self.size).all() and not self.floor[tuple(beyond)]:
                self.floor[tuple(cell + move)] = True
                self._carve(beyond, rng)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random, the only source of chance from here on
        self.player, self.age = self.np_random.choice(np.argwhere(self.floor)[:-1]), 0  # the last is the goal
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        there = self.player + MOVES[action]
        self.player = there if self.floor[tuple(there)] else self.player
        self.age += 1
        arrived = tuple(self.player) == self.goal
        return self.render(), 1.0 if arrived else -0.01, arrived, self.age >= self.size**2, {}

    def render(self) -> np.ndarray:
        """The picture that the agent sees, and that a movie shows: uint8 [H,W,3]."""
        picture = np.where(self.floor[..., None], FLOOR, WALL)
        picture[self.goal], picture[tuple(self.player)] = GOAL, PLAYER
        return picture
