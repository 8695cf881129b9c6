"""The warehouse: step by step against a slow one in plain Python, on average against what can be worked out on paper."""

from typing import Any

import numpy as np
import pytest

from bestiary.envs.warehouse import WarehousePool
from tests.envs.warehouses import (
    CROWDED,
    DOWN,
    LEFT,
    MINI_ITEMS,
    RIGHT,
    UP,
    advance,
    arrange,
    items_of,
    quiet,
    warehouse,
)

# --- step by step ---


class Slow:
    """One warehouse, stated as plainly as can be, on the random numbers of the row that it follows."""

    def __init__(self, pool: WarehousePool, row: int):
        self.world, self.legacy = pool.world, pool.options.legacy
        self.stream = int(pool.state.streams[row])
        self.rows, self.columns = self.world.size
        every = self.world.spacing
        self.shelf_rows = [r for r in range(self.rows) if (r % every == 0 if every else r in (0, self.rows - 1))]
        self.shelf_columns = [
            c for c in range(self.columns) if (c % every == 0 if every else c in (0, self.columns - 1))
        ]
        self.reset()

    def reset(self) -> None:
        self.robot, self.clock = (self.rows // 2, self.columns // 2), 0
        self.items: list[list[Any]] = []  # cell and age
        self.spawn([])

    def chance(self) -> float:
        self.stream = (self.stream + 0x9E3779B97F4A7C15) % 2**64
        z = ((self.stream ^ self.stream >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        return ((z ^ z >> 31) >> 11) / 2**53

    def tests(self) -> list[tuple[int, int]]:
        if self.world.corners:
            sweep = [(r, c) for r in self.shelf_rows for c in range(self.columns)]
            return sweep + [(r, c) for r in range(self.rows) for c in self.shelf_columns]
        every = [(r, c) for r in range(self.rows) for c in range(self.columns)]
        return [(r, c) for r, c in every if (r in self.shelf_rows) != (c in self.shelf_columns)]

    def spawn(self, closed: list[tuple[int, int]]) -> None:
        for cell in self.tests():
            lucky, free = self.chance() < self.world.spawn, cell not in [item[0] for item in self.items]
            room = not self.world.max_items or len(self.items) < self.world.max_items
            if lucky and free and room and cell not in closed:
                self.items.append([cell, 0])

    def step(self, action: int) -> tuple[float, int, int]:
        """Reward, items collected, items expired."""
        row, column = self.robot
        vertical = action in (UP, DOWN)
        stuck = column in self.shelf_columns if vertical else row in self.shelf_rows
        if self.world.along_shelves or not stuck:
            there = (row + [-1, 1, 0, 0][action], column + [0, 0, -1, 1][action])
            if 0 <= there[0] < self.rows and 0 <= there[1] < self.columns:
                self.robot = there
        for item in self.items:
            item[1] += 1
        reward = 0.0
        here = [age for cell, age in self.items if cell == self.robot]
        for age in here:
            share = age / max(age for _, age in self.items) if self.world.reward_mode == "age" else 1.0
            reward += self.world.reward_scale * share
        emptied, expired = [], 0
        for item in self.items if self.legacy else list(self.items):  # a list that shrinks below the loop: the bug
            if item[0] == self.robot or item[1] >= self.world.expiry:
                self.items.remove(item)
                emptied.append(item[0])
                expired += item[0] != self.robot
        self.spawn([] if self.world.refill else emptied)
        self.clock += 1
        return reward, len(here), expired

    def observe(self) -> np.ndarray:
        robot, items = np.zeros((2, self.rows, self.columns), np.float32)
        robot[self.robot] = 1
        for cell, _ in self.items:
            items[cell] = 1
        rest = [r for r in range(self.rows) if r not in self.shelf_rows]
        if self.world.corners:
            along, across = items[self.shelf_rows], items[rest][:, self.shelf_columns]
        else:
            between = [c for c in range(self.columns) if c not in self.shelf_columns]
            along, across = items[self.shelf_rows][:, between], items[rest][:, self.shelf_columns]
        return np.concatenate([robot.ravel(), along.ravel(), across.ravel()])


WORLDS: list[tuple[str, dict[str, Any]]] = [
    ("warehouse", {}),
    ("warehouse", {"legacy": True}),
    ("warehouse", {"legacy": True, **CROWDED}),
    ("warehouse", {"legacy": True, **CROWDED, "reward_mode": "age", "refill": False, "max_items": 7}),
    ("warehouse:mini", {}),
    ("warehouse:memory", {}),
    ("warehouse:memory", {**CROWDED, "refill": True}),
    ("warehouse", {"size": (3, 3), **CROWDED}),
    ("warehouse", {"size": (4, 9), "corners": False, "time_limit": 17}),
    ("warehouse", {"size": (9, 7), "spacing": 3, "reward_mode": "age", "reward_scale": -2.0, "spawn": 0.1}),
    ("warehouse:mini", {"size": (8, 8), "spacing": 3, "spawn": 0.2, "max_items": 9, "time_limit": 1}),
]


@pytest.mark.parametrize(("name", "options"), WORLDS)
def test_every_step_is_the_slow_warehouses(name: str, options: dict[str, Any]) -> None:
    """Four rows for 700 steps of random moves, everything compared in each of them."""
    n, rng = 4, np.random.default_rng(0)
    pool = warehouse(name, num_envs=n, seed=7, **options)
    slow = [Slow(pool, row) for row in range(n)]
    np.testing.assert_array_equal(pool.reset().observation["vector"], [one.observe() for one in slow])
    met = np.zeros(3)
    for _ in range(700):
        actions = rng.integers(4, size=n)
        pool.send(actions)
        step = pool.recv()
        brought = np.array([one.step(action) for one, action in zip(slow, actions.tolist(), strict=True)], np.float32)
        np.testing.assert_array_equal(step.reward, brought[:, 0])
        np.testing.assert_array_equal(step.measures["collected"], brought[:, 1])
        np.testing.assert_array_equal(step.measures["expired"], brought[:, 2])
        ended = [one for one in slow if one.clock == pool.world.time_limit]
        if ended:
            np.testing.assert_array_equal(step.final["vector"], [one.observe() for one in ended])
        for one in ended:
            one.reset()
        np.testing.assert_array_equal(step.truncated, [one in ended for one in slow])
        np.testing.assert_array_equal(step.observation["vector"], [one.observe() for one in slow])
        np.testing.assert_array_equal(pool.robots, [one.robot for one in slow])
        np.testing.assert_array_equal(pool.state.streams, np.array([one.stream for one in slow], np.uint64))
        assert [items_of(pool, row) for row in range(n)] == [{cell: age for cell, age in one.items} for one in slow]
        met += abs(brought).sum(axis=0)
    if pool.world.time_limit > 1:
        assert (met > 0).all()  # items were paid for, collected, and lost


# --- on average ---


@pytest.fixture(scope="module")
def parked() -> tuple[np.ndarray, np.ndarray]:
    """The ages of 500 warehouses over 300 steps, settled, their robots going up and down in the middle: [T,N,S]."""
    pool = warehouse(num_envs=500, seed=3, time_limit=1000)
    pool.reset()
    advance(pool, *[UP, DOWN] * 50)
    ages = np.empty((300, 500, 24), np.int16)
    for t in range(300):
        advance(pool, (UP, DOWN)[t % 2])
        ages[t] = pool.ages
    return ages, pool.shelves


def test_shelves_are_as_full_as_theory_says(parked: tuple[np.ndarray, np.ndarray]) -> None:
    """A cell holds an item for 8 observations, then waits for luck, (1-q)/q more; q is 0.05, in corners 1-0.95^2."""
    ages, shelves = parked
    full = (ages >= 0).mean(axis=(0, 1))
    corner = np.isin(shelves, (0, 6)).all(axis=1)
    assert corner.sum() == 4
    assert full[~corner].mean() == pytest.approx(8 / 27, abs=0.003)  # 0.296; about four standard errors
    assert full[corner].mean() == pytest.approx(8 / 17.256, abs=0.006)  # 0.464
    assert (ages >= 0).sum(axis=2).mean() == pytest.approx(7.78, abs=0.06)
    np.testing.assert_allclose(full[~corner], 8 / 27, atol=0.015)  # none is favoured
    np.testing.assert_allclose(full[corner], 8 / 17.256, atol=0.015)


def test_items_appear_at_the_rate_that_theory_says(parked: tuple[np.ndarray, np.ndarray]) -> None:
    assert (parked[0] == 0).sum(axis=2).mean() == pytest.approx(0.9725, abs=0.01)


def test_untouched_items_live_for_eight_observations(parked: tuple[np.ndarray, np.ndarray]) -> None:
    """Every age is followed by the next one; after seven comes no item, or a new one."""
    before, after = parked[0][:-1], parked[0][1:]
    living = (before >= 0) & (before < 7)
    np.testing.assert_array_equal(after[living], before[living] + 1)
    assert set(np.unique(after[before == 7])) == {-1, 0}
    assert set(np.unique(after[before == -1])) == {-1, 0}


def test_a_reset_brings_the_items_of_one_pass() -> None:
    """20 x 0.05 + 4 x 0.0975 = 1.39 on average; the same after the resets at the end of an episode."""
    pool = warehouse(num_envs=20_000, seed=2, time_limit=3)
    pool.reset()
    for _ in range(2):
        assert (pool.ages >= 0).sum(axis=1).mean() == pytest.approx(1.39, abs=0.04)
        assert pool.ages.max() == 0
        assert (pool.robots == 3).all()
        assert advance(pool, UP, DOWN, UP).done.all()


def test_rows_share_no_chance() -> None:
    """The counts of new items of 200 warehouses, over 400 resets, are not correlated between any two."""
    pool = warehouse(num_envs=200, time_limit=1)
    pool.reset()
    counts = np.stack([(advance(pool, UP), pool.ages >= 0)[1].sum(axis=1) for _ in range(400)])  # [T,N]
    between = np.corrcoef(counts.T)[~np.eye(200, dtype=bool)]
    assert abs(between).max() < 6 / np.sqrt(400)


# --- items and robots ---


def test_an_item_is_seen_in_eight_observations() -> None:
    pool = quiet()
    arrange(pool, (3, 3), {(0, 0): 0})  # this is the first of them
    seen = [advance(pool, UP if t % 2 else DOWN).observation["vector"][0, 49] for t in range(9)]
    assert seen == [1] * 7 + [0] * 2


@pytest.mark.parametrize(("moves", "paid"), [(7, 1), (8, 1), (9, 0)])
def test_an_item_can_be_collected_until_the_move_after_its_last_observation(moves: int, paid: int) -> None:
    pool = quiet()
    arrange(pool, (moves, 0) if moves < 7 else (6, moves - 6), {(0, 0): 0})
    step = advance(pool, *[LEFT] * (moves - 6), *[UP] * 6)
    assert pool.robots.tolist() == [[0, 0]]
    assert step.reward.tolist() == step.measures["collected"].tolist() == [paid]
    assert not items_of(pool)


@pytest.mark.parametrize(("move", "cell"), [(UP, (0, 2)), (DOWN, (6, 2)), (LEFT, (4, 0)), (RIGHT, (4, 6))])
def test_a_wall_keeps_the_robot_where_it_is(move: int, cell: tuple[int, int]) -> None:
    """The step counts all the same, and it collects what lies there."""
    pool = quiet()
    arrange(pool, cell, {cell: 2, (0, 0): 1})
    step = advance(pool, move)
    assert pool.robots.tolist() == [list(cell)]
    assert step.reward.tolist() == [1]
    assert pool.state.clocks.tolist() == [1]
    assert items_of(pool) == {(0, 0): 2}


@pytest.mark.parametrize(("move", "to"), [(UP, (2, 3)), (DOWN, (4, 3)), (LEFT, (3, 2)), (RIGHT, (3, 4))])
def test_the_four_moves(move: int, to: tuple[int, int]) -> None:
    pool = quiet()
    assert pool.action_spec.names == ("up", "down", "left", "right")
    advance(pool, move)
    assert pool.robots.tolist() == [list(to)]


def test_a_cell_may_be_emptied_and_filled_in_the_same_step() -> None:
    """Also below the robot, which then earns by moving against the wall."""
    pool = quiet(spawn=1.0)
    arrange(pool, (1, 3), {(6, 6): 7, (0, 3): 4})
    first, second = advance(pool, UP), advance(pool, UP)
    assert first.measures["expired"].tolist() == [1]
    assert first.reward.tolist() == second.reward.tolist() == [1]
    assert second.measures["expired"].tolist() == [0]
    assert len(items_of(pool)) == 24
    assert items_of(pool)[0, 3] == 0
    assert items_of(pool)[6, 6] == 1


@pytest.mark.parametrize("name", ["warehouse:mini", "warehouse:memory"])
def test_in_the_small_variants_it_stays_empty_for_that_step(name: str) -> None:
    pool = quiet(name, spawn=1.0, max_items=12)
    arrange(pool, (1, 2), {(4, 2): pool.world.expiry - 1, (0, 2): 4})
    step = advance(pool, UP)
    assert step.measures["collected"].tolist() == step.measures["expired"].tolist() == [1]
    assert set(items_of(pool)) == set(MINI_ITEMS) - {(0, 2), (4, 2)}
    advance(pool, DOWN)
    assert set(items_of(pool)) == set(MINI_ITEMS)


@pytest.mark.parametrize("name", ["warehouse:mini", "warehouse:memory"])
def test_in_the_small_variants_shelves_are_entered_and_left_from_the_middle(name: str) -> None:
    for row, column in MINI_ITEMS:
        for move, (down, right) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1)]):
            pool = quiet(name)
            arrange(pool, (row, column), {})
            advance(pool, move)
            there = (row + down, column + right)
            inside = 1 <= there[0] <= 3 and 1 <= there[1] <= 3
            assert pool.robots.tolist() == [list(there if inside else (row, column))]


def test_in_the_small_variants_no_robot_gets_into_a_corner() -> None:
    pool = warehouse("warehouse:memory", num_envs=50, seed=1)
    pool.reset()
    rng, been = np.random.default_rng(1), np.zeros((5, 5), bool)
    for _ in range(500):
        advance(pool, rng.integers(4, size=50))
        been[tuple(pool.robots.T)] = True
    assert not been[[0, 0, 4, 4], [0, 4, 0, 4]].any()
    assert been.sum() == 21


def test_at_most_four_items_lie_in_the_memory_variant() -> None:
    pool = warehouse("warehouse:memory", num_envs=2, spawn=1.0)
    pool.reset()
    assert set(items_of(pool)) == {(0, 1), (0, 2), (0, 3), (1, 0)}  # the first four, row by row
    pool = warehouse("warehouse:memory", num_envs=200, spawn=0.3)
    pool.reset()
    counts = [(advance(pool, UP if t % 2 else DOWN), (pool.ages >= 0).sum(axis=1))[1] for t in range(90)]
    assert np.max(counts) == 4
    assert np.min(counts) < 4  # where four have just gone


@pytest.mark.parametrize(
    ("name", "age", "others", "reward"),
    [
        ("warehouse", 3, {(4, 2): 6}, 1.0),
        ("warehouse:mini", 3, {(4, 2): 6}, 4 / 7),
        ("warehouse:mini", 6, {(4, 2): 3}, 1.0),
        ("warehouse:mini", 0, {(4, 2): 7, (1, 0): 2}, 1 / 8),  # the eldest counts although it vanishes in this step
        ("warehouse:mini", 0, {}, 1.0),
        ("warehouse:memory", 3, {(4, 2): 15}, 0.25 * 4 / 16),
        ("warehouse:memory", 9, {(4, 2): 9}, 0.25),
    ],
)
def test_what_an_item_pays(name: str, age: int, others: dict[tuple[int, int], int], reward: float) -> None:
    pool = quiet(name, size=(5, 5))
    listed = sorted([*others.items(), ((0, 2), age)], key=lambda item: -item[1])
    arrange(pool, (1, 2), dict(listed))
    assert advance(pool, UP).reward.tolist() == [np.float32(reward)]


# --- the bug of the published code ---


@pytest.mark.parametrize(("legacy", "left"), [(False, set()), (True, {(0, 1), (6, 3)})])
def test_who_follows_an_expired_item_in_the_list_outlives_it_by_a_step_in_legacy(
    legacy: bool, left: set[tuple[int, int]]
) -> None:
    """Four items of one age: the second and the fourth are overlooked, and go one step later."""
    pool = quiet(legacy=legacy)
    arrange(pool, (3, 3), {(0, 0): 7, (0, 1): 7, (0, 2): 7, (6, 3): 7, (5, 0): 1})
    step = advance(pool, UP)
    assert set(items_of(pool)) == left | {(5, 0)}
    assert step.measures["expired"].tolist() == [4 - len(left)]
    advance(pool, DOWN)
    assert set(items_of(pool)) == ({(6, 3), (5, 0)} if legacy else {(5, 0)})  # again one goes and one is overlooked
    advance(pool, UP)
    assert set(items_of(pool)) == {(5, 0)}


@pytest.mark.parametrize(("legacy", "paid"), [(False, [1, 0, 0]), (True, [1, 1, 0])])
def test_who_is_collected_after_an_expired_item_pays_twice_in_legacy(legacy: bool, paid: list[int]) -> None:
    pool = quiet(legacy=legacy)
    arrange(pool, (1, 3), {(6, 6): 7, (0, 3): 2})
    assert [advance(pool, UP).reward[0] for _ in range(3)] == paid


def test_who_is_older_than_the_follower_is_not_spared_in_legacy() -> None:
    """The list counts, not the place: an item that expires before its follower does takes nobody with it."""
    pool = quiet(legacy=True)
    arrange(pool, (3, 3), {(0, 1): 7, (0, 0): 6})
    advance(pool, UP)
    assert items_of(pool) == {(0, 0): 7}
    advance(pool, UP)
    assert not items_of(pool)
