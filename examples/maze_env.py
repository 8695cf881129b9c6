"""Example of a user-defined environment.

bestiary train examples/maze_env.py:Maze --size 9
"""

from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.spaces import Box, Discrete

MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # up, down, left, right
WALL, FLOOR, GOAL, PLAYER = np.array([(0, 0, 0), (40, 40, 40), (0, 120, 0), (255, 200, 0)], np.uint8)


class Maze(Env):
    """A maze with random start cells. The reward is +1 at the goal in the far corner and -0.01 for every other step."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None, *, size: int = 9):
        if size < 5 or size % 2 == 0:
            raise ValueError(f"size {size}: must be odd and at least 5")
        self.render_mode = render_mode
        self.size = size
        self.goal = (size - 2, size - 2)
        self.observation_space = Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = Discrete(len(MOVES))
        self.floor = np.zeros((size, size), bool)
        self._carve(np.array([1, 1]), np.random.default_rng(size))  # each size has one fixed maze

    def _carve(self, cell: np.ndarray, rng: np.random.Generator) -> None:
        """Connect all unvisited cells in random order (depth-first search). The result has no cycles."""
        self.floor[tuple(cell)] = True
        for move in rng.permutation(MOVES):
            neighbour = cell + 2 * move
            inside = (neighbour > 0).all() and (neighbour < self.size).all()
            if inside and not self.floor[tuple(neighbour)]:
                self.floor[tuple(cell + move)] = True
                self._carve(neighbour, rng)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)  # seeds self.np_random, the only source of randomness
        start_cells = np.argwhere(self.floor)[:-1]  # without the goal, which is the last floor cell
        self.player = self.np_random.choice(start_cells)
        self.num_steps = 0
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        target = self.player + MOVES[action]
        if self.floor[tuple(target)]:
            self.player = target
        self.num_steps += 1
        terminated = tuple(self.player) == self.goal
        truncated = self.num_steps >= self.size**2
        reward = 1.0 if terminated else -0.01
        return self.render(), reward, terminated, truncated, {}

    def render(self) -> np.ndarray:
        """Return the image that the agent observes and that videos show, uint8 [H,W,3]."""
        image = np.where(self.floor[..., None], FLOOR, WALL)
        image[self.goal] = GOAL
        image[tuple(self.player)] = PLAYER
        return image
