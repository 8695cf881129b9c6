"""Functions of users that return Gymnasium vector environments (`file.py:make`)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.envs import make_env
from bestiary.envs.vector_env import VectorEnv
from bestiary.utils.errors import RunError, UserError

FILE = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

class Count(gymnasium.Env):
    '''The observation is the number of steps of the episode. A time limit ends episodes of 3 steps.'''
    observation_space, action_space = Box(0, 9, (1,), np.float32), Discrete(2)
    def __init__(self, limit=3, render_mode=None):
        self.limit, self.render_mode = limit, render_mode
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.clock += 1
        ended = self.clock == self.limit
        terminated = bool(ended and action)
        return np.full(1, self.clock, np.float32), 1.0, terminated, ended and not action, {"twice": 2.0 * self.clock}
    def render(self):
        return np.full((8, 8, 3), self.clock, np.uint8)

def sync(num_envs, mode, limit, **kwargs):
    return SyncVectorEnv([lambda: Count(limit, **kwargs)] * num_envs, autoreset_mode=mode)

def same_step(num_envs, render_mode=None, *, limit: int = 3):
    return sync(num_envs, AutoresetMode.SAME_STEP, limit, render_mode=render_mode)
def disabled(num_envs, *, limit: int = 3):
    return sync(num_envs, AutoresetMode.DISABLED, limit)
def next_step(num_envs):
    return sync(num_envs, AutoresetMode.NEXT_STEP, 3)
def too_few(num_envs):
    return sync(1, AutoresetMode.SAME_STEP, 3)
def single(num_envs):
    return Count()

class Fast(VectorEnv):
    '''Vectorised by hand. Its arrays are reused, and its seed must be one number.'''
    metadata = {"autoreset_mode": AutoresetMode.DISABLED}
    def __init__(self, num_envs, *, wrong: bool = False):
        self.num_envs, self.wrong = num_envs, wrong
        self.single_observation_space, self.single_action_space = Box(0, 9, (1,), np.float32), Discrete(2)
        self.action_space = gymnasium.vector.utils.batch_space(Discrete(2), num_envs)
        self.clock = np.zeros((num_envs, 1), np.float32)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock[options["reset_mask"] if options else slice(None)] = 0
        return self.clock, {}
    def step(self, actions):
        self.clock += 1
        ended = self.clock[:, 0] == 3
        info = {"twice": 2 * self.clock[:, 0], "_twice": np.ones(self.num_envs, bool)}
        observation = self.clock[:, :0] if self.wrong else self.clock
        return observation, np.ones(self.num_envs), ended & (actions == 1), ended & (actions == 0), info
"""


@pytest.fixture
def file(tmp_path: Path) -> None:
    (tmp_path / "vec.py").write_text(FILE)


def play(pool: VectorEnv, actions: list[list[int]]) -> list[list[float]]:
    """Return per step the observations, the flags, the final observations and the measure of a pool."""
    rows = [[*pool.reset().observation["vector"][:, 0]]]
    for action in actions:
        pool.send(np.array(action))
        step = pool.recv()
        final: Any = step.final["vector"][:, 0] if step.final else []
        numbers = (step.observation["vector"][:, 0], step.done, step.truncated, final, step.measures["twice"])
        rows.append([float(x) for array in numbers for x in array])
    pool.close()
    return rows


@pytest.mark.parametrize("name", ["same_step", "disabled", "Fast"])
def test_each_autoreset_mode_gives_the_steps_of_single_environments(file: None, name: str) -> None:
    actions = [[0, 1], [0, 1], [0, 1], [1, 0], [1, 0], [1, 0], [0, 0]]
    assert play(make_env(f"vec.py:{name}", 2), actions) == [
        [0, 0],
        [1, 1, 0, 0, 0, 0, 2, 2],
        [2, 2, 0, 0, 0, 0, 4, 4],
        [0, 0, 1, 1, 1, 0, 3, 6, 6],  # the first row is truncated, the second one terminated
        [1, 1, 0, 0, 0, 0, 2, 2],
        [2, 2, 0, 0, 0, 0, 4, 4],
        [0, 0, 1, 1, 0, 1, 3, 6, 6],
        [1, 1, 0, 0, 0, 0, 2, 2],
    ]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("next_step", ["NEXT_STEP", "SAME_STEP and DISABLED"]),
        ("too_few", ["returned 1 environments instead of 4"]),
        ("single", ["Count", "gymnasium.vector.VectorEnv"]),
    ],
)
def test_other_vector_environments_are_refused_in_one_line(file: None, name: str, facts: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        make_env(f"vec.py:{name}", 4)
    assert all(fact in str(raised.value) for fact in facts), raised.value
    assert "\n" not in str(raised.value)


def test_wrong_observations_name_the_file_and_the_step(file: None) -> None:
    pool = make_env("vec.py:Fast", 2, wrong=True)
    pool.reset()
    pool.send(np.zeros(2, np.int64))
    with pytest.raises(RunError, match=r"vec\.py:Fast.*step 1.*float32\[2, 1\], got float32\[2, 0\]"):
        pool.recv()


@pytest.mark.parametrize("name", ["same_step", "disabled", "Fast"])
def test_training_and_evaluation(file: None, name: str) -> None:
    limit: dict[str, Any] = {} if name == "Fast" else {"limit": 5}
    run = bestiary.train(f"vec.py:{name}", run_dir="r", steps=200, runtime="serial", num_envs=4, batch_size=4, **limit)
    length = limit.get("limit", 3)
    assert set(run.episodes["length"]) == {length}
    assert set(run.episodes["twice"]) == {length * (length + 1)}
    assert bestiary.evaluate(run, episodes=3).mean == length


def test_a_function_with_render_mode_can_be_rendered(file: None) -> None:
    pool = make_env("vec.py:same_step", 2, render=True)
    pool.reset()
    assert [image.shape for image in pool.render()] == [(8, 8, 3)] * 2
    with pytest.raises(UserError, match="no parameter render_mode"):
        make_env("vec.py:disabled", 2, render=True)
