"""River Raid's components: on RAM written by hand, and on the emulator's, recomputed by a function of the test's own."""

import itertools

import numpy as np
import pytest

from bestiary.agents.agent import BasicAgent
from bestiary.agents.torsos import MLP
from bestiary.envs import make
from bestiary.envs.atari import AtariPool
from bestiary.envs.rewards import RewardedPool, Rewards
from bestiary.envs.riverraid import COMPONENTS, WAITING, depots_shot, measure, read
from bestiary.envs.weightings import make_reward
from bestiary.rollout import Arrays
from bestiary.runtime.actor import Actor

RIVER = "atari/Riverraid"


def ram(x: int = 76, bullet: int = 180, types: tuple[int, ...] = (0,) * 6, fuel: int = 255, waiting: int = 0):
    cells = np.zeros(128, np.uint8)
    cells[51], cells[50], cells[32:38], cells[55:57], cells[70] = x, bullet, types, fuel, waiting
    return cells


def measured(before: np.ndarray, after: np.ndarray, score: float = 0, lost: bool = False) -> dict[str, float]:
    found = measure(before[None], after[None], np.array([score], np.float32), np.array([lost]))
    return {name: float(values[0]) for name, values in found.items()}


def test_the_plane() -> None:
    assert measured(ram(76), ram(76))["moved"] == 0
    assert measured(ram(76), ram(75))["moved"] == 1
    assert measured(ram(50), ram(76), lost=True)["moved"] == 0  # put back, not moved


@pytest.mark.parametrize("x", [42, 76, 77, 110, 116, 41])
def test_distances_do_not_wrap_around_like_bytes(x: int) -> None:
    assert measured(ram(76), ram(x))["off_center"] == (x - 76) ** 2


def test_bullet_fuel_and_waiting() -> None:
    found = measured(ram(), ram(bullet=85, fuel=51, waiting=48))
    assert (found["bullet"], found["fuel"], found["halted"]) == (1, pytest.approx(0.2), 1)
    found = measured(ram(), ram(waiting=125))  # the first picture scrolls in
    assert (found["bullet"], found["halted"]) == (0, 0)


@pytest.mark.parametrize(
    ("score", "before", "after", "expected"),
    [
        (0, (0, 9, 2, 10, 5, 10), (0, 9, 3, 10, 5, 10), 0),
        (80, (0, 9, 2, 10, 5, 10), (0, 9, 2, 10, 5, 1), 1),
        (80, (6, 10, 9, 0, 3, 7), (1, 9, 0, 3, 7, 10), 1),  # the first one left the screen
        (120, (7, 5, 10, 5, 9, 10), (2, 10, 1, 9, 10, 5), 0),  # two helicopters
        (110, (0, 7, 10, 0, 0, 0), (0, 1, 1, 0, 0, 0), 1),  # a tanker and a depot: no score of 80
        (140, (0, 6, 10, 0, 0, 0), (0, 1, 1, 0, 0, 0), 1),
        (160, (0, 10, 10, 0, 0, 9), (0, 1, 1, 0, 0, 9), 2),  # 160 is this
        (160, (0, 4, 6, 10, 0, 9), (0, 1, 1, 10, 0, 9), 0),  # or that
        (500, (0, 8, 10, 0, 0, 0), (0, 1, 10, 0, 0, 0), 0),
    ],
)
def test_depots_among_what_was_shot(score: int, before, after, expected: int) -> None:
    was, now = (np.array([row], np.uint8) for row in (before, after))
    assert depots_shot(was, now, np.array([score])).tolist() == [expected]


def paid(text: str, before: np.ndarray, after: np.ndarray, score: float = 0) -> float:
    """What one step pays, by the pool's own reward."""
    components = {**measured(before, after, score), "score": score, "alive": 1.0}
    known = {**COMPONENTS, "alive": COMPONENTS["moved"]}
    one = {name: np.array([value], np.float32) for name, value in components.items()}
    return float(make_reward(text, known, RIVER)(one, np.zeros(1, np.int64), np.ones(1, np.int64))[0])


def test_the_published_proxies() -> None:
    depot = ram(types=(0, 0, 10, 0, 0, 0)), ram(types=(0, 0, 1, 0, 0, 0))
    for f in (0, 0.5, 1, 10):
        assert paid(f"fuel:{f}", *depot, score=80) == pytest.approx(80 * f)
        assert paid(f"fuel:{f}", ram(), ram(), score=60) == 60
    assert paid("pacifist:20", ram(), ram(), score=30) == 10  # the score is no part of it
    assert paid("pacifist:20", ram(), ram(bullet=100)) == -10
    assert paid("smooth:10", ram(80), ram(80)) == 10
    assert paid("smooth:4", ram(80), ram(81)) == 6
    assert paid("center:1", ram(), ram(110)) == pytest.approx(10 - 34**2 / 20)
    assert paid("center:1", ram(), ram(42)) == pytest.approx(10 - 34**2 / 20)


def recomputed(before: bytes, after: bytes, score: float) -> dict[str, float]:
    """The same again, one game at a time, from bytes."""
    moved = 1 if after[51] != before[51] else 0
    shot = 1 if score == 80 else 0
    distance = abs(after[51] - 76)
    return {
        "bullet": 0 if after[50] == 180 else 1,
        "moved": moved,
        "off_center": distance * distance,
        "fuel_shot": shot,
        "trained": 10 - 3 * moved,
        "true": score + 720 * shot,
        "true_2": 10 if after[50] == 180 else -10,
        "true_3": 10 - 0.5 * distance * distance / 20,
    }


@pytest.fixture(scope="module")
def trace() -> list[Arrays]:
    """Some hundred steps of two planes that shoot a lot, under `smooth:3`, watched on the other published proxies."""
    pool = RewardedPool(make(RIVER, num_envs=2, seed=4), Rewards("smooth:3", "fuel:10; pacifist:20; center:0.5"))
    rng, step = np.random.default_rng(0), pool.reset()
    found = [{**step.measures, "done": step.done, "reward": step.reward}]
    for _ in range(260):
        actions = rng.choice([1, 10, 11, 12, 2, 4], 2)
        pool.send(actions)
        step = pool.recv()
        found.append({**step.measures, "done": step.done, "paid": step.reward, "action": actions})
    pool.close()
    return found


def test_a_trace_of_the_emulator_recomputed(trace: list[Arrays]) -> None:
    checked, shots, moves = 0, 0.0, 0.0
    for before, after in itertools.pairwise(trace):
        for i in range(2):
            if after["done"][i] or after["score"][i] not in (0, 30, 60, 80, 500):
                continue  # after a lost life the RAM is the next one's
            mine = recomputed(before["ram"][i].tobytes(), after["ram"][i].tobytes(), float(after["score"][i]))
            for name, value in mine.items():
                assert after[name][i] == pytest.approx(value), name
            assert after["paid"][i] == after["trained"][i]
            assert after["fire"][i] == (after["action"][i] in (1, 10, 11, 12))
            checked, shots, moves = checked + 1, shots + mine["fuel_shot"], moves + mine["moved"]
    assert checked > 400
    assert shots > 3
    assert moves > 50


def test_score_and_lives_are_read_as_the_emulator_says() -> None:
    pool = make(RIVER, num_envs=4, seed=4)
    assert isinstance(pool, AtariPool)
    pool.watch()
    rng, total, seen = np.random.default_rng(0), np.zeros(4), set[int]()
    step = pool.reset()
    for _ in range(350):
        found = read(step.measures["ram"])
        total = np.where(step.game_over, 0, total + step.measures["score"])
        np.testing.assert_array_equal(found["score"], total)
        np.testing.assert_array_equal(found["lives"], pool.lives)
        flies = found["bullet_y"] != 180
        np.testing.assert_array_equal(found["bullet_x"][flies], found["player_x"][flies] + 5)  # it goes with the plane
        assert (step.measures["lives"][~step.done] == found["lives"][~step.done]).all()
        seen |= set(found["lives"].tolist())
        pool.send(rng.choice([1, 10, 11, 12, 2, 4], 4))
        step = pool.recv()
    pool.close()
    assert total.max() > 300
    assert {4, 3, 2} <= seen


def test_lives_lost_are_counted(trace: list[Arrays]) -> None:
    lost = np.array([step["lives_lost"] for step in trace[1:]])
    assert (lost == np.array([step["done"] for step in trace[1:]])).all()
    assert lost.sum() >= 2


def test_a_saved_game_goes_on_with_its_components() -> None:
    def opened() -> RewardedPool:
        return RewardedPool(make(RIVER, num_envs=2, seed=4), Rewards("smooth:3@every=2", None))

    one, other, rng = opened(), opened(), np.random.default_rng(0)
    one.reset()
    for _ in range(40):
        one.send(rng.integers(0, 18, 2))
        one.recv()
    other.load(one.save())
    for _ in range(15):
        actions = rng.integers(0, 18, 2)
        for pool in (one, other):
            pool.send(actions)
        mine, theirs = one.recv(), other.recv()
        for name in mine.measures:
            np.testing.assert_array_equal(mine.measures[name], theirs.measures[name], err_msg=name)
    one.close()
    other.close()


def test_the_plane_waits_for_its_player_unless_forced_to_start() -> None:
    """Idle, the plane is halted for good: the exploit of any reward for staying alive."""
    for forced in (False, True):
        pool = make(RIVER, num_envs=2, seed=1, force_start=forced)
        step = pool.reset()
        assert (step.measures["ram"][:, WAITING] == 0).all() == forced
        for _ in range(60):
            pool.send(np.zeros(2, np.int64))
            step = pool.recv()
        assert (step.measures["ram"][:, 55] < 255).all() == forced  # fuel is used only in flight
        pool.close()


def test_a_game_that_stalls_is_over() -> None:
    pool = make(RIVER, num_envs=2, seed=1, stall=30)
    assert isinstance(pool, AtariPool)
    pool.reset()
    for t in range(80):
        pool.send(np.array([0, 1]) if t > 25 else np.zeros(2, np.int64))
        step = pool.recv()
        assert not step.game_over[1]
        if step.game_over[0]:
            break
    assert step.done[0]
    assert not step.truncated[0]  # an end, not a time limit
    assert step.final == {}
    assert 45 < t < 80  # the first picture takes about twenty decisions, then thirty of nothing
    pool.close()


def test_a_crash_is_no_stall() -> None:
    """In the step that loses a life the river stands still, too; FIRE then starts the next."""
    pool = make(RIVER, num_envs=2, seed=4, stall=1, force_start=True)
    rng, lives = np.random.default_rng(0), 0
    pool.reset()
    for _ in range(400):
        pool.send(rng.choice([1, 10, 11, 12, 2, 4], 2))
        step = pool.recv()
        lives += int((step.done & ~step.game_over).sum())
    assert lives >= 4
    pool.close()


def test_nothing_is_credited_after_a_stall() -> None:
    pool = make("atari/Breakout", num_envs=2, seed=1, stall=3, time_limit=20, frame_stack=1, frame_size=(16, 16))
    actor = Actor(BasicAgent(pool.observation_spec, pool.action_spec, torso=MLP), pool, 30, seed=0)
    actor.start()
    rollout = actor.collect()
    pool.close()
    stalled = rollout.done[1:] & ~rollout.truncated[1:]
    assert stalled.sum() >= 10
    assert (rollout.bootstrap[stalled] == 0).all()
