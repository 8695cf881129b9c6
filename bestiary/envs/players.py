"""Players of the warehouse that follow a script: what learning has to beat.

    player = make_player("nearest", pool, seed)
    pool.reset()
    while True:
        pool.send(player.act())
        step = pool.recv()

A player looks into the pool, not at observations. `random`, `nearest` and `committed` use only what an agent could see,
`oldest` and `aware` also the ages, which no agent sees.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from bestiary.envs.pool import Pool
from bestiary.envs.warehouse import WarehousePool
from bestiary.errors import UserError
from bestiary.jit import compiled
from bestiary.options import suggest
from bestiary.rollout import Step

AHEAD = 4  # items that `aware` plans for; more bring nothing on 7x7
STEP_COST = 0.2  # what a step is worth to it, in items: 0.1 to 0.2 earn most in all three variants


class Player(Protocol):
    def act(self) -> np.ndarray:
        """Actions int64 [N] for the pool as it is now."""
        ...


class Routes:
    """The shortest ways from every cell to every shelf cell, in moves that the pool's robots can make."""

    def __init__(self, pool: WarehousePool):
        moves = pool.rules.moves  # [R*C,4]
        self.cells = pool.shelves @ (pool.world.size[1], 1)  # [S]
        distance = np.full((len(moves), len(self.cells)), len(moves))  # [R*C,S]; no way is as long as that
        distance[self.cells, np.arange(len(self.cells))] = 0
        while (nearer := np.minimum(distance, 1 + distance[moves].min(axis=1))).sum() < distance.sum():
            distance = nearer
        # Nobody can wait: for an item that appeared below it, a robot moves against a wall, or else off and on again.
        self.steps = 1 + distance[moves].min(axis=1)  # [R*C,S]: moves until the robot stands there, at least one
        self.actions = distance[moves].argmin(axis=1)  # [R*C,S]: the first of them


class Random:
    """Any move."""

    def __init__(self, pool: WarehousePool, seed: int):
        self.pool, self.rng = pool, np.random.default_rng(seed)

    def act(self) -> np.ndarray:
        return self.rng.integers(self.pool.action_spec.n, size=self.pool.num_envs)


Choice = Callable[[WarehousePool, Routes, np.ndarray], np.ndarray]
"""(pool, routes, the slots [N] chosen before) -> the slots [N] to go for now; -1: none."""


class Seeker:
    """Goes for the item that a choice names, by a shortest way; makes any move where it names none."""

    def __init__(self, choose: Choice, pool: WarehousePool, seed: int):
        self.choose, self.pool, self.routes = choose, pool, Routes(pool)
        self.chosen = np.full(pool.num_envs, -1)
        self.idle = Random(pool, seed)

    def act(self) -> np.ndarray:
        self.chosen[self.pool.state.clocks == 0] = -1  # a new episode
        self.chosen = self.choose(self.pool, self.routes, self.chosen)
        towards = self.routes.actions[self.pool.state.robots, self.chosen]
        return np.where(self.chosen >= 0, towards, self.idle.act())


def nearest(pool: WarehousePool, routes: Routes, chosen: np.ndarray) -> np.ndarray:
    """The item that takes the fewest moves; of several the first, row by row."""
    return _least(pool, routes, routes.steps[pool.state.robots])


def committed(pool: WarehousePool, routes: Routes, chosen: np.ndarray) -> np.ndarray:
    """The nearest item, and no other until there is none in that cell any more."""
    still = (chosen >= 0) & (pool.ages[np.arange(pool.num_envs), chosen] >= 0)
    return np.where(still, chosen, nearest(pool, routes, chosen))


def oldest(pool: WarehousePool, routes: Routes, chosen: np.ndarray) -> np.ndarray:
    """The oldest item, be it too far away to be reached in time; of several the nearest."""
    steps = routes.steps[pool.state.robots]
    return _least(pool, routes, steps - (steps.max() + 1) * pool.ages.astype(np.int64))


def aware(pool: WarehousePool, routes: Routes, chosen: np.ndarray) -> np.ndarray:
    """The first item of the best plan for the next four of those that can be reached before they vanish."""
    plans = np.full(pool.num_envs, -1)
    plan_all(routes.steps, routes.cells, pool.state.robots, pool.ages, pool.rules.expiry, pool.rules.by_age, plans)
    return np.where(plans >= 0, plans, nearest(pool, routes, chosen))


def _least(pool: WarehousePool, routes: Routes, cost: np.ndarray) -> np.ndarray:
    """The item of least cost [N,S]; of several the first, row by row; -1 where there are no items."""
    by_row = np.argsort(routes.cells)
    there = pool.ages[:, by_row] >= 0
    first = np.where(there, cost[:, by_row], np.iinfo(np.int64).max).argmin(axis=1)
    return np.where(there.any(axis=1), by_row[first], -1)


@compiled
def plan_all(
    steps: np.ndarray,
    cells: np.ndarray,
    robots: np.ndarray,
    ages: np.ndarray,
    expiry: int,
    by_age: bool,
    plans: np.ndarray,
) -> None:
    """Write the slot that each robot [N] should go for first into plans [N], where there is one within reach.

    A plan is a sequence of up to AHEAD items; it earns what they pay, less STEP_COST for each step until the last. All
    plans are tried, depth first, except those that could not be the best any more. Items yet to appear are not thought of.
    """
    slots = ages.shape[1]
    left = np.zeros(slots, np.int64)  # the ages now of those that the plan does not have yet
    gain = np.zeros(AHEAD)  # of the items before item d of the plan
    clock, cell, tried, taken, spared = np.zeros((5, AHEAD), np.int64)
    for lane in range(len(robots)):
        for slot in range(slots):
            left[slot] = ages[lane, slot] if ages[lane, slot] >= 0 else expiry  # who is that old is out of reach
        best, depth = 0.0, 0
        cell[0], tried[0] = robots[lane], 0
        while depth >= 0:
            if tried[depth] == slots:
                depth -= 1
                if depth >= 0:
                    left[taken[depth]] = spared[depth]
                continue
            slot = tried[depth]
            tried[depth] += 1
            way = steps[cell[depth], slot]
            then = clock[depth] + way
            if left[slot] + then > expiry:
                continue
            pay = 1.0
            if by_age:
                eldest = left[slot]
                for age in left:
                    eldest = max(eldest, age if age + then <= expiry else 0)
                pay = (left[slot] + then) / (eldest + then)
            earned = gain[depth] + pay - STEP_COST * way
            taken[depth], spared[depth] = slot, left[slot]
            if earned > best:
                best, plans[lane] = earned, taken[0]
            ahead = AHEAD - 1 - depth
            if ahead > 0 and earned + ahead * (1 - STEP_COST) > best:
                left[slot] = expiry
                depth += 1
                cell[depth], clock[depth], gain[depth], tried[depth] = cells[slot], then, earned, 0


PLAYERS: dict[str, Callable[[WarehousePool, int], Player]] = {
    "random": Random,
    "nearest": partial(Seeker, nearest),
    "committed": partial(Seeker, committed),
    "oldest": partial(Seeker, oldest),
    "aware": partial(Seeker, aware),
}


def make_player(name: str, pool: Pool, seed: int = 0) -> Player:
    if name not in PLAYERS:
        raise UserError(f"scripted:{name}: there is {', '.join(PLAYERS)}{suggest(name, PLAYERS)}")
    if not isinstance(pool, WarehousePool):
        raise UserError(f"scripted:{name} plays the warehouse, not {', '.join(pool.tasks)}")
    return PLAYERS[name](pool, seed)


def play(player: Player, pool: Pool) -> Iterator[Step]:
    """The steps of a pool under a player, forever, the opening one first."""
    step = pool.reset()
    while True:
        yield step
        pool.send(player.act())
        step = pool.recv()


def play_episodes(player: Player, pool: Pool, episodes: int) -> np.ndarray:
    """What whole episodes earn, float64 [at least `episodes`]; every environment plays as many, its first ones."""
    each = -(-episodes // pool.num_envs)
    earned, count = np.zeros((pool.num_envs, each)), np.zeros(pool.num_envs, np.int64)
    steps = play(player, pool)
    next(steps)
    while (playing := count < each).any():
        step = next(steps)
        earned[playing, count[playing]] += step.reward[playing]
        count[playing & step.done] += 1
    return earned.ravel()
