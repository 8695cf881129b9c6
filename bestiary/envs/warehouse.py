"""A robot in a warehouse whose items vanish at an age that nobody sees: `warehouse`, `warehouse:mini`, `warehouse:memory`.

Items appear on shelves, by chance; the robot collects one by standing on it, and what it does not collect in time vanishes.
It sees where it is and where items are, but not how old they are: only a memory can tell. One step:

    1. the robot moves; a move into a wall leaves it where it is
    2. every item grows older by one
    3. an item in the robot's cell is paid for
    4. that item goes, and so does every item that has reached the age of expiry
    5. every shelf cell without an item is tested for a new one, of age 0

So an item is seen in `expiry` observations, and the move after the last of them can still collect it. An episode opens
with step 5 alone and is cut off after `time_limit` steps: a truncation, because nothing in the world ends there.

docs/warehouse.md has the layout of the observation and the numbers to expect.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import numpy as np

from bestiary.envs.observations import FrameStack, VectorStack
from bestiary.envs.pool import check_actions, first_step
from bestiary.envs.warehouse_kernel import EMPTY, Rules, State, advance, observe, restart
from bestiary.envs.warehouse_picture import Scene, draw, write
from bestiary.envs.weightings import SCALAR, Component
from bestiary.errors import UserError
from bestiary.options import option
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step

ACTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # rows, columns


@dataclass(frozen=True)
class World:
    """What a variant is made of. Each field but the first is also an option, which explains it."""

    about: str
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


PAPER = World("collect items, which last 8 steps, along the walls of 7x7 cells; the world of the IAM paper")
MINI = World(
    "5x5 cells, shelves entered only from the middle; the older an item, the more it pays",
    size=(5, 5),
    corners=False,
    along_shelves=False,
    refill=False,
    spawn=0.04,
    reward_mode="age",
)
MEMORY = replace(
    MINI,
    about="as mini, but at most 4 items, which last 16 steps",
    spawn=0.05,
    expiry=16,
    max_items=4,
    reward_scale=0.25,
    time_limit=96,
)
COMPONENTS = {  # of one step; those of a collected item are tied to each other
    "collected": Component("items that the robot collected", (0, 1, 1, 1, 1)),
    "expired": Component("items that vanished because nobody came", (0, 1, 2)),
    "oldest_first": Component("1 where the collected item was the oldest there", (0, 0, 0, 1, 1), "collected"),
    "age_share": Component(
        "age of the collected item, as a share of the oldest one's", (0, 0.5, 0.5, 1, 1), "collected"
    ),
    "left_half": Component("items collected to the left of the middle", (0, 0, 1, 0, 1), "collected"),
    "on_shelf": Component("1 while the robot stands in a shelf's cell", (0, 1)),
    "moved": Component("1 where the robot is in another cell than before", (0, 1)),
}
VARIANTS = {"warehouse": PAPER, "warehouse:mini": MINI, "warehouse:memory": MEMORY}


class WarehousePool:
    """N warehouses of one variant, stepped by compiled code."""

    @dataclass(frozen=True)
    class Options:
        size: tuple[int, int] | None = option(
            None, "rows x columns (none, here and below: as the variant has it)", low=3, high=50
        )
        spacing: int | None = option(
            None, "shelves along every so many rows and columns (0: along the walls)", low=0, high=50
        )
        corners: bool | None = option(
            None, "on or off: shelves also where two lines of them meet, tested twice for items"
        )
        along_shelves: bool | None = option(
            None, "on or off: the robot moves along shelves, not only onto and off them"
        )
        spawn: float | None = option(None, "probability that the test of an empty cell brings an item", low=0, high=1)
        refill: bool | None = option(None, "on or off: a cell emptied in a step may be filled in the same step")
        max_items: int | None = option(
            None, "items that lie there at once (0: as many as there are shelf cells)", low=0
        )
        expiry: int | None = option(None, "the age at which an item vanishes", low=1, high=10_000)
        reward_mode: str | None = option(None, "an item pays 1, or its age / the oldest one's", choices=("one", "age"))
        reward_scale: float | None = option(None, "factor of every reward")
        time_limit: int | None = option(None, "steps after which an episode is cut off", low=1)
        observation: str = option("vector", "what the agent sees", choices=("vector", "image"))
        frame_stack: int = option(1, "how many of the last observations the agent sees at once", low=1, high=64)
        legacy: bool = option(False, "the removal bug of the published code, as docs/warehouse.md explains it")
        render_ages: bool = option(False, "colour the items of pictures by their age")

    default_steps: ClassVar[int] = 4_000_000
    frames_per_step = 1
    saveable = True
    has_lives = False
    whole_screen: ClassVar[bool] = True

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        given = {f.name: getattr(options, f.name, None) for f in fields(World)}
        self.world = replace(VARIANTS[name], **{key: value for key, value in given.items() if value is not None})
        if options.legacy and name != "warehouse":
            raise UserError(f"--legacy: the published {name} does not have the bug; only the 7x7 warehouse has")
        self.num_envs, self.options = num_envs, options
        self.tasks: tuple[str, ...] = (name,)
        self.action_spec = ActionSpec(tuple(ACTIONS))
        self.measures_spec = {measure: ArraySpec((), "float32") for measure in ("collected", "expired")}
        self.rules, self.shelves = make_rules(self.world, options.legacy)
        self.frame = Frame(options.observation, self.world.size, self.shelves)
        self.stack = (FrameStack if options.observation == "image" else VectorStack)(options.frame_stack)
        depth, *rest = self.frame.spec.shape
        spec = replace(self.frame.spec, shape=(depth * options.frame_stack, *rest))
        self.observation_spec = {options.observation: spec}
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        slots = len(self.shelves)
        self.state = State(
            robots=np.full(num_envs, self.rules.start, np.int64),
            ages=np.full((num_envs, slots), EMPTY, np.int16),
            items=np.zeros((num_envs, slots), np.int16),
            counts=np.zeros(num_envs, np.int64),
            clocks=np.zeros(num_envs, np.int64),
            streams=np.array([s.generate_state(1, np.uint64)[0] for s in sequence.spawn(num_envs)], np.uint64),
        )
        self.sent: np.ndarray | None = None
        self.components: dict[str, Component] = {}  # what is measured for rewards, once somebody watches

    @property
    def longest_game(self) -> int:
        return self.world.time_limit

    def watch(self) -> None:
        """From the next reset on, measure what rewards are made of, too."""
        paid = COMPONENTS["collected" if self.world.reward_mode == "one" else "age_share"]
        worth = tuple(self.world.reward_scale * value for value in paid.values)
        self.components = {"reward": Component("the environment's own reward", worth, "collected"), **COMPONENTS}
        self.measures_spec |= dict.fromkeys(COMPONENTS, SCALAR)

    def reset(self) -> Step:
        restart(self.rules, self.state, np.arange(self.num_envs))
        first = self.stack.push(self.frame.take(self.state), np.ones(self.num_envs, bool))
        measures = {name: np.zeros(self.num_envs, np.float32) for name in self.measures_spec}
        return first_step({self.options.observation: first}, measures)

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs).astype(np.int64)

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        kind, n = self.options.observation, self.num_envs
        reward, collected, expired = np.zeros((3, n), np.float32)
        before = (self.state.robots.copy(), self.state.ages.copy()) if self.components else None
        advance(self.rules, self.state, self.sent, reward, collected, expired)
        watched = self._measure(*before, collected) if before is not None else {}
        self.sent = None
        frame, final = self.frame.take(self.state), {}
        truncated = self.state.clocks == self.world.time_limit
        if truncated.any():
            rows = np.flatnonzero(truncated)
            final = {kind: self.stack.peek(rows, frame[rows])}
            restart(self.rules, self.state, rows)
            frame = self.frame.take(self.state)
        return Step(
            observation={kind: self.stack.push(frame, truncated)},
            reward=reward,
            done=truncated.copy(),
            truncated=truncated,
            game_over=truncated.copy(),
            task=np.zeros(n, np.int64),
            measures={"collected": collected, "expired": expired, **watched},
            final=final,
        )

    def _measure(self, robots: np.ndarray, ages: np.ndarray, collected: np.ndarray) -> Arrays:
        """The other components of a step, from the robots [N] and ages [N,S] before it."""
        slots = self.rules.slots[self.state.robots]  # -1: no shelf
        there = collected > 0
        age = np.where(there, ages[np.arange(self.num_envs), slots] + 1, 0)  # when it was collected
        eldest = ages.max(axis=1) + 1
        left = self.state.robots % self.world.size[1] < self.world.size[1] // 2
        found = {
            "oldest_first": there & (age == eldest),
            "age_share": age / np.maximum(eldest, 1),
            "left_half": there & left,
            "on_shelf": slots >= 0,
            "moved": self.state.robots != robots,
        }
        return {name: values.astype(np.float32) for name, values in found.items()}

    @property
    def ages(self) -> np.ndarray:
        """What no agent sees: the age of the item of each shelf cell, -1 where there is none; int16 [N,S]."""
        return self.state.ages.copy()

    @property
    def robots(self) -> np.ndarray:
        """Row and column of each robot, int64 [N,2]."""
        return np.stack(np.divmod(self.state.robots, self.world.size[1]), axis=1)

    @property
    def input_cells(self) -> np.ndarray:
        """Row and column that each number of an observation is about, int64 [D,2]."""
        rows, columns = self.world.size
        cells = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
        items = self.shelves if self.options.observation == "vector" else cells
        return np.tile(np.concatenate([cells, items]), (self.options.frame_stack, 1))

    def render(self) -> list[np.ndarray]:
        return [draw(self._scene(lane)) for lane in range(self.num_envs)]

    def ansi(self, lane: int = 0) -> str:
        """One of the warehouses as lines of text."""
        return write(self._scene(lane))

    def _scene(self, lane: int) -> Scene:
        rows, columns = self.world.size
        cells = self.rules.slots.reshape(rows, columns)
        row, column = divmod(int(self.state.robots[lane]), columns)
        ages = np.where(cells >= 0, self.state.ages[lane][cells], EMPTY)
        return Scene(cells >= 0, ages, (row, column), self.world.expiry if self.options.render_ages else 0)

    def save(self) -> Arrays:
        stack = {} if self.stack.frames is None else {"stack": self.stack.frames.copy()}
        return {**{name: array.copy() for name, array in self.state._asdict().items()}, **stack}

    def load(self, state: Arrays) -> None:
        self.state = State(**{name: state[name].copy() for name in State._fields})
        self.stack.frames = state["stack"].copy() if "stack" in state else None

    def close(self) -> None:
        pass


class Frame:
    """How warehouses become what an agent sees of one moment, arrays [N,*spec.shape]."""

    def __init__(self, kind: str, size: tuple[int, int], shelves: np.ndarray):
        rows, columns = size
        cells = rows * columns
        if kind == "vector":  # the robot's cell, one of all; then for each shelf cell whether there is an item
            items = tuple(range(cells, cells + len(shelves)))
            sets = (
                ("items", items),
                ("legacy", (0, *items)),
            )  # the published code let the memory see entry 0, by mistake
            self.spec = ArraySpec((cells + len(shelves),), "float32", sets)
            self.places, self.one = np.array(items), 1
        else:  # a plane with the robot, and one with the items
            self.spec = ArraySpec((2, rows, columns), "uint8")
            self.places, self.one = cells + shelves @ np.array([columns, 1]), 255

    def take(self, state: State) -> np.ndarray:
        n = len(state.robots)
        flat = np.zeros((n, math.prod(self.spec.shape)), self.spec.dtype)
        observe(state, self.places, self.one, flat)
        return flat.reshape(n, *self.spec.shape)


def make_rules(world: World, legacy: bool) -> tuple[Rules, np.ndarray]:
    """A variant's rules, and the row and column of each shelf cell, int64 [S,2], in the order that observations have.

    That order is the originals': whole rows of shelves first, then what is left of the columns, row by row.
    """
    rows, columns = world.size
    lines = [(0, size - 1) if world.spacing == 0 else tuple(range(0, size, world.spacing)) for size in world.size]
    in_rows = [(r, c) for r in lines[0] for c in range(columns)]
    in_columns = [(r, c) for r in range(rows) for c in lines[1]]
    crossings = {(r, c) for r in lines[0] for c in lines[1]}
    shelves = [cell for cell in dict.fromkeys(in_rows + in_columns) if world.corners or cell not in crossings]
    start = (rows // 2, columns // 2)
    if not shelves:
        raise UserError(f"--spacing {world.spacing} --corners off: no shelf is left")
    if not world.along_shelves and world.corners:
        raise UserError("--along-shelves off --corners on: no robot could reach the items in the corners")
    if not world.along_shelves and start in crossings:
        raise UserError(f"--along-shelves off --spacing {world.spacing}: the robot could never leave its first cell")

    def led_to(row: int, column: int, move: tuple[int, int]) -> int:
        along = (row in lines[0] and move[1] != 0) or (column in lines[1] and move[0] != 0)
        if not along or world.along_shelves:
            row, column = min(max(row + move[0], 0), rows - 1), min(max(column + move[1], 0), columns - 1)
        return row * columns + column

    cells = [(r, c) for r in range(rows) for c in range(columns)]
    slots = {cell: slot for slot, cell in enumerate(shelves)}
    # In two sweeps, which meet twice in each corner; without corners the order is the later variants', row by row.
    tests = in_rows + in_columns if world.corners else sorted(shelves)
    rules = Rules(
        moves=np.array([[led_to(*cell, move) for move in ACTIONS.values()] for cell in cells], np.int64),
        slots=np.array([slots.get(cell, -1) for cell in cells], np.int64),
        tests=np.array([slots[cell] for cell in tests], np.int64),
        start=start[0] * columns + start[1],
        spawn=world.spawn,
        expiry=world.expiry,
        max_items=world.max_items or len(shelves),
        refill=world.refill,
        by_age=world.reward_mode == "age",
        scale=world.reward_scale,
        legacy=legacy,
    )
    return rules, np.array(shelves, np.int64)
