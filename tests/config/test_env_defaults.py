"""Defaults that environment families declare for training and algorithm options."""

from pathlib import Path

import pytest

from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.config.toml import preset_paths, read_preset
from bestiary.envs.gymnasium_env import GymnasiumVectorEnv
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from tests.trusted import resolve_own

EXAMPLES = Path(__file__).parents[2] / "examples"
PRESETS_WITH_ENV = [name for name in preset_paths() if "env" in read_preset(name)]


def resolve_preset(name: str) -> Config:
    return resolve(read_preset(name))


def test_environment_defaults_are_used_unless_the_user_sets_an_option() -> None:
    config = resolve({"env": "warehouse", "algo": "ppo", "memory": "gru"})
    declared = WarehouseVectorEnv.defaults["ppo"]
    assert config.training.num_envs == declared["num_envs"] == 128
    assert config.components["algo"].options.lr == declared["algo.lr"]
    assert config.components["memory"].options.hidden == declared["memory.hidden"]
    config = resolve({"env": "warehouse", "algo": "ppo", "memory": "gru", "num_envs": 16, "lr": 2e-4})
    assert config.training.num_envs == 16
    assert config.components["algo"].options.lr == 2e-4


def test_defaults_for_one_algorithm_do_not_change_others() -> None:
    assert resolve({"env": "warehouse"}).training.num_envs == resolve({"env": "toy/catch"}).training.num_envs
    assert resolve({"env": "toy/catch", "algo": "ppo"}).training.num_envs == 32


@pytest.mark.parametrize("name", PRESETS_WITH_ENV)
def test_presets_do_not_depend_on_environment_defaults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset is a complete description: it sets each option for which its environment has another default."""
    with_defaults = resolve_preset(name)
    monkeypatch.setattr(WarehouseVectorEnv, "defaults", {})
    monkeypatch.setattr(GymnasiumVectorEnv, "vector_defaults", {})
    assert resolve_preset(name).tables() == with_defaults.tables()


@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_gymnasium_tasks_with_vectors_have_unclipped_rewards_and_their_own_defaults(algo: str) -> None:
    config = resolve({"env": "gymnasium/CartPole-v1", "algo": algo})
    declared = GymnasiumVectorEnv.vector_defaults
    options = config.components["algo"].options
    assert config.training.num_envs == declared[""]["num_envs"]
    assert options.reward_clipping == "none"
    for key, value in declared[algo].items():
        assert getattr(options, key.removeprefix("algo.")) == value
    config = resolve({"env": "gymnasium/CartPole-v1", "algo": algo, "lr": 1e-4, "algo.reward_clipping": "abs_one"})
    assert config.components["algo"].options.lr == 1e-4
    assert config.components["algo"].options.reward_clipping == "abs_one"


def test_vector_defaults_are_not_used_for_images() -> None:
    """The observations of the maze are images, although the maze is a Gymnasium environment."""
    maze = resolve_own({"env": f"{EXAMPLES}/maze_env.py:Maze", "algo": "ppo"})
    assert maze.training.num_envs == 32
    assert maze.components["algo"].options == resolve({"env": "toy/catch", "algo": "ppo"}).components["algo"].options


def test_origin_of_vector_defaults_is_default() -> None:
    origins = resolve({"env": "gymnasium/CartPole-v1", "algo": "ppo"}).origins
    assert origins["num_envs"] == origins["algo.lr"] == origins["algo.reward_clipping"] == "default"
