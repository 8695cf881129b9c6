"""Compiled dynamics of N warehouses: `restart`, `advance` and `observe`.

A warehouse has R rows and C columns. Its cells are numbered 0 to R*C-1, row by row. The S shelf cells also have a
second number, 0 to S-1, in the order of the observation. In this package, variables named `shelf` contain this second
number.

The items of a warehouse are stored as a list of shelf cells, oldest item first. The code of the IAM paper (Suau et al.
2022) has the same list, and the effect of the bug that `legacy` reproduces depends on the order of this list. In each
step, the environment decides at random for each shelf cell whether a new item appears. Each of these decisions consumes
one number of the splitmix64 random stream of the warehouse, even if the cell cannot receive an item.
"""

from typing import NamedTuple

import numpy as np

from bestiary.utils.numba_jit import cached_njit

# Values in `ages` for shelf cells without an item. JUST_EMPTIED: the item was removed in this step, and no new item may
# appear in the cell before the next step.
EMPTY, JUST_EMPTIED = -1, -2


class Rules(NamedTuple):
    """The constants of the dynamics. They are the same in all N warehouses."""

    moves: np.ndarray  # int64 [R*C,4]: the cell that each of the four actions leads to
    shelf_of_cell: np.ndarray  # int64 [R*C]: number of the shelf cell, 0 to S-1; -1: the cell has no shelf
    spawn_order: np.ndarray  # int64: order in which shelf cells may receive new items; some shelf cells occur twice
    start: int  # cell in which the robot starts an episode
    spawn: float  # probability that a new item appears; it applies to each entry of `spawn_order`
    expiry: int  # age at which an item disappears
    max_items: int  # maximum number of items at a time
    refill: bool  # True if a shelf cell may receive a new item in the same step in which its item was removed
    by_age: bool  # if True, the reward of an item is its age divided by the age of the oldest item; if False, it is 1
    scale: float  # factor of all rewards
    # True: reproduce a bug of the paper's code: if an item of the list is removed in a step, the next item of the list
    # is not removed in the same step.
    legacy: bool


class WarehouseState(NamedTuple):
    """The complete state of N warehouses."""

    robots: np.ndarray  # int64 [N]: cell of the robot
    ages: np.ndarray  # int16 [N,S]: age of the item in each shelf cell; EMPTY: no item
    # int16 [N,S]: for each item, the number of its shelf cell, oldest item first; only the first counts[i] entries of
    # row i are used.
    items: np.ndarray
    counts: np.ndarray  # int64 [N]: number of items
    clocks: np.ndarray  # int64 [N]: number of steps since the start of the episode
    streams: np.ndarray  # uint64 [N]: state of the random stream


@cached_njit
def restart(rules: Rules, state: WarehouseState, envs: np.ndarray) -> None:
    """Start new episodes in the warehouses with the indices `envs`: place the robot, and create the first items."""
    for env in envs:
        state.robots[env] = rules.start
        state.ages[env] = EMPTY
        state.counts[env] = 0
        state.clocks[env] = 0
        spawn(rules, state, env)


@cached_njit
def advance(
    rules: Rules,
    state: WarehouseState,
    actions: np.ndarray,
    reward: np.ndarray,
    collected: np.ndarray,
    expired: np.ndarray,
) -> None:
    """Make one step in all N warehouses. The module docstring of env.py describes the parts of a step.

    Add the results of each warehouse to three arrays float32 [N]: to `reward` the reward, to `collected` the number of
    collected items, to `expired` the number of items that disappeared because of their age.
    """
    for env in range(len(actions)):
        robot = rules.moves[state.robots[env], actions[env]]
        robot_shelf = rules.shelf_of_cell[robot]
        ages, items, count = state.ages[env], state.items[env], state.counts[env]
        state.robots[env] = robot
        state.clocks[env] += 1
        for k in range(count):
            ages[items[k]] += 1
        if robot_shelf >= 0 and ages[robot_shelf] >= 0:
            collected[env] += 1
            reward[env] += rules.scale * (ages[robot_shelf] / ages[items[0]] if rules.by_age else 1.0)
        kept, skipped = 0, False
        for k in range(count):
            shelf = items[k]
            removed = not skipped and (shelf == robot_shelf or ages[shelf] >= rules.expiry)
            skipped = removed and rules.legacy
            if removed:
                expired[env] += shelf != robot_shelf
                ages[shelf] = EMPTY if rules.refill else JUST_EMPTIED
            else:
                items[kept] = shelf
                kept += 1
        state.counts[env] = kept
        spawn(rules, state, env)


@cached_njit
def spawn(rules: Rules, state: WarehouseState, env: int) -> None:
    """Decide at random for each shelf cell of one warehouse whether a new item appears there, and add these items."""
    ages, items, count = state.ages[env], state.items[env], state.counts[env]
    stream = state.streams[env]
    for shelf in rules.spawn_order:
        stream += np.uint64(0x9E3779B97F4A7C15)
        if uniform(stream) < rules.spawn and ages[shelf] == EMPTY and count < rules.max_items:
            ages[shelf] = 0
            items[count] = shelf
            count += 1
    state.counts[env], state.streams[env] = count, stream
    if not rules.refill:
        for shelf in range(len(ages)):
            ages[shelf] = max(ages[shelf], EMPTY)


@cached_njit
def uniform(stream: np.uint64) -> float:
    """Return the random number in [0,1) that splitmix64 computes from the state of a stream."""
    z = (stream ^ (stream >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@cached_njit
def observe(state: WarehouseState, item_entries: np.ndarray, value: int, observation: np.ndarray) -> None:
    """Mark the robot and the items of N warehouses in `observation` [N,D], which must be zero before the call.

    In the row of each warehouse, set the entry of the robot's cell to `value` and, for each item in a shelf cell, the
    entry item_entries[shelf cell]. `item_entries` is int64 [S].
    """
    for env in range(len(observation)):
        observation[env, state.robots[env]] = value
        for k in range(state.counts[env]):
            observation[env, item_entries[state.items[env, k]]] = value
