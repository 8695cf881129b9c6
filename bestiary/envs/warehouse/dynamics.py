"""Compiled dynamics of N warehouses: `restart`, `advance` and `observe`. `state.py` explains how cells are numbered.

The items of a warehouse are stored as a list of shelf cells, oldest item first, as in the code of the IAM paper (Suau
et al. 2022). The option `legacy` reproduces a bug of this code. The effect of the bug depends on the list order.

In each step, the environment decides at random for each shelf cell whether a new item appears. Each decision consumes
one number of the splitmix64 random stream of the warehouse, even if the cell cannot receive an item.
"""

from functools import partial

import numpy as np

from bestiary.envs.warehouse import state as state_module
from bestiary.envs.warehouse.state import EMPTY, JUST_EMPTIED, Rules, WarehouseState
from bestiary.utils.numba_jit import cached_njit

compile_function = partial(cached_njit, depends_on=(state_module.__file__,))


@compile_function
def restart(rules: Rules, state: WarehouseState, envs: np.ndarray) -> None:
    """Start new episodes in the warehouses with the indices `envs`: place the robot, and create the first items."""
    for env in envs:
        state.robots[env] = rules.start
        state.ages[env] = EMPTY
        state.counts[env] = 0
        state.clocks[env] = 0
        spawn(rules, state, env)


@compile_function
def advance(
    rules: Rules,
    state: WarehouseState,
    actions: np.ndarray,
    reward: np.ndarray,
    collected: np.ndarray,
    expired: np.ndarray,
) -> None:
    """Make one step in all N warehouses. The module docstring of env.py describes the parts of a step.

    The results of each warehouse are added to three arrays, float32 [N]:

        reward      reward of the step
        collected   number of collected items
        expired     number of items that disappeared because of their age
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
        kept, skip_next = 0, False
        for k in range(count):
            shelf = items[k]
            removed = not skip_next and (shelf == robot_shelf or ages[shelf] >= rules.expiry)
            skip_next = removed and rules.legacy
            if removed:
                expired[env] += shelf != robot_shelf
                ages[shelf] = EMPTY if rules.refill else JUST_EMPTIED
            else:
                items[kept] = shelf
                kept += 1
        state.counts[env] = kept
        spawn(rules, state, env)


@compile_function
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


@compile_function
def uniform(stream: np.uint64) -> float:
    """Return the random number in [0,1) that splitmix64 computes from the state of a stream."""
    z = (stream ^ (stream >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compile_function
def observe(state: WarehouseState, item_entries: np.ndarray, value: int, observation: np.ndarray) -> None:
    """Mark the robot and the items of N warehouses in `observation` [N,D], which must be zero before the call.

    To mark means to set an entry to `value`. The robot in cell c is marked in entry c. An item in shelf cell s is
    marked in entry item_entries[s]. `item_entries` is int64 [S].
    """
    for env in range(len(observation)):
        observation[env, state.robots[env]] = value
        for k in range(state.counts[env]):
            observation[env, item_entries[state.items[env, k]]] = value
