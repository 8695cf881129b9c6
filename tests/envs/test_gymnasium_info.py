"""Numbers in the `info` of Gymnasium environments become measures; messages about missing packages."""

import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.envs import make_env
from bestiary.envs.gymnasium_info import numbers_in
from bestiary.runs.csv_tables import read_columns

CORRIDOR = textwrap.dedent(
    """
    import numpy as np
    from gymnasium import Env
    from gymnasium.spaces import Box, Discrete


    class Corridor(Env):
        observation_space = Box(0, 1, (2,), np.float32)
        action_space = Discrete(2)
        {declaration}

        def __init__(self, *, length: int = 3):
            self.length = length

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.cell = self.steps = 0
            return np.zeros(2, np.float32), {{"distance": 99.0}}

        def step(self, action):
            self.cell += int(action)
            self.steps += 1
            info = {{"distance": self.length - self.cell, "text": "x", "array": np.zeros(3)}}
            terminated = self.cell == self.length
            if terminated or self.steps == 5:
                info["success"] = terminated
            return np.zeros(2, np.float32), 0.0, terminated, self.steps == 5, info
    """
)


@pytest.fixture
def corridor(tmp_path: Path) -> Path:
    """A user's file whose class names `success`, which occurs only in the last step of an episode."""
    path = tmp_path / "corridor.py"
    path.write_text(CORRIDOR.format(declaration='info_measures = ("success",)'))
    return path


def play(pool: Any, actions: list[list[int]]) -> dict[str, list[list[float]]]:
    """Return the values of each measure after the reset and after each step."""
    steps = [pool.reset()]
    for row in actions:
        pool.send(np.array(row))
        steps.append(pool.recv())
    pool.close()
    assert all(step.measures.keys() == pool.measures_spec.keys() for step in steps)
    assert all(array.dtype == np.float32 for step in steps for array in step.measures.values())
    return {name: [step.measures[name].tolist() for step in steps] for name in pool.measures_spec}


def test_measures_of_each_step_also_at_the_end_of_an_episode(corridor):
    """Environment 0 reaches its goal in the third step, environment 1 reaches its time limit in the fifth."""
    pool = make_env(f"{corridor}:Corridor", num_envs=2)
    measures = play(pool, [[1, 0], [1, 0], [1, 1], [0, 0], [0, 0], [1, 1]])
    assert measures == {
        "distance": [[0, 0], [2, 3], [1, 3], [0, 2], [3, 2], [3, 2], [2, 2]],
        "success": [[0, 0], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0], [0, 0]],
    }


def test_numbers_are_columns_of_episodes_and_components_of_rewards(corridor):
    run = bestiary.train(
        f"{corridor}:Corridor", run_dir="r", reward="success=2,distance=-0.1", steps=400, num_envs=4, runtime="serial"
    )
    episodes = read_columns(run.path / "episodes.csv")
    assert len(episodes["success"]) > 10
    assert set(episodes["success"]) == {0.0, 1.0}
    np.testing.assert_allclose(episodes["training_return"], 2 * episodes["success"] - 0.1 * episodes["distance"], 1e-5)


def test_a_registered_environment():
    """FrozenLake reports the probability of each transition, 1 or 1/3, and returns 1 for the initial state."""
    pool = make_env("gymnasium/FrozenLake-v1", num_envs=3)
    assert [*pool.measures_spec] == ["prob"]
    values = play(pool, [[1, 2, 3]] * 20)["prob"]
    assert values[0] == [0, 0, 0]
    assert {round(value, 2) for row in values[1:] for value in row} <= {0.33, 0.67, 1.0}
    run = bestiary.train("gymnasium/FrozenLake-v1", run_dir="lake", steps=400, num_envs=4, runtime="serial")
    assert (read_columns(run.path / "episodes.csv")["prob"] > 0).all()


def test_processes_give_the_same_measures():
    actions = np.random.default_rng(0).integers(4, size=(30, 2)).tolist()
    serial = play(make_env("gymnasium/Taxi-v4", num_envs=2, seed=3), actions)
    assert serial == play(make_env("gymnasium/Taxi-v4", num_envs=2, seed=3, processes=True), actions)


def test_a_number_that_appears_later_is_named_once_with_the_remedy(tmp_path, capsys):
    path = tmp_path / "undeclared.py"
    path.write_text(CORRIDOR.format(declaration=""))
    pool = make_env(f"{path}:Corridor", num_envs=1)
    assert [*pool.measures_spec] == ["distance"]
    play(pool, [[1]] * 9)
    warning = " ".join(capsys.readouterr().err.split())
    assert warning.count("success") == 2
    assert "info_measures = ('success',)" in warning


class Late(gymnasium.Env):
    """Has the number `bonus` in its `info` from the second step on."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.steps = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return 0, 0.0, False, False, {"bonus": 0.5} if self.steps > 1 else {}


def test_option_for_numbers_that_appear_later(monkeypatch, capsys):
    monkeypatch.setitem(gymnasium.registry, "Late-v0", gymnasium.envs.registration.EnvSpec("Late-v0", Late))
    play(make_env("gymnasium/Late-v0"), [[0]] * 3)
    assert "--info-measures bonus" in capsys.readouterr().err
    named = make_env("gymnasium/Late-v0", info_measures="bonus,never")
    assert play(named, [[0]] * 3) == {"bonus": [[0], [0], [0.5], [0.5]], "never": [[0]] * 4}
    assert not capsys.readouterr().err


def test_types_and_names():
    info = {
        "flag": True,
        "count": 3,
        "share": 0.25,
        "numpy": np.float32(1.5),
        "numpy_flag": np.bool_(True),
        "scalar_array": np.array(7),
        "TimeLimit.truncated": False,
        "return": 4,
        "reward": 5,
        "true_positives": 6,
        "2d": 8,
        "text": "1",
        "nothing": None,
        "array": np.zeros(2),
        "list": [1],
        "complex": np.complex64(1),
        "nested": {"inner": 1},
    }
    assert numbers_in(info) == {
        "flag": 1.0,
        "count": 3.0,
        "share": 0.25,
        "numpy": 1.5,
        "numpy_flag": 1.0,
        "scalar_array": 7.0,
        "TimeLimit_truncated": 0.0,
        "info_return": 4.0,
        "info_reward": 5.0,
        "info_true_positives": 6.0,
        "info_2d": 8.0,
    }


class NeedsPackage(gymnasium.Env):
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise gymnasium.error.DependencyNotInstalled(
            "Box2D is not installed, you can install it by run `pip install swig` followed by "
            '`pip install "gymnasium[box2d]"`'
        )


@pytest.mark.parametrize(
    "name",
    [
        "NeedsPackage-v0",
        pytest.param(
            "LunarLander-v3",
            marks=pytest.mark.skipif(importlib.util.find_spec("Box2D") is not None, reason="Box2D is installed"),
        ),
    ],
)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(name, monkeypatch, capsys):
    spec = gymnasium.envs.registration.EnvSpec("NeedsPackage-v0", NeedsPackage)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    assert run_command(["train", f"gymnasium/{name}", "--steps", "1k"]) == 2
    error = capsys.readouterr().err
    assert f"gymnasium/{name}: Box2D is not installed" in error
    assert "pip install 'gymnasium[box2d]'" in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
