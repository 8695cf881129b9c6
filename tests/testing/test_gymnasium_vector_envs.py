"""check_env with Gymnasium vector environments: functions that return one, and subclasses of `VectorEnv`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from bestiary.testing import check_env
from tests.testing.helpers import assert_one_problem, find_problems


def cart(num_envs: int, render_mode: str | None = None, *, limit: int = 15) -> Any:
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs,
        "sync",
        max_episode_steps=limit,
        render_mode=render_mode,
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
    )


class Ring(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A random walk on a ring of cells. An episode ends in cell 0. The tests below break it in one place each."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int, *, cells: int = 6):
        self.num_envs = num_envs
        self.cells = cells
        self.single_observation_space = Discrete(cells)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.cell = self.start_cells()
        return self.cell.copy(), {}

    def start_cells(self) -> np.ndarray:
        return self.np_random.integers(1, self.cells, self.num_envs)

    def step(self, actions: np.ndarray) -> Any:
        self.cell = (self.cell + 2 * actions - 1) % self.cells
        done = self.cell == 0
        self.cell = np.where(done, self.start_cells(), self.cell)
        return self.cell.copy(), done.astype(np.float64), done, np.zeros(self.num_envs, bool), {}


def test_correct_gymnasium_vector_environments_pass(tmp_path: Path) -> None:
    check_env(cart, limit=10)
    check_env(Ring, cells=5)
    file = tmp_path / "vec.py"
    file.write_text(
        "import gymnasium\n"
        "def make(num_envs, *, env_id: str = 'CartPole-v1'):\n"
        "    options = {'autoreset_mode': gymnasium.vector.AutoresetMode.SAME_STEP}\n"
        "    return gymnasium.make_vec(env_id, num_envs, 'sync', vector_kwargs=options)\n"
    )
    check_env(f"{file}:make")


def next_step(num_envs: int) -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs, "sync")


def two(num_envs: int) -> Any:
    return cart(2)


class WrongReward(Ring):
    def step(self, actions: np.ndarray) -> Any:
        observation, reward, *rest = super().step(actions)
        return observation, reward[:, None], *rest


class Unseeded(Ring):
    def start_cells(self) -> np.ndarray:
        return np.random.default_rng().integers(1, self.cells, self.num_envs)


def positional(num_envs: int, limit: int = 15) -> Any:
    return cart(num_envs, limit=limit)


@pytest.mark.parametrize(
    ("component", "facts"),
    [
        (next_step, ("autoreset_mode", "SAME_STEP")),
        (two, ("returned 2 environments", "1")),
        (WrongReward, ("reward", "[1, 1]")),
        (Unseeded, ("equal seeds", "differ")),
        (positional, ("limit", "keyword-only")),
    ],
)
def test_each_mistake_is_one_problem(component: Callable[..., Any], facts: tuple[str, ...]) -> None:
    assert_one_problem(find_problems(check_env, component), *facts)
