"""The scripted players: where they go, and in which order they earn."""

import itertools
from typing import Any

import numpy as np
import pytest

from bestiary.envs import make
from bestiary.envs.players import AHEAD, PLAYERS, STEP_COST, Routes, make_player, play_episodes
from bestiary.envs.warehouse import WarehousePool
from bestiary.errors import UserError
from tests.envs.test_warehouse import DOWN, LEFT, RIGHT, UP, advance, arrange, quiet, warehouse


def target(pool: WarehousePool, name: str) -> tuple[int, int] | None:
    """Where the player of the first row ends up, walking until it is paid."""
    player = make_player(name, pool)
    for _ in range(20):
        if advance(pool, player.act()).reward[0]:
            return tuple(pool.robots[0].tolist())
    return None


@pytest.mark.parametrize("options", [{}, {"size": (4, 9)}, {"size": (3, 3), "corners": False}])
def test_routes_are_as_long_as_they_are_on_paper(options: dict[str, Any]) -> None:
    pool = quiet(**options)
    routes = Routes(pool)
    for cell, slot in np.ndindex(*routes.steps.shape):
        row, column = divmod(cell, pool.world.size[1])
        far = abs(pool.shelves[slot] - (row, column)).sum()
        assert routes.steps[cell, slot] == max(far, 1)  # on the spot: against the wall


@pytest.mark.parametrize("name", ["warehouse", "warehouse:mini", "warehouse:memory"])
def test_a_robot_that_follows_a_route_arrives_when_it_says(name: str) -> None:
    pool = quiet(name, time_limit=10_000)
    routes, corners = Routes(pool), [0, 4, 20, 24] if pool.world.size == (5, 5) else []
    for cell, slot in np.ndindex(*routes.steps.shape):
        if cell in corners:
            continue
        arrange(pool, divmod(int(cell), pool.world.size[1]), {})
        for _ in range(routes.steps[cell, slot]):
            advance(pool, routes.actions[pool.state.robots, slot])
        assert pool.robots.tolist() == [pool.shelves[slot].tolist()]


def test_where_there_is_no_wall_an_item_on_the_spot_takes_two_steps() -> None:
    pool = quiet(spacing=3)
    arrange(pool, (3, 3), {(3, 3): 0})
    routes, slot = Routes(pool), pool.shelves.tolist().index([3, 3])
    assert routes.steps[3 * 7 + 3, slot] == 2
    assert target(pool, "nearest") == (3, 3)
    assert pool.state.clocks.tolist() == [2]


def test_nearest_goes_for_the_nearest_and_of_several_for_the_first() -> None:
    pool = quiet()
    arrange(pool, (2, 2), {(0, 5): 3, (6, 2): 3, (2, 0): 0})
    assert target(pool, "nearest") == (2, 0)
    arrange(pool, (3, 3), {(6, 3): 0, (3, 6): 0, (3, 0): 0})
    assert target(pool, "nearest") == (3, 0)


def test_nearest_changes_its_mind_and_committed_does_not() -> None:
    for name, action in (("nearest", RIGHT), ("committed", LEFT)):
        pool = quiet()
        player = make_player(name, pool)
        advance(pool, UP)
        arrange(pool, (3, 3), {(3, 0): 0})
        assert player.act().tolist() == [LEFT]
        arrange(pool, (3, 4), {(3, 0): 1, (3, 6): 0})
        assert player.act().tolist() == [action]
        arrange(pool, (3, 4), {(3, 6): 1})  # what it wanted is gone
        assert player.act().tolist() == [RIGHT]


def test_a_commitment_ends_with_the_episode() -> None:
    pool = quiet(time_limit=2)
    player = make_player("committed", pool)
    advance(pool, UP)
    arrange(pool, (3, 3), {(3, 0): 0})
    advance(pool, player.act())
    arrange(pool, (3, 3), {(3, 0): 0, (2, 6): 0, (0, 3): 0})
    assert player.act().tolist() == [UP]


def test_oldest_goes_for_the_oldest_and_of_several_for_the_nearest() -> None:
    pool = quiet(expiry=50)
    arrange(pool, (4, 1), {(6, 6): 9, (0, 6): 9, (3, 0): 8})
    assert target(pool, "oldest") == (6, 6)
    arrange(pool, (2, 1), {(6, 6): 9, (0, 6): 9, (3, 0): 8})
    assert target(pool, "oldest") == (0, 6)


def test_aware_leaves_what_it_cannot_reach_in_time() -> None:
    pool = quiet()
    for name, reached in (("aware", (6, 3)), ("nearest", None)):
        arrange(pool, (3, 3), {(3, 6): 6, (6, 3): 5})  # three steps to each: the first vanishes before
        assert target(pool, name) == reached


def test_aware_goes_first_for_what_vanishes_first() -> None:
    """Two steps to either: the old one lives just long enough to be first; the young one can wait."""
    pool = quiet(size=(3, 5))
    for name, first in (("aware", (1, 4)), ("nearest", (1, 0))):
        arrange(pool, (1, 2), {(1, 4): 6, (1, 0): 0})
        assert target(pool, name) == first
        assert target(pool, name) == ((1, 0) if name == "aware" else None)


def test_players_wander_where_there_is_nothing() -> None:
    pool = quiet(num_envs=400)
    for name in PLAYERS:
        assert set(make_player(name, pool).act().tolist()) == {UP, DOWN, LEFT, RIGHT}


@pytest.mark.parametrize("name", ["warehouse", "warehouse:mini", "warehouse:memory"])
def test_aware_finds_the_best_of_all_plans(name: str) -> None:
    """Against every sequence of every set of items, in 300 scenes of a busy warehouse."""
    pool = warehouse(name, num_envs=300, seed=1, spawn=0.06, max_items=6)
    pool.reset()
    rng = np.random.default_rng(0)
    for _ in range(20):
        advance(pool, rng.integers(4, size=300))
    player = make_player("aware", pool)
    player.act()
    chosen = player.chosen  # type: ignore[attr-defined]
    routes, planned = Routes(pool), 0
    for row in range(300):
        items = {slot: int(age) for slot, age in enumerate(pool.ages[row]) if age >= 0}
        worth: dict[int, float] = {}
        for count in range(1, min(AHEAD, len(items)) + 1):
            for order in itertools.permutations(items, count):
                cell, clock, earned = int(pool.state.robots[row]), 0, 0.0
                left = dict(items)
                for slot in order:
                    clock += int(routes.steps[cell, slot])
                    cell = int(routes.cells[slot])
                    if items[slot] + clock > pool.world.expiry:
                        break
                    eldest = max(age for age in left.values() if age + clock <= pool.world.expiry)
                    share = (left.pop(slot) + clock) / (eldest + clock)
                    earned += share if pool.rules.by_age else 1.0
                else:
                    worth[order[0]] = max(worth.get(order[0], -9.0), earned - STEP_COST * clock)
        if worth and max(worth.values()) > 1e-9:
            assert worth[chosen[row]] == pytest.approx(max(worth.values()))
            planned += 1
    assert planned > 150


def test_players_earn_in_the_order_of_what_they_know() -> None:
    """250 episodes each; standard errors are about 0.3, the gaps 2 and more."""
    mean = {}
    for name in PLAYERS:
        pool = warehouse(num_envs=125, seed=5)
        returns = play_episodes(make_player(name, pool, seed=1), pool, 250)
        assert returns.shape == (250,)
        mean[name] = returns.mean()
    assert mean["random"] + 3 < mean["oldest"] < mean["committed"] - 10
    assert mean["committed"] < mean["nearest"] < mean["aware"] - 1
    assert 7 < mean["random"] < 11
    assert 41 < mean["nearest"] < 46


def test_the_older_pays_more_so_that_ages_are_worth_knowing() -> None:
    mean = {}
    for name in PLAYERS:
        pool = warehouse("warehouse:memory", num_envs=125, seed=5)
        mean[name] = play_episodes(make_player(name, pool, seed=1), pool, 250).mean()
    assert mean["random"] < 1 < mean["nearest"] < mean["oldest"] - 0.5 < mean["aware"] - 0.9


def test_play_episodes_takes_whole_episodes_of_every_row() -> None:
    pool = warehouse(num_envs=3, seed=5)
    player = make_player("nearest", pool)
    returns = play_episodes(player, pool, 7)
    assert returns.shape == (9,)
    again = warehouse(num_envs=3, seed=5)
    again.reset()
    other, earned = make_player("nearest", again), np.zeros((3, 3))
    for t in range(300):
        earned[:, t // 100] += advance(again, other.act()).reward
    np.testing.assert_array_equal(returns, earned.ravel())


def test_the_same_seed_plays_the_same() -> None:
    def play(seed: int) -> bytes:
        pool = warehouse(num_envs=20, seed=1)
        return play_episodes(make_player("random", pool, seed), pool, 40).tobytes()

    assert play(3) == play(3) != play(4)


def test_unknown_players_and_other_worlds_get_a_line() -> None:
    with pytest.raises(UserError, match=r"scripted:nearst: there is random, .*did you mean nearest"):
        make_player("nearst", quiet())
    with pytest.raises(UserError, match="scripted:nearest plays the warehouse, not toy/chain"):
        make_player("nearest", make("toy/chain"))
