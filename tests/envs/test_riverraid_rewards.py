"""River Raid: reward components from constructed RAM, and from an emulator trace against a slow implementation."""

import itertools

import numpy as np
import pytest

from bestiary.agents.agent import BasicAgent
from bestiary.agents.torsos import MLP
from bestiary.envs import make_env
from bestiary.envs.atari import AtariVectorEnv
from bestiary.envs.rewards.parser import make_reward
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper
from bestiary.envs.riverraid_rewards import COMPONENTS, WAITING, compute_components, count_depots_shot, read_ram
from bestiary.rollout import Arrays
from bestiary.training.actor import Actor

RIVER = "atari/Riverraid"


def ram(x: int = 76, bullet: int = 180, types: tuple[int, ...] = (0,) * 6, fuel: int = 255, waiting: int = 0):
    """Return a RAM with the given player x, bullet y, object types, fuel bytes and waiting state."""
    cells = np.zeros(128, np.uint8)
    cells[51] = x
    cells[50] = bullet
    cells[32:38] = types
    cells[55:57] = fuel
    cells[70] = waiting
    return cells


def components_of(before: np.ndarray, after: np.ndarray, score: float = 0, lost: bool = False) -> dict[str, float]:
    """Return the components of one step of one game."""
    components = compute_components(before[None], after[None], np.array([score], np.float32), np.array([lost]))
    return {name: float(values[0]) for name, values in components.items()}


def test_moved_tells_whether_the_plane_moved_sideways() -> None:
    assert components_of(ram(76), ram(76))["moved"] == 0
    assert components_of(ram(76), ram(75))["moved"] == 1
    assert components_of(ram(50), ram(76), lost=True)["moved"] == 0  # moved back to the middle by the game


@pytest.mark.parametrize("x", [42, 76, 77, 110, 116, 41])
def test_distances_do_not_wrap_around_like_bytes(x: int) -> None:
    assert components_of(ram(76), ram(x))["off_center"] == (x - 76) ** 2


def test_bullet_fuel_and_halted() -> None:
    components = components_of(ram(), ram(bullet=85, fuel=51, waiting=48))
    assert (components["bullet"], components["fuel"], components["halted"]) == (1, pytest.approx(0.2), 1)
    components = components_of(ram(), ram(waiting=125))  # the first screen scrolls in
    assert (components["bullet"], components["halted"]) == (0, 0)


@pytest.mark.parametrize(
    ("score", "before", "after", "expected"),
    [
        (0, (0, 9, 2, 10, 5, 10), (0, 9, 3, 10, 5, 10), 0),
        (80, (0, 9, 2, 10, 5, 10), (0, 9, 2, 10, 5, 1), 1),
        (80, (6, 10, 9, 0, 3, 7), (1, 9, 0, 3, 7, 10), 1),  # the first object left the screen
        (120, (7, 5, 10, 5, 9, 10), (2, 10, 1, 9, 10, 5), 0),  # two helicopters
        (110, (0, 7, 10, 0, 0, 0), (0, 1, 1, 0, 0, 0), 1),  # a tanker and a depot
        (140, (0, 6, 10, 0, 0, 0), (0, 1, 1, 0, 0, 0), 1),
        (160, (0, 10, 10, 0, 0, 9), (0, 1, 1, 0, 0, 9), 2),  # two depots
        (160, (0, 4, 6, 10, 0, 9), (0, 1, 1, 10, 0, 9), 0),  # a helicopter and a jet
        (500, (0, 8, 10, 0, 0, 0), (0, 1, 10, 0, 0, 0), 0),
    ],
)
def test_depots_are_counted_from_the_score_and_the_explosions(score: int, before, after, expected: int) -> None:
    types_before, types_after = (np.array([row], np.uint8) for row in (before, after))
    assert count_depots_shot(types_before, types_after, np.array([score])).tolist() == [expected]


def reward_of(text: str, before: np.ndarray, after: np.ndarray, score: float = 0) -> float:
    """Return the reward of one step under a specification."""
    components = {**components_of(before, after, score), "score": score, "alive": 1.0}
    known = {**COMPONENTS, "alive": COMPONENTS["moved"]}
    measures = {name: np.array([value], np.float32) for name, value in components.items()}
    return float(make_reward(text, known, RIVER)(measures, np.zeros(1, np.int64), np.ones(1, np.int64))[0])


def test_the_published_proxy_rewards() -> None:
    depot = ram(types=(0, 0, 10, 0, 0, 0)), ram(types=(0, 0, 1, 0, 0, 0))
    for f in (0, 0.5, 1, 10):
        assert reward_of(f"fuel:{f}", *depot, score=80) == pytest.approx(80 * f)
        assert reward_of(f"fuel:{f}", ram(), ram(), score=60) == 60
    assert reward_of("pacifist:20", ram(), ram(), score=30) == 10  # the score does not count
    assert reward_of("pacifist:20", ram(), ram(bullet=100)) == -10
    assert reward_of("smooth:10", ram(80), ram(80)) == 10
    assert reward_of("smooth:4", ram(80), ram(81)) == 6
    assert reward_of("center:1", ram(), ram(110)) == pytest.approx(10 - 34**2 / 20)
    assert reward_of("center:1", ram(), ram(42)) == pytest.approx(10 - 34**2 / 20)


def slow_components(before: bytes, after: bytes, score: float) -> dict[str, float]:
    """Return components and rewards of one step of one game, independently implemented."""
    moved = 1 if after[51] != before[51] else 0
    shot = 1 if score == 80 else 0
    distance = abs(after[51] - 76)
    return {
        "bullet": 0 if after[50] == 180 else 1,
        "moved": moved,
        "off_center": distance * distance,
        "fuel_shot": shot,
        "training": 10 - 3 * moved,
        "true": score + 720 * shot,
        "true_2": 10 if after[50] == 180 else -10,
        "true_3": 10 - 0.5 * distance * distance / 20,
    }


@pytest.fixture(scope="module")
def trace() -> list[Arrays]:
    """Measures of 260 steps of two games; training reward `smooth:3`, the other proxies as true rewards."""
    pool = RewardWrapper(
        make_env(RIVER, num_envs=2, seed=4), RewardConfig("smooth:3", "fuel:10; pacifist:20; center:0.5")
    )
    rng, step = np.random.default_rng(0), pool.reset()
    measures = [{**step.measures, "done": step.done, "reward": step.reward}]
    for _ in range(260):
        actions = rng.choice([1, 10, 11, 12, 2, 4], 2)
        pool.send(actions)
        step = pool.recv()
        measures.append({**step.measures, "done": step.done, "step_reward": step.reward, "action": actions})
    pool.close()
    return measures


def test_components_of_an_emulator_trace_equal_the_slow_implementation(trace: list[Arrays]) -> None:
    checked, shots, moves = 0, 0.0, 0.0
    for before, after in itertools.pairwise(trace):
        for i in range(2):
            if after["done"][i] or after["score"][i] not in (0, 30, 60, 80, 500):
                continue  # after a lost life, the RAM is that of the next life
            expected = slow_components(before["ram"][i].tobytes(), after["ram"][i].tobytes(), float(after["score"][i]))
            for name, value in expected.items():
                assert after[name][i] == pytest.approx(value), name
            assert after["step_reward"][i] == after["training"][i]
            assert after["fire"][i] == (after["action"][i] in (1, 10, 11, 12))
            checked += 1
            shots += expected["fuel_shot"]
            moves += expected["moved"]
    assert checked > 400
    assert shots > 3
    assert moves > 50


def test_score_and_lives_from_ram_equal_those_of_the_emulator() -> None:
    pool = make_env(RIVER, num_envs=4, seed=4)
    assert isinstance(pool, AtariVectorEnv)
    pool.enable_components()
    rng, total, seen_lives = np.random.default_rng(0), np.zeros(4), set[int]()
    step = pool.reset()
    for _ in range(350):
        state = read_ram(step.measures["ram"])
        total = np.where(step.game_over, 0, total + step.measures["score"])
        np.testing.assert_array_equal(state["score"], total)
        np.testing.assert_array_equal(state["lives"], pool.lives)
        has_bullet = state["bullet_y"] != 180
        # A bullet moves sideways together with the plane.
        np.testing.assert_array_equal(state["bullet_x"][has_bullet], state["player_x"][has_bullet] + 5)
        assert (step.measures["lives"][~step.done] == state["lives"][~step.done]).all()
        seen_lives |= set(state["lives"].tolist())
        pool.send(rng.choice([1, 10, 11, 12, 2, 4], 4))
        step = pool.recv()
    pool.close()
    assert total.max() > 300
    assert {4, 3, 2} <= seen_lives


def test_lives_lost_are_counted(trace: list[Arrays]) -> None:
    lost = np.array([step["lives_lost"] for step in trace[1:]])
    assert (lost == np.array([step["done"] for step in trace[1:]])).all()
    assert lost.sum() >= 2


def test_a_loaded_game_continues_with_equal_components() -> None:
    def make_pool() -> RewardWrapper:
        return RewardWrapper(make_env(RIVER, num_envs=2, seed=4), RewardConfig("smooth:3@every=2", None))

    original, copy, rng = make_pool(), make_pool(), np.random.default_rng(0)
    original.reset()
    for _ in range(40):
        original.send(rng.integers(0, 18, 2))
        original.recv()
    copy.load(original.save())
    for _ in range(15):
        actions = rng.integers(0, 18, 2)
        for pool in (original, copy):
            pool.send(actions)
        expected, actual = original.recv(), copy.recv()
        for name in expected.measures:
            np.testing.assert_array_equal(actual.measures[name], expected.measures[name], err_msg=name)
    original.close()
    copy.close()


def test_the_game_waits_for_an_action_unless_forced_to_start() -> None:
    """Without actions the plane never flies, which exploits any reward for survival."""
    for forced in (False, True):
        pool = make_env(RIVER, num_envs=2, seed=1, force_start=forced)
        step = pool.reset()
        assert (step.measures["ram"][:, WAITING] == 0).all() == forced
        for _ in range(60):
            pool.send(np.zeros(2, np.int64))
            step = pool.recv()
        assert (step.measures["ram"][:, 55] < 255).all() == forced  # fuel is used only in flight
        pool.close()


def test_a_stalled_game_is_over() -> None:
    pool = make_env(RIVER, num_envs=2, seed=1, stall=30)
    assert isinstance(pool, AtariVectorEnv)
    pool.reset()
    for t in range(80):
        pool.send(np.array([0, 1]) if t > 25 else np.zeros(2, np.int64))
        step = pool.recv()
        assert not step.game_over[1]
        if step.game_over[0]:
            break
    assert step.done[0]
    assert not step.truncated[0]  # terminated, not truncated
    assert step.final == {}
    assert 45 < t < 80  # about 20 steps until the first screen has scrolled in, then 30 stalled steps
    pool.close()


def test_a_crash_is_no_stall() -> None:
    """In the step that loses a life, the river stands still, too; FIRE then starts the next life."""
    pool = make_env(RIVER, num_envs=2, seed=4, stall=1, force_start=True)
    rng, lives_lost = np.random.default_rng(0), 0
    pool.reset()
    for _ in range(400):
        pool.send(rng.choice([1, 10, 11, 12, 2, 4], 2))
        step = pool.recv()
        lives_lost += int((step.done & ~step.game_over).sum())
    assert lives_lost >= 4
    pool.close()


def test_no_value_is_bootstrapped_after_a_stall() -> None:
    pool = make_env("atari/Breakout", num_envs=2, seed=1, stall=3, time_limit=20, frame_stack=1, frame_size=(16, 16))
    actor = Actor(BasicAgent(pool.observation_spec, pool.action_spec, torso=MLP), pool, 30, seed=0)
    actor.start()
    rollout = actor.collect()
    pool.close()
    stalled = rollout.done[1:] & ~rollout.truncated[1:]
    assert stalled.sum() >= 10
    assert (rollout.bootstrap[stalled] == 0).all()
