"""Helpers of the warehouse tests: environments with a given robot and given items."""

from typing import Any

import numpy as np

from bestiary.envs import make_env
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from bestiary.rollout import Step

UP, DOWN, LEFT, RIGHT = range(4)
# The cells of the item entries 49..72 of the observation of `warehouse`.
PAPER_ITEMS = [
    *((0, c) for c in range(7)),
    *((6, c) for c in range(7)),
    *((1, 0), (1, 6), (2, 0), (2, 6), (3, 0), (3, 6), (4, 0), (4, 6), (5, 0), (5, 6)),
]
# The cells of the item entries 25..36 of the observation of `warehouse:mini`.
MINI_ITEMS = [
    *((0, 1), (0, 2), (0, 3), (4, 1), (4, 2), (4, 3)),
    *((1, 0), (1, 4), (2, 0), (2, 4), (3, 0), (3, 4)),
]
CROWDED = {"spawn": 0.4, "expiry": 3}


def make_warehouse(name: str = "warehouse", num_envs: int = 1, **options: Any) -> WarehouseVectorEnv:
    pool = make_env(name, num_envs=num_envs, **options)
    assert isinstance(pool, WarehouseVectorEnv)
    return pool


def advance(pool: WarehouseVectorEnv, *actions: int | np.ndarray) -> Step:
    """Perform actions, each either for all rows or one per row, and return the last step."""
    for action in actions:
        pool.send(np.broadcast_to(action, pool.num_envs))
        step = pool.recv()
    return step


def arrange(pool: WarehouseVectorEnv, robot: tuple[int, int], items: dict[tuple[int, int], int]) -> None:
    """Set robot and items (cell -> age, oldest first) of all rows; the rest of the state does not change."""
    state = pool.save()
    cells = [tuple(cell) for cell in pool.shelves.tolist()]
    state["robots"][:] = robot[0] * pool.spec.size[1] + robot[1]
    state["ages"][:] = -1
    state["counts"][:] = len(items)
    for k, (cell, age) in enumerate(items.items()):
        state["items"][:, k] = cells.index(cell)
        state["ages"][:, cells.index(cell)] = age
    pool.load(state)


def make_static(name: str = "warehouse", **options: Any) -> WarehouseVectorEnv:
    """Return a warehouse in which no items appear, after a reset."""
    pool = make_warehouse(name, **{"spawn": 0.0, **options})
    pool.reset()
    return pool


def items_of(pool: WarehouseVectorEnv, row: int = 0) -> dict[tuple[int, int], int]:
    """Return the age of each item of a row, by cell."""
    return {(r, c): int(age) for (r, c), age in zip(pool.shelves.tolist(), pool.ages[row], strict=True) if age >= 0}
