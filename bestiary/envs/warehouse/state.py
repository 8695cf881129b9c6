"""Constants and state of N warehouses, on which the compiled functions of `dynamics.py` operate.

A warehouse has R rows and C columns. Its cells are numbered 0 to R*C-1, row by row. The S shelf cells also have a
second number, 0 to S-1, in the order of the observation. In this package, variables named `shelf` contain this second
number.
"""

from typing import NamedTuple

import numpy as np

# Values in `ages` for shelf cells without an item. JUST_EMPTIED: the item was removed in this step, and no new item may
# appear in the cell before the next step.
EMPTY, JUST_EMPTIED = -1, -2


class Rules(NamedTuple):
    """The constants of the dynamics. They are the same in all N warehouses."""

    moves: np.ndarray  # int64 [R*C,4]: the cell that each of the four actions leads to
    shelf_of_cell: np.ndarray  # int64 [R*C]: number of the shelf cell, 0 to S-1; -1: the cell has no shelf
    spawn_order: np.ndarray  # int64: shelf cells in the order in which they may receive items; some occur twice
    start: int  # cell in which the robot starts an episode
    spawn: float  # probability that a new item appears; it applies to each entry of `spawn_order`
    expiry: int  # age at which an item disappears
    max_items: int  # maximum number of items at a time
    refill: bool  # True if a shelf cell may receive a new item in the same step in which its item was removed
    by_age: bool  # if True, the reward of an item is its age divided by the age of the oldest item; if False, it is 1
    scale: float  # factor of all rewards
    # True: reproduce a bug of the paper's code. If an item is removed in a step, the next item of the list is not
    # checked in this step. It stays in the list even if it has expired or has been collected.
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
