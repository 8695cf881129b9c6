"""RewardWrapper: components, rewards, saving, and errors of custom rewards."""

import numpy as np
import pytest

from bestiary.config.config import make_vector_env
from bestiary.envs import make_env
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from bestiary.rollout import Arrays
from bestiary.utils import trust
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.plugin_names import PluginRef

RIVER = "atari/Riverraid"


def play(pool: RewardWrapper, length: int, seed: int = 0) -> list[Arrays]:
    """Return the measures of random steps, plus the reward as `step_reward`, done and actions."""
    rng = np.random.default_rng(seed)
    pool.reset()
    measures = []
    for _ in range(length):
        actions = rng.integers(0, pool.action_spec.n, pool.num_envs)
        pool.send(actions)
        step = pool.recv()
        measures.append({**step.measures, "step_reward": step.reward, "done": step.done, "action": actions})
    return measures


def test_warehouse_components_equal_a_slow_implementation() -> None:
    inner = make_env("warehouse", num_envs=3, seed=2)
    assert isinstance(inner, WarehouseVectorEnv)
    pool = RewardWrapper(inner, RewardConfig("on_shelf=1,left_half=2", "collected=1; expired=-1"))
    rng, last_actions = np.random.default_rng(1), -np.ones(3)
    pool.reset()
    collected = 0
    for t in range(1, 251):
        ages, robots = inner.ages, inner.robots
        actions = rng.integers(0, 4, 3)
        pool.send(actions)
        step = pool.recv()
        for i in range(3):
            moves = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}[int(actions[i])]
            cell = [min(max(int(c) + m, 0), 6) for c, m in zip(robots[i], moves, strict=True)]
            shelf_cells = [list(map(int, shelf)) for shelf in inner.shelves]
            age = int(ages[i][shelf_cells.index(cell)]) if cell in shelf_cells else -1
            has_collected = age >= 0
            oldest = int(ages[i].max())
            expected = {
                "on_shelf": cell in shelf_cells,
                "moved": cell != [int(c) for c in robots[i]],
                "collected": has_collected,
                "left_half": has_collected and cell[1] < 3,
                "oldest_first": has_collected and age == oldest,
                "age_share": (age + 1) / (oldest + 1) if has_collected else 0,
                "alive": 1,
                "changed": last_actions[i] >= 0 and last_actions[i] != actions[i],
                "reward": has_collected,
            }
            expected["training"] = expected["on_shelf"] + 2 * expected["left_half"]
            expected["true"] = has_collected
            expected["true_2"] = -step.measures["expired"][i]
            for name, value in expected.items():
                assert step.measures[name][i] == pytest.approx(float(value)), (name, t, i)
            assert step.reward[i] == expected["training"]
            collected += has_collected
        last_actions = np.where(step.done, -1, actions)
    assert collected > 10


def test_a_true_reward_changes_only_the_measures() -> None:
    plain = make_env("warehouse", num_envs=4, seed=5)
    pool = RewardWrapper(make_env("warehouse", num_envs=4, seed=5), RewardConfig(None, "expired=-1"))
    rng = np.random.default_rng(0)
    expected, actual = plain.reset(), pool.reset()
    for _ in range(120):
        assert (actual.observation["vector"] == expected.observation["vector"]).all()
        assert (actual.reward == expected.reward).all()
        assert (actual.done == expected.done).all()
        assert set(actual.measures) == set(pool.measures_spec)
        actions = rng.integers(0, 4, 4)
        plain.send(actions)
        pool.send(actions)
        expected, actual = plain.recv(), pool.recv()


def test_a_loaded_wrapper_continues_within_its_scopes() -> None:
    rewards = RewardConfig("collected=1@steps=20:70,changed=-1@every=3", None)

    def make_pool() -> RewardWrapper:
        return RewardWrapper(make_env("warehouse", num_envs=2, seed=1), rewards)

    original, copy = make_pool(), make_pool()
    play(original, 33)
    copy.load(original.save())
    rng = np.random.default_rng(3)
    for _ in range(120):
        actions = rng.integers(0, 4, 2)
        for pool in (original, copy):
            pool.send(actions)
        expected, actual = original.recv().measures, copy.recv().measures
        assert {k: v.tolist() for k, v in actual.items()} == {k: v.tolist() for k, v in expected.items()}


def test_all_environments_have_the_common_components() -> None:
    pool = RewardWrapper(make_env("toy/chain", num_envs=2, seed=1), RewardConfig("alive=-0.1,reward=1", None))
    for step in play(pool, 40):
        np.testing.assert_allclose(step["step_reward"], step["reward"] - 0.1, rtol=1e-6)
        np.testing.assert_array_equal(step["true"], step["reward"])


def test_tasks_with_different_components_have_the_shared_ones() -> None:
    from bestiary.envs.atari import AtariVectorEnv

    options = AtariVectorEnv.Options(full_actions=True)
    pool = make_vector_env([RIVER, "atari/Pong"], options, 2, 0, rewards=RewardConfig("peaceful:1", "lives_lost=-1"))
    step = pool.reset()
    assert {"score", "fire", "lives_lost", "training", "true"} <= set(step.measures)
    assert "bullet" not in step.measures
    pool.send(np.array([1, 0]))
    assert pool.recv().measures["fire"].tolist() == [1, 0]
    pool.close()
    with pytest.raises(UserError, match="fuel_shot, but atari/Pong"):
        make_vector_env([RIVER, "atari/Pong"], options, 2, 0, rewards=RewardConfig("fuel:2", None))


def test_failing_custom_rewards_are_errors_that_name_the_cause(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def late(measures):\n    late.calls = getattr(late, 'calls', 0) + 1\n"
        "    return measures['reward'] + (np.nan if late.calls == 7 else 0)\n"
        "def fails(measures):\n    return measures['gold']\n"
        "def wide(measures):\n    return np.zeros((3, 3))\n"
        "def nothing(measures):\n    pass\n"
    )
    for name in ("late", "fails", "wide", "nothing"):
        trust.trust_named(PluginRef(file, name))
    with pytest.raises(RunError, match=r"late is nan in step 7 of a game of environment 0"):
        play(RewardWrapper(make_env("warehouse", num_envs=2), RewardConfig(f"{file}:late", None)), 9)
    missing = r"KeyError: 'gold'; the measures of toy/chain are .*reward, alive"
    with pytest.raises(RunError, match=rf"--true-reward .*fails failed: .*mine.py, line 6: {missing}"):
        play(RewardWrapper(make_env("toy/chain", num_envs=2), RewardConfig(None, f"alive=1; {file}:fails")), 9)
    with pytest.raises(RunError, match=r"--reward .*wide returned an array of shape \(3, 3\).* shape \(2,\)"):
        play(RewardWrapper(make_env("toy/chain", num_envs=2), RewardConfig(f"{file}:wide", None)), 9)
    with pytest.raises(RunError, match=r"--reward .*nothing returned None.* shape \(2,\)"):
        play(RewardWrapper(make_env("toy/chain", num_envs=2), RewardConfig(f"{file}:nothing", None)), 9)


def test_custom_and_weighted_true_rewards_can_be_combined(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def twice(m):\n    return 2 * m['reward']\ndef thrice(m):\n    return 3 * m['reward']\n")
    for name in ("twice", "thrice"):
        trust.trust_named(PluginRef(file, name))
    rewards = RewardConfig(None, f"{file}:twice; alive=1; {file}:thrice")
    for step in play(RewardWrapper(make_env("toy/chain", num_envs=2, seed=1), rewards), 20):
        np.testing.assert_array_equal(step["true"], 2 * step["reward"])
        np.testing.assert_array_equal(step["true_2"], np.ones(2))
        np.testing.assert_array_equal(step["true_3"], 3 * step["reward"])


def test_a_custom_reward_cannot_change_the_measures(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def greedy(measures):\n    reward = measures['reward']\n    reward += 5\n    return reward\n")
    trust.trust_named(PluginRef(file, "greedy"))
    pool = RewardWrapper(make_env("toy/chain", num_envs=2, seed=1), RewardConfig(f"{file}:greedy", None))
    for step in play(pool, 20):
        np.testing.assert_array_equal(step["step_reward"], step["reward"] + 5)
        np.testing.assert_array_equal(step["true"], step["reward"])
    assert step["reward"].max() < 5
