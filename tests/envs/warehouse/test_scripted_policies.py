"""Scripted policies: shortest paths, choice of targets, and order of mean returns."""

import itertools
from typing import Any

import numpy as np
import pytest

from bestiary.envs import make_env
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from bestiary.envs.warehouse.scripted_policies import (
    PLAN_LENGTH,
    SCRIPTED_POLICIES,
    STEP_COST,
    ShortestPaths,
    make_scripted_policy,
    play_returns,
)
from bestiary.utils.errors import UserError
from tests.envs.warehouse.helpers import DOWN, LEFT, RIGHT, UP, advance, arrange, make_static, make_warehouse


def first_collected(pool: WarehouseVectorEnv, name: str) -> tuple[int, int] | None:
    """Return the cell of the first item that a policy collects in row 0, or None if it collects none in 20 steps."""
    policy = make_scripted_policy(name, pool)
    for _ in range(20):
        if advance(pool, policy.act()).reward[0]:
            return tuple(pool.robots[0].tolist())
    return None


@pytest.mark.parametrize("options", [{}, {"size": (4, 9)}, {"size": (3, 3), "corners": False}])
def test_path_lengths_equal_manhattan_distances(options: dict[str, Any]) -> None:
    pool = make_static(**options)
    paths = ShortestPaths(pool)
    for cell, shelf in np.ndindex(*paths.steps.shape):
        row, column = divmod(cell, pool.spec.size[1])
        distance = abs(pool.shelves[shelf] - (row, column)).sum()
        assert paths.steps[cell, shelf] == max(distance, 1)  # at distance 0: one move into the wall


@pytest.mark.parametrize("name", ["warehouse", "warehouse:mini", "warehouse:memory"])
def test_a_robot_that_follows_a_path_arrives_after_its_length(name: str) -> None:
    pool = make_static(name, time_limit=10_000)
    paths = ShortestPaths(pool)
    corners = [0, 4, 20, 24] if pool.spec.size == (5, 5) else []
    for cell, shelf in np.ndindex(*paths.steps.shape):
        if cell in corners:
            continue
        arrange(pool, divmod(int(cell), pool.spec.size[1]), {})
        for _ in range(paths.steps[cell, shelf]):
            advance(pool, paths.actions[pool.state.robots, shelf])
        assert pool.robots.tolist() == [pool.shelves[shelf].tolist()]


def test_without_a_wall_an_item_in_the_robots_cell_takes_two_steps() -> None:
    pool = make_static(spacing=3)
    arrange(pool, (3, 3), {(3, 3): 0})
    paths, shelf = ShortestPaths(pool), pool.shelves.tolist().index([3, 3])
    assert paths.steps[3 * 7 + 3, shelf] == 2
    assert first_collected(pool, "nearest") == (3, 3)
    assert pool.state.clocks.tolist() == [2]


def test_nearest_chooses_the_nearest_item_and_of_several_the_first() -> None:
    pool = make_static()
    arrange(pool, (2, 2), {(0, 5): 3, (6, 2): 3, (2, 0): 0})
    assert first_collected(pool, "nearest") == (2, 0)
    arrange(pool, (3, 3), {(6, 3): 0, (3, 6): 0, (3, 0): 0})
    assert first_collected(pool, "nearest") == (3, 0)


def test_nearest_changes_its_target_and_committed_does_not() -> None:
    for name, action in (("nearest", RIGHT), ("committed", LEFT)):
        pool = make_static()
        policy = make_scripted_policy(name, pool)
        advance(pool, UP)
        arrange(pool, (3, 3), {(3, 0): 0})
        assert policy.act().tolist() == [LEFT]
        arrange(pool, (3, 4), {(3, 0): 1, (3, 6): 0})
        assert policy.act().tolist() == [action]
        arrange(pool, (3, 4), {(3, 6): 1})  # the target is gone
        assert policy.act().tolist() == [RIGHT]


def test_the_target_of_committed_is_reset_with_the_episode() -> None:
    pool = make_static(time_limit=2)
    policy = make_scripted_policy("committed", pool)
    advance(pool, UP)
    arrange(pool, (3, 3), {(3, 0): 0})
    advance(pool, policy.act())
    arrange(pool, (3, 3), {(3, 0): 0, (2, 6): 0, (0, 3): 0})
    assert policy.act().tolist() == [UP]


def test_oldest_chooses_the_oldest_item_and_of_several_the_nearest() -> None:
    pool = make_static(expiry=50)
    arrange(pool, (4, 1), {(6, 6): 9, (0, 6): 9, (3, 0): 8})
    assert first_collected(pool, "oldest") == (6, 6)
    arrange(pool, (2, 1), {(6, 6): 9, (0, 6): 9, (3, 0): 8})
    assert first_collected(pool, "oldest") == (0, 6)


def test_aware_ignores_items_that_it_cannot_reach_in_time() -> None:
    pool = make_static()
    for name, reached in (("aware", (6, 3)), ("nearest", None)):
        arrange(pool, (3, 3), {(3, 6): 6, (6, 3): 5})  # three steps to each: the first expires before
        assert first_collected(pool, name) == reached


def test_aware_collects_first_what_expires_first() -> None:
    """Both items are two steps away; the old one can only be collected first."""
    pool = make_static(size=(3, 5))
    for name, first in (("aware", (1, 4)), ("nearest", (1, 0))):
        arrange(pool, (1, 2), {(1, 4): 6, (1, 0): 0})
        assert first_collected(pool, name) == first
        assert first_collected(pool, name) == ((1, 0) if name == "aware" else None)


def test_policies_move_at_random_without_items() -> None:
    pool = make_static(num_envs=400)
    for name in SCRIPTED_POLICIES:
        assert set(make_scripted_policy(name, pool).act().tolist()) == {UP, DOWN, LEFT, RIGHT}


@pytest.mark.parametrize("name", ["warehouse", "warehouse:mini", "warehouse:memory"])
def test_aware_finds_the_best_of_all_plans(name: str) -> None:
    """Compare with all sequences of items, in 300 states of a warehouse with many items."""
    pool = make_warehouse(name, num_envs=300, seed=1, spawn=0.06, max_items=6)
    pool.reset()
    rng = np.random.default_rng(0)
    for _ in range(20):
        advance(pool, rng.integers(4, size=300))
    policy = make_scripted_policy("aware", pool)
    policy.act()
    targets = policy.targets  # type: ignore[attr-defined]
    paths, num_planned = ShortestPaths(pool), 0
    for row in range(300):
        items = {shelf: int(age) for shelf, age in enumerate(pool.ages[row]) if age >= 0}
        values: dict[int, float] = {}  # best value of a plan, by the shelf cell of its first item
        for count in range(1, min(PLAN_LENGTH, len(items)) + 1):
            for order in itertools.permutations(items, count):
                cell, clock, reward = int(pool.state.robots[row]), 0, 0.0
                remaining = dict(items)
                for shelf in order:
                    clock += int(paths.steps[cell, shelf])
                    cell = int(paths.shelf_cells[shelf])
                    if items[shelf] + clock > pool.spec.expiry:
                        break
                    oldest = max(age for age in remaining.values() if age + clock <= pool.spec.expiry)
                    fraction = (remaining.pop(shelf) + clock) / (oldest + clock)
                    reward += fraction if pool.rules.by_age else 1.0
                else:
                    values[order[0]] = max(values.get(order[0], -9.0), reward - STEP_COST * clock)
        if values and max(values.values()) > 1e-9:
            assert values[targets[row]] == pytest.approx(max(values.values()))
            num_planned += 1
    assert num_planned > 150


def test_mean_returns_increase_with_the_information_that_policies_use() -> None:
    """250 episodes per policy; standard errors are about 0.3, the differences at least 2."""
    mean = {}
    for name in SCRIPTED_POLICIES:
        pool = make_warehouse(num_envs=125, seed=5)
        returns = play_returns(make_scripted_policy(name, pool, seed=1), pool, 250)
        assert returns.shape == (250,)
        mean[name] = returns.mean()
    assert mean["random"] + 3 < mean["oldest"] < mean["committed"] - 10
    assert mean["committed"] < mean["nearest"] < mean["aware"] - 1
    assert 7 < mean["random"] < 11
    assert 41 < mean["nearest"] < 46


def test_in_the_memory_variant_policies_that_use_ages_are_better() -> None:
    mean = {}
    for name in SCRIPTED_POLICIES:
        pool = make_warehouse("warehouse:memory", num_envs=125, seed=5)
        mean[name] = play_returns(make_scripted_policy(name, pool, seed=1), pool, 250).mean()
    assert mean["random"] < 1 < mean["nearest"] < mean["oldest"] - 0.5 < mean["aware"] - 0.9


def test_play_returns_counts_the_same_number_of_whole_episodes_per_row() -> None:
    pool = make_warehouse(num_envs=3, seed=5)
    policy = make_scripted_policy("nearest", pool)
    returns = play_returns(policy, pool, 7)
    assert returns.shape == (9,)
    again = make_warehouse(num_envs=3, seed=5)
    again.reset()
    policy, expected = make_scripted_policy("nearest", again), np.zeros((3, 3))
    for t in range(300):
        expected[:, t // 100] += advance(again, policy.act()).reward
    np.testing.assert_array_equal(returns, expected.ravel())


def test_the_seed_determines_random_policies() -> None:
    def play(seed: int) -> bytes:
        pool = make_warehouse(num_envs=20, seed=1)
        return play_returns(make_scripted_policy("random", pool, seed), pool, 40).tobytes()

    assert play(3) == play(3) != play(4)


def test_unknown_policies_and_other_environments_are_refused() -> None:
    with pytest.raises(UserError, match=r"scripted:nearst: .*random, .*did you mean nearest"):
        make_scripted_policy("nearst", make_static())
    with pytest.raises(UserError, match=r"scripted:nearest: only for the warehouse, not for toy/chain"):
        make_scripted_policy("nearest", make_env("toy/chain"))
