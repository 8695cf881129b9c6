"""The variants of the warehouse that Suau et al. published. `make_rules` computes layout and rules from a variant."""

from dataclasses import dataclass, replace

import numpy as np

from bestiary.envs.warehouse.state import Rules
from bestiary.utils.errors import UserError

ACTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # change of row and column


@dataclass(frozen=True)
class WarehouseSpec:
    """The properties of a variant. Each field except `description` is also an option, which env.py explains."""

    description: str
    size: tuple[int, int] = (7, 7)
    spacing: int = 0
    corners: bool = True
    along_shelves: bool = True
    spawn: float = 0.05
    refill: bool = True
    max_items: int = 0
    expiry: int = 8
    reward_mode: str = "one"
    reward_scale: float = 1.0
    time_limit: int = 100


PAPER = WarehouseSpec("7x7 cells with shelves along the walls; items expire after 8 steps (IAM paper)")
MINI = WarehouseSpec(
    "5x5 cells; the robot enters shelves only from the inner cells; the reward grows with the age of the item",
    size=(5, 5),
    corners=False,
    along_shelves=False,
    refill=False,
    spawn=0.04,
    reward_mode="age",
)
MEMORY = replace(
    MINI,
    description="like mini, but at most 4 items, which expire after 16 steps",
    spawn=0.05,
    expiry=16,
    max_items=4,
    reward_scale=0.25,
    time_limit=96,
)
VARIANTS = {"warehouse": PAPER, "warehouse:mini": MINI, "warehouse:memory": MEMORY}


def make_rules(spec: WarehouseSpec, legacy: bool) -> tuple[Rules, np.ndarray]:
    """Return the rules of a variant, and the row and column of each of the S shelf cells, int64 [S,2].

    The shelf cells have the same order as in the observation and in the published code: first the cells of whole shelf
    rows, then the remaining cells of shelf columns, row by row. Raise UserError if the options leave no shelf cell, or
    if the robot cannot reach some of the shelf cells.
    """
    rows, columns = spec.size
    shelf_rows, shelf_columns = (_shelf_lines(length, spec.spacing) for length in spec.size)
    in_rows = [(r, c) for r in shelf_rows for c in range(columns)]
    in_columns = [(r, c) for r in range(rows) for c in shelf_columns]
    crossings = {(r, c) for r in shelf_rows for c in shelf_columns}
    shelves = [cell for cell in dict.fromkeys(in_rows + in_columns) if spec.corners or cell not in crossings]
    start = (rows // 2, columns // 2)
    if not shelves:
        raise UserError(f"--spacing {spec.spacing} --corners off: no shelf cell is left; use a larger --spacing")
    if not spec.along_shelves and spec.corners:
        raise UserError(
            "--along-shelves off --corners on: the robot would be unable to reach items in corners; add --corners off"
        )
    if not spec.along_shelves and start in crossings:
        raise UserError(
            f"--along-shelves off --spacing {spec.spacing}: the robot starts where two shelves cross, and would be "
            "unable to move; use another --spacing"
        )

    def cell_after(row: int, column: int, move: tuple[int, int]) -> int:
        is_along = (row in shelf_rows and move[1] != 0) or (column in shelf_columns and move[0] != 0)
        if not is_along or spec.along_shelves:
            row = min(max(row + move[0], 0), rows - 1)
            column = min(max(column + move[1], 0), columns - 1)
        return row * columns + column

    cells = [(r, c) for r in range(rows) for c in range(columns)]
    shelf_index = {cell: shelf for shelf, cell in enumerate(shelves)}
    # The order in which the environment decides, cell by cell, whether a new item appears. The code of the paper (7x7)
    # processes all shelf rows and then all shelf columns, so each corner is processed twice. The authors' code of the
    # later variants processes the cells row by row.
    spawn_order = in_rows + in_columns if spec.corners else sorted(shelves)
    rules = Rules(
        moves=np.array([[cell_after(*cell, move) for move in ACTIONS.values()] for cell in cells], np.int64),
        shelf_of_cell=np.array([shelf_index.get(cell, -1) for cell in cells], np.int64),
        spawn_order=np.array([shelf_index[cell] for cell in spawn_order], np.int64),
        start=start[0] * columns + start[1],
        spawn=spec.spawn,
        expiry=spec.expiry,
        max_items=spec.max_items or len(shelves),
        refill=spec.refill,
        by_age=spec.reward_mode == "age",
        scale=spec.reward_scale,
        legacy=legacy,
    )
    return rules, np.array(shelves, np.int64)


def _shelf_lines(length: int, spacing: int) -> tuple[int, ...]:
    """Return the indices of the rows (or columns) with shelves. `length` is the number of rows (or columns).

    If `spacing` is 0, these are the first and the last index. Otherwise they are 0, `spacing`, 2 x `spacing`, ...
    """
    return (0, length - 1) if spacing == 0 else tuple(range(0, length, spacing))
