"""Warehouses for tests, arranged by hand."""

from typing import Any

import numpy as np

from bestiary.envs import make
from bestiary.envs.warehouse import WarehousePool
from bestiary.rollout import Step

UP, DOWN, LEFT, RIGHT = range(4)
PAPER_ITEMS = [  # the cell of each item bit, 49..72
    *((0, c) for c in range(7)),
    *((6, c) for c in range(7)),
    *((1, 0), (1, 6), (2, 0), (2, 6), (3, 0), (3, 6), (4, 0), (4, 6), (5, 0), (5, 6)),
]
MINI_ITEMS = [  # 25..36
    *((0, 1), (0, 2), (0, 3), (4, 1), (4, 2), (4, 3)),
    *((1, 0), (1, 4), (2, 0), (2, 4), (3, 0), (3, 4)),
]
CROWDED = {"spawn": 0.4, "expiry": 3}


def warehouse(name: str = "warehouse", num_envs: int = 1, **options: Any) -> WarehousePool:
    pool = make(name, num_envs=num_envs, **options)
    assert isinstance(pool, WarehousePool)
    return pool


def advance(pool: WarehousePool, *actions: int | np.ndarray) -> Step:
    """The same action in all rows, or one each; the last step."""
    for action in actions:
        pool.send(np.broadcast_to(action, pool.num_envs))
        step = pool.recv()
    return step


def arrange(pool: WarehousePool, robot: tuple[int, int], items: dict[tuple[int, int], int]) -> None:
    """Put the robot and items of these ages, listed oldest first, into all rows; nothing else is changed."""
    state, cells = pool.save(), [tuple(cell) for cell in pool.shelves.tolist()]
    state["robots"][:] = robot[0] * pool.world.size[1] + robot[1]
    state["ages"][:] = -1
    state["counts"][:] = len(items)
    for k, (cell, age) in enumerate(items.items()):
        state["items"][:, k] = cells.index(cell)
        state["ages"][:, cells.index(cell)] = age
    pool.load(state)


def quiet(name: str = "warehouse", **options: Any) -> WarehousePool:
    """One warehouse where nothing appears by itself."""
    pool = warehouse(name, **{"spawn": 0.0, **options})
    pool.reset()
    return pool


def items_of(pool: WarehousePool, row: int = 0) -> dict[tuple[int, int], int]:
    """Cell to age."""
    return {(r, c): int(age) for (r, c), age in zip(pool.shelves.tolist(), pool.ages[row], strict=True) if age >= 0}
