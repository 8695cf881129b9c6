"""Warehouse dynamics: each step against a slow implementation, and averages against closed forms."""

from typing import Any

import numpy as np
import pytest

from bestiary.envs.warehouse.env import WarehouseVectorEnv
from tests.envs.warehouse.helpers import (
    CROWDED,
    DOWN,
    LEFT,
    MINI_ITEMS,
    RIGHT,
    UP,
    advance,
    arrange,
    items_of,
    make_static,
    make_warehouse,
)

# --- steps ---


class SlowWarehouse:
    """Reference implementation of one warehouse, with the random stream of the given row."""

    def __init__(self, pool: WarehouseVectorEnv, row: int):
        self.spec = pool.spec
        self.legacy = pool.options.legacy
        self.stream = int(pool.state.streams[row])
        self.rows, self.columns = self.spec.size
        self.shelf_rows = self._lines(self.rows)
        self.shelf_columns = self._lines(self.columns)
        self.reset()

    def _lines(self, length: int) -> list[int]:
        spacing = self.spec.spacing
        return [k for k in range(length) if (k % spacing == 0 if spacing else k in (0, length - 1))]

    def reset(self) -> None:
        self.robot = (self.rows // 2, self.columns // 2)
        self.clock = 0
        self.items: list[list[Any]] = []  # [cell, age], oldest first
        self.spawn([])

    def uniform(self) -> float:
        self.stream = (self.stream + 0x9E3779B97F4A7C15) % 2**64
        z = ((self.stream ^ self.stream >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        return ((z ^ z >> 31) >> 11) / 2**53

    def spawn_order(self) -> list[tuple[int, int]]:
        if self.spec.corners:
            in_rows = [(r, c) for r in self.shelf_rows for c in range(self.columns)]
            return in_rows + [(r, c) for r in range(self.rows) for c in self.shelf_columns]
        cells = [(r, c) for r in range(self.rows) for c in range(self.columns)]
        return [(r, c) for r, c in cells if (r in self.shelf_rows) != (c in self.shelf_columns)]

    def spawn(self, closed: list[tuple[int, int]]) -> None:
        for cell in self.spawn_order():
            is_drawn = self.uniform() < self.spec.spawn
            is_free = cell not in [item[0] for item in self.items] and cell not in closed
            has_room = not self.spec.max_items or len(self.items) < self.spec.max_items
            if is_drawn and is_free and has_room:
                self.items.append([cell, 0])

    def step(self, action: int) -> tuple[float, int, int]:
        """Return reward, number of items collected and number of items expired."""
        row, column = self.robot
        is_along = column in self.shelf_columns if action in (UP, DOWN) else row in self.shelf_rows
        if self.spec.along_shelves or not is_along:
            target = (row + [-1, 1, 0, 0][action], column + [0, 0, -1, 1][action])
            if 0 <= target[0] < self.rows and 0 <= target[1] < self.columns:
                self.robot = target
        for item in self.items:
            item[1] += 1
        reward = 0.0
        collected = [age for cell, age in self.items if cell == self.robot]
        for age in collected:
            fraction = age / max(age for _, age in self.items) if self.spec.reward_mode == "age" else 1.0
            reward += self.spec.reward_scale * fraction
        emptied, expired = [], 0
        # The bug of the published code: items are removed from the list that the loop iterates over.
        for item in self.items if self.legacy else list(self.items):
            if item[0] == self.robot or item[1] >= self.spec.expiry:
                self.items.remove(item)
                emptied.append(item[0])
                expired += item[0] != self.robot
        self.spawn([] if self.spec.refill else emptied)
        self.clock += 1
        return reward, len(collected), expired

    def observe(self) -> np.ndarray:
        robot, items = np.zeros((2, self.rows, self.columns), np.float32)
        robot[self.robot] = 1
        for cell, _ in self.items:
            items[cell] = 1
        other_rows = [r for r in range(self.rows) if r not in self.shelf_rows]
        in_columns = items[other_rows][:, self.shelf_columns]
        in_rows = items[self.shelf_rows]
        if not self.spec.corners:
            other_columns = [c for c in range(self.columns) if c not in self.shelf_columns]
            in_rows = in_rows[:, other_columns]
        return np.concatenate([robot.ravel(), in_rows.ravel(), in_columns.ravel()])


CASES: list[tuple[str, dict[str, Any]]] = [
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


@pytest.mark.parametrize(("name", "options"), CASES)
def test_steps_equal_those_of_the_slow_implementation(name: str, options: dict[str, Any]) -> None:
    """Compare the complete state of four rows in 700 steps of random actions."""
    n, rng = 4, np.random.default_rng(0)
    pool = make_warehouse(name, num_envs=n, seed=7, **options)
    slow = [SlowWarehouse(pool, row) for row in range(n)]
    np.testing.assert_array_equal(pool.reset().observation["vector"], [one.observe() for one in slow])
    totals = np.zeros(3)
    for _ in range(700):
        actions = rng.integers(4, size=n)
        pool.send(actions)
        step = pool.recv()
        expected = np.array([one.step(action) for one, action in zip(slow, actions.tolist(), strict=True)], np.float32)
        np.testing.assert_array_equal(step.reward, expected[:, 0])
        np.testing.assert_array_equal(step.measures["collected"], expected[:, 1])
        np.testing.assert_array_equal(step.measures["expired"], expected[:, 2])
        ended = [one for one in slow if one.clock == pool.spec.time_limit]
        if ended:
            np.testing.assert_array_equal(step.final["vector"], [one.observe() for one in ended])
        for one in ended:
            one.reset()
        np.testing.assert_array_equal(step.truncated, [one in ended for one in slow])
        np.testing.assert_array_equal(step.observation["vector"], [one.observe() for one in slow])
        np.testing.assert_array_equal(pool.robots, [one.robot for one in slow])
        np.testing.assert_array_equal(pool.state.streams, np.array([one.stream for one in slow], np.uint64))
        assert [items_of(pool, row) for row in range(n)] == [{cell: age for cell, age in one.items} for one in slow]
        totals += abs(expected).sum(axis=0)
    if pool.spec.time_limit > 1:
        assert (totals > 0).all()  # items were rewarded, collected, and expired


# --- averages ---


@pytest.fixture(scope="module")
def untouched() -> tuple[np.ndarray, np.ndarray]:
    """Ages [T,N,S] of 500 warehouses in 300 steps, with robots that collect nothing; and the shelves."""
    pool = make_warehouse(num_envs=500, seed=3, time_limit=1000)
    pool.reset()
    advance(pool, *[UP, DOWN] * 50)
    ages = np.empty((300, 500, 24), np.int16)
    for t in range(300):
        advance(pool, (UP, DOWN)[t % 2])
        ages[t] = pool.ages
    return ages, pool.shelves


def test_the_occupancy_of_shelves_equals_its_expectation(untouched: tuple[np.ndarray, np.ndarray]) -> None:
    """A cell has an item for 8 observations and is empty for (1-q)/q on average; q = 0.05, in corners 1 - 0.95^2."""
    ages, shelves = untouched
    occupied = (ages >= 0).mean(axis=(0, 1))
    corner = np.isin(shelves, (0, 6)).all(axis=1)
    assert corner.sum() == 4
    assert occupied[~corner].mean() == pytest.approx(8 / 27, abs=0.003)  # 0.296; about 4 standard errors
    assert occupied[corner].mean() == pytest.approx(8 / 17.256, abs=0.006)  # 0.464
    assert (ages >= 0).sum(axis=2).mean() == pytest.approx(7.78, abs=0.06)
    np.testing.assert_allclose(occupied[~corner], 8 / 27, atol=0.015)  # equal in all cells
    np.testing.assert_allclose(occupied[corner], 8 / 17.256, atol=0.015)


def test_the_rate_of_new_items_equals_its_expectation(untouched: tuple[np.ndarray, np.ndarray]) -> None:
    assert (untouched[0] == 0).sum(axis=2).mean() == pytest.approx(0.9725, abs=0.01)


def test_untouched_items_exist_for_8_observations(untouched: tuple[np.ndarray, np.ndarray]) -> None:
    """Ages increase by 1 up to 7; then the cell is empty or has a new item."""
    before, after = untouched[0][:-1], untouched[0][1:]
    not_expiring = (before >= 0) & (before < 7)
    np.testing.assert_array_equal(after[not_expiring], before[not_expiring] + 1)
    assert set(np.unique(after[before == 7])) == {-1, 0}
    assert set(np.unique(after[before == -1])) == {-1, 0}


def test_a_reset_creates_the_items_of_one_spawn_pass() -> None:
    """20 x 0.05 + 4 x 0.0975 = 1.39 items on average, also in resets at the end of an episode."""
    pool = make_warehouse(num_envs=20_000, seed=2, time_limit=3)
    pool.reset()
    for _ in range(2):
        assert (pool.ages >= 0).sum(axis=1).mean() == pytest.approx(1.39, abs=0.04)
        assert pool.ages.max() == 0
        assert (pool.robots == 3).all()
        assert advance(pool, UP, DOWN, UP).done.all()


def test_rows_have_independent_random_streams() -> None:
    """The numbers of new items of 200 warehouses in 400 resets are uncorrelated between any two."""
    pool = make_warehouse(num_envs=200, time_limit=1)
    pool.reset()
    counts = np.stack([(advance(pool, UP), pool.ages >= 0)[1].sum(axis=1) for _ in range(400)])  # [T,N]
    correlations = np.corrcoef(counts.T)[~np.eye(200, dtype=bool)]
    assert abs(correlations).max() < 6 / np.sqrt(400)


# --- items and robots ---


def test_an_item_is_visible_in_8_observations() -> None:
    pool = make_static()
    arrange(pool, (3, 3), {(0, 0): 0})  # its first observation
    visible = [advance(pool, UP if t % 2 else DOWN).observation["vector"][0, 49] for t in range(9)]
    assert visible == [1] * 7 + [0] * 2


@pytest.mark.parametrize(("moves", "reward"), [(7, 1), (8, 1), (9, 0)])
def test_an_item_can_be_collected_until_the_move_after_its_last_observation(moves: int, reward: int) -> None:
    pool = make_static()
    arrange(pool, (moves, 0) if moves < 7 else (6, moves - 6), {(0, 0): 0})
    step = advance(pool, *[LEFT] * (moves - 6), *[UP] * 6)
    assert pool.robots.tolist() == [[0, 0]]
    assert step.reward.tolist() == step.measures["collected"].tolist() == [reward]
    assert not items_of(pool)


@pytest.mark.parametrize(("move", "cell"), [(UP, (0, 2)), (DOWN, (6, 2)), (LEFT, (4, 0)), (RIGHT, (4, 6))])
def test_a_move_into_a_wall_keeps_the_robot_in_its_cell(move: int, cell: tuple[int, int]) -> None:
    """The step counts, and the robot collects an item in its cell."""
    pool = make_static()
    arrange(pool, cell, {cell: 2, (0, 0): 1})
    step = advance(pool, move)
    assert pool.robots.tolist() == [list(cell)]
    assert step.reward.tolist() == [1]
    assert pool.state.clocks.tolist() == [1]
    assert items_of(pool) == {(0, 0): 2}


@pytest.mark.parametrize(("move", "to"), [(UP, (2, 3)), (DOWN, (4, 3)), (LEFT, (3, 2)), (RIGHT, (3, 4))])
def test_the_four_moves(move: int, to: tuple[int, int]) -> None:
    pool = make_static()
    assert pool.action_spec.names == ("up", "down", "left", "right")
    advance(pool, move)
    assert pool.robots.tolist() == [list(to)]


def test_a_cell_may_be_emptied_and_filled_in_the_same_step() -> None:
    """Also below the robot, which then collects the item by a move into the wall."""
    pool = make_static(spawn=1.0)
    arrange(pool, (1, 3), {(6, 6): 7, (0, 3): 4})
    first, second = advance(pool, UP), advance(pool, UP)
    assert first.measures["expired"].tolist() == [1]
    assert first.reward.tolist() == second.reward.tolist() == [1]
    assert second.measures["expired"].tolist() == [0]
    assert len(items_of(pool)) == 24
    assert items_of(pool)[0, 3] == 0
    assert items_of(pool)[6, 6] == 1


@pytest.mark.parametrize("name", ["warehouse:mini", "warehouse:memory"])
def test_in_the_small_variants_an_emptied_cell_stays_empty_for_that_step(name: str) -> None:
    pool = make_static(name, spawn=1.0, max_items=12)
    arrange(pool, (1, 2), {(4, 2): pool.spec.expiry - 1, (0, 2): 4})
    step = advance(pool, UP)
    assert step.measures["collected"].tolist() == step.measures["expired"].tolist() == [1]
    assert set(items_of(pool)) == set(MINI_ITEMS) - {(0, 2), (4, 2)}
    advance(pool, DOWN)
    assert set(items_of(pool)) == set(MINI_ITEMS)


@pytest.mark.parametrize("name", ["warehouse:mini", "warehouse:memory"])
def test_in_the_small_variants_shelves_are_entered_and_left_only_from_the_middle(name: str) -> None:
    for row, column in MINI_ITEMS:
        for move, (down, right) in enumerate([(-1, 0), (1, 0), (0, -1), (0, 1)]):
            pool = make_static(name)
            arrange(pool, (row, column), {})
            advance(pool, move)
            target = (row + down, column + right)
            is_inside = 1 <= target[0] <= 3 and 1 <= target[1] <= 3
            assert pool.robots.tolist() == [list(target if is_inside else (row, column))]


def test_in_the_small_variants_the_robot_never_enters_a_corner() -> None:
    pool = make_warehouse("warehouse:memory", num_envs=50, seed=1)
    pool.reset()
    rng, visited = np.random.default_rng(1), np.zeros((5, 5), bool)
    for _ in range(500):
        advance(pool, rng.integers(4, size=50))
        visited[tuple(pool.robots.T)] = True
    assert not visited[[0, 0, 4, 4], [0, 4, 0, 4]].any()
    assert visited.sum() == 21


def test_the_memory_variant_has_at_most_4_items() -> None:
    pool = make_warehouse("warehouse:memory", num_envs=2, spawn=1.0)
    pool.reset()
    assert set(items_of(pool)) == {(0, 1), (0, 2), (0, 3), (1, 0)}  # the first four, row by row
    pool = make_warehouse("warehouse:memory", num_envs=200, spawn=0.3)
    pool.reset()
    counts = [(advance(pool, UP if t % 2 else DOWN), (pool.ages >= 0).sum(axis=1))[1] for t in range(90)]
    assert np.max(counts) == 4
    assert np.min(counts) < 4  # after items expired


@pytest.mark.parametrize(
    ("name", "age", "others", "reward"),
    [
        ("warehouse", 3, {(4, 2): 6}, 1.0),
        ("warehouse:mini", 3, {(4, 2): 6}, 4 / 7),
        ("warehouse:mini", 6, {(4, 2): 3}, 1.0),
        ("warehouse:mini", 0, {(4, 2): 7, (1, 0): 2}, 1 / 8),  # the oldest item counts although it expires in this step
        ("warehouse:mini", 0, {}, 1.0),
        ("warehouse:memory", 3, {(4, 2): 15}, 0.25 * 4 / 16),
        ("warehouse:memory", 9, {(4, 2): 9}, 0.25),
    ],
)
def test_the_reward_of_an_item(name: str, age: int, others: dict[tuple[int, int], int], reward: float) -> None:
    pool = make_static(name, size=(5, 5))
    oldest_first = sorted([*others.items(), ((0, 2), age)], key=lambda item: -item[1])
    arrange(pool, (1, 2), dict(oldest_first))
    assert advance(pool, UP).reward.tolist() == [np.float32(reward)]


# --- the removal bug of the published code ---


@pytest.mark.parametrize(("legacy", "left"), [(False, set()), (True, {(0, 1), (6, 3)})])
def test_in_legacy_the_item_after_an_expired_one_is_removed_one_step_later(
    legacy: bool, left: set[tuple[int, int]]
) -> None:
    """Of four items of equal age, the second and the fourth are skipped and removed later."""
    pool = make_static(legacy=legacy)
    arrange(pool, (3, 3), {(0, 0): 7, (0, 1): 7, (0, 2): 7, (6, 3): 7, (5, 0): 1})
    step = advance(pool, UP)
    assert set(items_of(pool)) == left | {(5, 0)}
    assert step.measures["expired"].tolist() == [4 - len(left)]
    advance(pool, DOWN)
    assert set(items_of(pool)) == ({(6, 3), (5, 0)} if legacy else {(5, 0)})  # again one is removed and one is skipped
    advance(pool, UP)
    assert set(items_of(pool)) == {(5, 0)}


@pytest.mark.parametrize(("legacy", "rewards"), [(False, [1, 0, 0]), (True, [1, 1, 0])])
def test_in_legacy_an_item_collected_after_an_expired_one_is_rewarded_twice(legacy: bool, rewards: list[int]) -> None:
    pool = make_static(legacy=legacy)
    arrange(pool, (1, 3), {(6, 6): 7, (0, 3): 2})
    assert [advance(pool, UP).reward[0] for _ in range(3)] == rewards


def test_in_legacy_items_that_expire_in_different_steps_are_removed_normally() -> None:
    """The order of the list matters, not the cells: each item is removed in the step in which it expires."""
    pool = make_static(legacy=True)
    arrange(pool, (3, 3), {(0, 1): 7, (0, 0): 6})
    advance(pool, UP)
    assert items_of(pool) == {(0, 0): 7}
    advance(pool, UP)
    assert not items_of(pool)
