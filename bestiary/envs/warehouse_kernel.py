"""What happens in N warehouses at once: `restart`, `advance` and `observe`, compiled loops over all of them.

Shelf cells are numbered 0..S-1 (slots, in the order in which an observation has them), all cells 0..R*C-1, row by row. The
items of a warehouse are a list of slots, oldest first, because that is what the published code kept and what its removal
bug (`legacy`) is about. Everything random is one splitmix64 stream a warehouse, of which each test for a new item takes
one number, needed or not.
"""

from typing import NamedTuple

import numpy as np

from bestiary.jit import compiled

EMPTY, JUST_EMPTIED = -1, -2  # ages of a slot without an item


class Rules(NamedTuple):
    """What never changes, and is the same in all N."""

    moves: np.ndarray  # int64 [R*C,4]: the cell that an action leads to from a cell
    slots: np.ndarray  # int64 [R*C]: the slot of a cell, -1 where there is no shelf
    tests: np.ndarray  # int64 [K]: the slots in the order in which they are tested for new items; some come twice
    start: int  # the robot's first cell
    spawn: float  # probability that a test brings an item
    expiry: int  # the age at which an item vanishes
    max_items: int  # that lie there at once
    refill: bool  # a slot emptied in a step may be filled again in the same step
    by_age: bool  # an item pays its age as a fraction of the oldest one's
    scale: float  # of all rewards
    legacy: bool  # whoever follows a removed item in the list is overlooked in that step


class State(NamedTuple):
    """All that N warehouses are; saving them is copying these arrays."""

    robots: np.ndarray  # int64 [N]: the robot's cell
    ages: np.ndarray  # int16 [N,S]: -1 where there is no item
    items: np.ndarray  # int16 [N,S]: the slots of the items, oldest first; only the first `counts` of them
    counts: np.ndarray  # int64 [N]
    clocks: np.ndarray  # int64 [N]: steps of the running episode
    streams: np.ndarray  # uint64 [N]


@compiled
def restart(rules: Rules, state: State, lanes: np.ndarray) -> None:
    """New episodes for some lanes [M]: the robot at its start, and the items of a single spawn pass."""
    for lane in lanes:
        state.robots[lane] = rules.start
        state.ages[lane] = EMPTY
        state.counts[lane] = 0
        state.clocks[lane] = 0
        spawn(rules, state, lane)


@compiled
def advance(
    rules: Rules, state: State, actions: np.ndarray, reward: np.ndarray, collected: np.ndarray, expired: np.ndarray
) -> None:
    """One step of all N: move, grow older, pay, remove, spawn. Adds to reward, collected and expired, float32 [N]."""
    for lane in range(len(actions)):
        robot = rules.moves[state.robots[lane], actions[lane]]
        here = rules.slots[robot]
        ages, items, count = state.ages[lane], state.items[lane], state.counts[lane]
        state.robots[lane] = robot
        state.clocks[lane] += 1
        for k in range(count):
            ages[items[k]] += 1
        if here >= 0 and ages[here] >= 0:
            collected[lane] += 1
            reward[lane] += rules.scale * (ages[here] / ages[items[0]] if rules.by_age else 1.0)
        kept, overlooked = 0, False
        for k in range(count):
            slot = items[k]
            removed = not overlooked and (slot == here or ages[slot] >= rules.expiry)
            overlooked = removed and rules.legacy
            if removed:
                expired[lane] += slot != here
                ages[slot] = EMPTY if rules.refill else JUST_EMPTIED
            else:
                items[kept] = slot
                kept += 1
        state.counts[lane] = kept
        spawn(rules, state, lane)


@compiled
def spawn(rules: Rules, state: State, lane: int) -> None:
    """One pass over the tests for new items."""
    ages, items, count = state.ages[lane], state.items[lane], state.counts[lane]
    stream = state.streams[lane]
    for slot in rules.tests:
        stream += np.uint64(0x9E3779B97F4A7C15)
        if uniform(stream) < rules.spawn and ages[slot] == EMPTY and count < rules.max_items:
            ages[slot] = 0
            items[count] = slot
            count += 1
    state.counts[lane], state.streams[lane] = count, stream
    if not rules.refill:
        for slot in range(len(ages)):
            ages[slot] = max(ages[slot], EMPTY)


@compiled
def uniform(stream: np.uint64) -> float:
    """A number in [0,1) from the place that a stream has come to: the finish of splitmix64."""
    z = (stream ^ (stream >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def observe(state: State, places: np.ndarray, one: int, seen: np.ndarray) -> None:
    """Write `one` into zeros [N,D]: at the robot's cell, and at the place [S] of each item's slot."""
    for lane in range(len(seen)):
        seen[lane, state.robots[lane]] = one
        for k in range(state.counts[lane]):
            seen[lane, places[state.items[lane, k]]] = one
