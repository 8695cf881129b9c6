"""The warehouse vector environment: `warehouse`, `warehouse:mini`, `warehouse:memory`.

Items appear at random on shelves; the robot collects an item by moving onto it. An item that is not collected in time
disappears. The agent observes the cell of the robot and the cells of the items, but not the ages of the items. To know
the ages, the agent must remember when each item appeared.

One step:

    1. the robot moves; a move into a wall has no effect
    2. the age of each item increases by 1
    3. an item in the robot's cell is rewarded
    4. this item and all items whose age has reached `expiry` are removed
    5. in each shelf cell without an item, a new item of age 0 appears with probability `spawn`

An item is therefore visible in `expiry` observations, and the action after the last of these observations can still
collect the item. At the start of an episode, only part 5 is performed. An episode is truncated after `time_limit`
steps.

Letters of shapes: S shelf cells, D entries of an observation. Variables named `shelf` contain the number of a shelf
cell, 0 to S-1.

docs/warehouse.md describes the layout of the observation and the expected returns.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from bestiary.envs.labelled_quantities import Label
from bestiary.envs.observation_transforms import FrameStack, VectorStack
from bestiary.envs.rewards.components import SCALAR, RewardComponent
from bestiary.envs.vector_env import EnvInterface, VectorEnv, check_actions, check_saved_arrays, initial_step
from bestiary.envs.warehouse.rendering import WarehouseView, draw_image, draw_text
from bestiary.envs.warehouse.state import EMPTY, JUST_EMPTIED, WarehouseState
from bestiary.envs.warehouse.variants import ACTIONS, VARIANTS, WarehouseSpec, make_rules
from bestiary.step import ActionSpec, Arrays, ArraySpec, Step
from bestiary.utils.errors import UserError
from bestiary.utils.options import option

# Reward components. The components that describe a collected item are tied to `collected`: their k-th typical value
# occurs in the same step as the k-th typical value of `collected`.
COMPONENTS = {
    "collected": RewardComponent("number of items collected", (0, 1, 1, 1, 1)),
    "expired": RewardComponent("number of items that expired", (0, 1, 2)),
    "oldest_first": RewardComponent("1 if the collected item was the oldest one", (0, 0, 0, 1, 1), "collected"),
    "age_share": RewardComponent(
        "age of the collected item divided by the age of the oldest item", (0, 0.5, 0.5, 1, 1), "collected"
    ),
    "left_half": RewardComponent("number of items collected left of the middle", (0, 0, 1, 0, 1), "collected"),
    "on_shelf": RewardComponent("1 while the robot is in a shelf cell", (0, 1)),
    "moved": RewardComponent("1 if the robot changed its cell", (0, 1)),
}


class WarehouseVectorEnv(VectorEnv):
    """N warehouses of one variant, stepped by compiled code."""

    @dataclass(frozen=True)
    class Options:
        # The default None of an option means the value of the chosen variant (see variants.py).
        size: tuple[int, int] | None = option(
            None,
            "number of rows and columns (in this group, the default none stands for the value of the chosen variant)",
            low=3,
            high=50,
        )
        spacing: int | None = option(
            None, "K: place shelves along rows and columns 0, K, 2K, ...; 0: only along the four walls", low=0, high=50
        )
        corners: bool | None = option(
            None,
            "place shelves also in cells where rows and columns of shelves cross; these cells have two chances per "
            "step to receive a new item",
        )
        along_shelves: bool | None = option(
            None, "let the robot also move from one shelf cell to the next (off: only onto shelves and off shelves)"
        )
        spawn: float | None = option(
            None, "probability per step that a new item appears in an empty shelf cell", low=0, high=1
        )
        refill: bool | None = option(
            None, "let a new item appear in a shelf cell in the same step in which the previous item was removed"
        )
        max_items: int | None = option(
            None, "maximum number of items at the same time (0: number of shelf cells)", low=0
        )
        expiry: int | None = option(None, "age at which an item disappears, in steps", low=1, high=10_000)
        reward_mode: str | None = option(
            None,
            "reward of an item (one: 1; age: its age divided by the age of the oldest item; none: as in the variant)",
            choices=("one", "age"),
        )
        reward_scale: float | None = option(None, "factor of all rewards")
        time_limit: int | None = option(None, "episode length, in steps", low=1)
        observation: str = option("vector", "kind of observation", choices=("vector", "image"))
        frame_stack: int = option(1, "number of stacked observations", low=1, high=64)
        legacy: bool = option(
            False, "reproduce a bug of the IAM paper's code: some items are removed too late (docs/warehouse.md)"
        )
        render_ages: bool = option(False, "show the age of items by their colour in rendered images")

    default_steps: ClassVar[int] = 4_000_000
    # A step takes little time, so PPO is fastest with many environments and large minibatches.
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "ppo": {
            "num_envs": 128,
            "memory.hidden": 128,
            "algo.rollout_length": 32,
            "algo.epochs": 3,
            "algo.minibatches": 4,
            "algo.lr": 1e-3,
            "algo.discount": 0.95,
            "algo.entropy_coef": 0.003,
        },
    }

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        self.set_interface(self.make_interface(name, options))
        self.num_envs = num_envs
        self.options = options
        self.spec = _make_spec(name, options)
        self.rules, self.shelves = make_rules(self.spec, options.legacy)
        self.encoder = ObservationEncoder(options.observation, self.spec.size, self.shelves)
        self.stack = (FrameStack if options.observation == "image" else VectorStack)(options.frame_stack)
        sequence = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        num_shelves = len(self.shelves)
        self.state = WarehouseState(
            robots=np.full(num_envs, self.rules.start, np.int64),
            ages=np.full((num_envs, num_shelves), EMPTY, np.int16),
            items=np.zeros((num_envs, num_shelves), np.int16),
            counts=np.zeros(num_envs, np.int64),
            clocks=np.zeros(num_envs, np.int64),
            streams=np.array([s.generate_state(1, np.uint64)[0] for s in sequence.spawn(num_envs)], np.uint64),
        )
        self.sent: np.ndarray | None = None

    @staticmethod
    def make_interface(name: str, options: Options) -> EnvInterface:
        """Return the interface of a variant. Raise UserError if the options contradict each other."""
        if options.legacy and name != "warehouse":
            raise UserError(
                "--legacy: reproduces a bug of the published code of warehouse; the published code of "
                f"{name} does not have this bug, so remove --legacy"
            )
        spec = _make_spec(name, options)
        _, shelves = make_rules(spec, options.legacy)
        encoder = ObservationEncoder(options.observation, spec.size, shelves)
        depth, *rest = encoder.spec.shape
        rewarded = COMPONENTS["collected" if spec.reward_mode == "one" else "age_share"]
        rewards = tuple(spec.reward_scale * value for value in rewarded.values)
        return EnvInterface(
            tasks=(name,),
            observation_spec={
                options.observation: replace(encoder.spec, shape=(depth * options.frame_stack, *rest)),
            },
            action_spec=ActionSpec(tuple(ACTIONS)),
            measures_spec={"collected": SCALAR, "expired": SCALAR},
            components={"reward": RewardComponent("reward of the environment", rewards, "collected"), **COMPONENTS},
            saveable=True,
            has_lives=False,
            max_game_steps=spec.time_limit,
            observes_whole_screen=True,
            labels=_make_labels(spec, len(shelves)),
            input_cells=_find_input_cells(spec, options, shelves),
        )

    def reset(self) -> Step:
        _dynamics().restart(self.rules, self.state, np.arange(self.num_envs))
        observation = self.stack.push(self.encoder.encode(self.state), np.ones(self.num_envs, bool))
        measures = {name: np.zeros(self.num_envs, np.float32) for name in self.measures_spec}
        return initial_step({self.options.observation: observation}, measures)

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs).astype(np.int64)

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        kind = self.options.observation
        reward, collected, expired = np.zeros((3, self.num_envs), np.float32)
        before = (self.state.robots.copy(), self.state.ages.copy()) if self.components_enabled else None
        _dynamics().advance(self.rules, self.state, self.sent, reward, collected, expired)
        components = self._compute_components(*before, collected) if before is not None else {}
        self.sent = None
        observation = self.encoder.encode(self.state)
        final = {}
        truncated = self.state.clocks == self.spec.time_limit
        if truncated.any():
            rows = np.flatnonzero(truncated)
            final = {kind: self.stack.peek(rows, observation[rows])}
            _dynamics().restart(self.rules, self.state, rows)
            observation = self.encoder.encode(self.state)
        return Step(
            observation={kind: self.stack.push(observation, truncated)},
            reward=reward,
            done=truncated.copy(),
            truncated=truncated,
            game_over=truncated.copy(),
            task=np.zeros(self.num_envs, np.int64),
            measures={"collected": collected, "expired": expired, **components},
            final=final,
        )

    def _compute_components(self, robots: np.ndarray, ages: np.ndarray, collected: np.ndarray) -> Arrays:
        """Return the reward components of the last step by name, except `collected` and `expired`.

        Args:
            robots: cell number of each robot before the step, [N].
            ages: age of the item in each shelf cell before the step, [N,S].
            collected: number of items collected in the step, [N].
        """
        robot_shelf = self.rules.shelf_of_cell[self.state.robots]  # -1: the robot is not in a shelf cell
        has_collected = collected > 0
        age = np.where(has_collected, ages[np.arange(self.num_envs), robot_shelf] + 1, 0)  # at the time of collection
        oldest = ages.max(axis=1) + 1
        is_left = self.state.robots % self.spec.size[1] < self.spec.size[1] // 2
        components = {
            "oldest_first": has_collected & (age == oldest),
            "age_share": age / np.maximum(oldest, 1),
            "left_half": has_collected & is_left,
            "on_shelf": robot_shelf >= 0,
            "moved": self.state.robots != robots,
        }
        return {name: values.astype(np.float32) for name, values in components.items()}

    @property
    def ages(self) -> np.ndarray:
        """The age of the item in each shelf cell, int16 [N,S]; -1: no item. Agents cannot observe the ages."""
        return self.state.ages.copy()

    @property
    def robots(self) -> np.ndarray:
        """The row and column of each robot, int64 [N,2]."""
        return np.stack(np.divmod(self.state.robots, self.spec.size[1]), axis=1)

    def read_labels(self) -> Arrays:
        row, column = self.robots.T
        values = {"robot_row": row, "robot_column": column}
        values |= {f"item_{k}": ages >= 0 for k, ages in enumerate(self.state.ages.T)}
        values |= {f"age_{k}": np.maximum(ages, EMPTY) for k, ages in enumerate(self.state.ages.T)}
        return {name: array.astype(np.float32) for name, array in values.items()}

    def set_labels(self, values: Mapping[str, float]) -> Arrays:
        if self.options.frame_stack > 1:
            raise UserError("--set: the state of a warehouse can be set only with --frame-stack 1")
        columns = self.spec.size[1]
        for env in range(self.num_envs):
            row, column = divmod(int(self.state.robots[env]), columns)
            self.state.robots[env] = columns * values.get("robot_row", row) + values.get("robot_column", column)
            for name, value in values.items():
                kind, _, shelf = name.partition("_")
                if kind == "age":
                    self._set_age(env, int(shelf), int(value))
                elif kind == "item" and value != (self.state.ages[env, int(shelf)] >= 0):
                    self._set_age(env, int(shelf), 0 if value else EMPTY)
        observation = self.encoder.encode(self.state)
        return {self.options.observation: self.stack.push(observation, np.ones(self.num_envs, bool))}

    def _set_age(self, env: int, shelf: int, age: int) -> None:
        """Set the age of the item in a shelf cell. EMPTY removes the item; otherwise a missing item is added."""
        ages, items = self.state.ages[env], self.state.items[env]
        ages[shelf] = age
        occupied = np.flatnonzero(ages >= 0)
        order = occupied[np.argsort(-ages[occupied].astype(np.int64), kind="stable")]  # oldest item first
        items[: len(order)] = order
        self.state.counts[env] = len(order)

    def render(self) -> list[np.ndarray]:
        return [draw_image(self._view(env)) for env in range(self.num_envs)]

    def render_text(self, env: int = 0) -> str:
        """Return a picture of one warehouse as lines of text."""
        return draw_text(self._view(env))

    def _view(self, env: int) -> WarehouseView:
        rows, columns = self.spec.size
        shelf_of_cell = self.rules.shelf_of_cell.reshape(rows, columns)
        row, column = divmod(int(self.state.robots[env]), columns)
        is_shelf = shelf_of_cell >= 0
        ages = np.where(is_shelf, self.state.ages[env][shelf_of_cell], EMPTY)
        return WarehouseView(is_shelf, ages, (row, column), self.spec.expiry if self.options.render_ages else 0)

    def save(self) -> Arrays:
        state = {name: array.copy() for name, array in self.state._asdict().items()}
        if self.stack.frames is not None:
            state["stack"] = self.stack.frames.copy()
        return state

    def load(self, state: Arrays) -> None:
        self._check_saved(state)
        self.state = WarehouseState(**{name: state[name].copy() for name in WarehouseState._fields})
        self.stack.frames = state["stack"].copy() if "stack" in state else None

    def _check_saved(self, state: Arrays) -> None:
        """Raise ValueError if a saved state is invalid. Compiled code uses its values as indices without a check."""
        expected = self.state._asdict()
        if self.options.frame_stack > 1 or "stack" in state:
            spec = self.observation_spec["image" if self.options.observation == "image" else "vector"]
            frames = state.get("stack", np.zeros(0))
            if frames.dtype != spec.dtype or frames.size != self.num_envs * math.prod(spec.shape):
                expected_shape = (self.num_envs, *spec.shape)
                found = f"{frames.dtype} {frames.shape}"
                raise ValueError(f"the array stack is {found}; observations are {spec.dtype} {expected_shape}")
        num_shelves = len(self.shelves)
        ranges = {
            "robots": (0, len(self.rules.shelf_of_cell) - 1),
            "ages": (min(EMPTY, JUST_EMPTIED), int(np.iinfo(np.int16).max) - 1),
            "items": (0, num_shelves - 1),
            "counts": (0, num_shelves),
        }
        check_saved_arrays(state, expected, ranges)
        for items, ages, count in zip(state["items"], state["ages"], state["counts"], strict=True):
            used = items[:count]
            if len(set(used.tolist())) != count or (ages[used] < 0).any():
                raise ValueError("the array items must contain different shelf cells whose ages are at least 0")


def _dynamics() -> Any:
    """Return the module with the compiled functions. The first call imports Numba, which takes 0.25 s."""
    from bestiary.envs.warehouse import dynamics

    return dynamics


def _make_spec(name: str, options: WarehouseVectorEnv.Options) -> WarehouseSpec:
    """Return the properties of a variant, changed by the options that the user set."""
    given = {field.name: getattr(options, field.name) for field in fields(WarehouseSpec) if field.name != "description"}
    return replace(VARIANTS[name], **{key: value for key, value in given.items() if value is not None})


def _make_labels(spec: WarehouseSpec, num_shelves: int) -> dict[str, Label]:
    """Return the labelled quantities: the cell of the robot, and for each shelf cell its item and the item's age."""
    rows, columns = spec.size
    labels = {
        "robot_row": Label("row of the robot", 0, rows - 1),
        "robot_column": Label("column of the robot", 0, columns - 1),
    }
    for k in range(num_shelves):
        labels[f"item_{k}"] = Label(f"1 if shelf cell {k} has an item", 0, 1, group="item positions")
    for k in range(num_shelves):
        description = f"age of the item in shelf cell {k}, in steps; -1: no item"
        labels[f"age_{k}"] = Label(
            description, EMPTY, spec.expiry - 1, group="item ages", exists_if=(f"item_{k}", 1, 1)
        )
    return labels


def _find_input_cells(spec: WarehouseSpec, options: WarehouseVectorEnv.Options, shelves: np.ndarray) -> np.ndarray:
    """Return an array int64 [D,2] with the row and the column of the cell described by each entry of an observation."""
    rows, columns = spec.size
    cells = np.stack(np.divmod(np.arange(rows * columns), columns), axis=1)
    item_cells = shelves if options.observation == "vector" else cells
    return np.tile(np.concatenate([cells, item_cells]), (options.frame_stack, 1))


class ObservationEncoder:
    """Converts the state of N warehouses to observations [N, *spec.shape], which are not stacked yet."""

    def __init__(self, kind: str, size: tuple[int, int], shelves: np.ndarray):
        rows, columns = size
        num_cells = rows * columns
        if kind == "vector":
            # First one entry per cell: 1 if the robot is there. Then one entry per shelf cell: 1 if it has an item.
            items = tuple(range(num_cells, num_cells + len(shelves)))
            # By mistake, the code of the IAM paper also passed entry 0 to the memory. The index list `legacy`
            # reproduces this.
            sets = (("items", items), ("legacy", (0, *items)))
            self.spec = ArraySpec((num_cells + len(shelves),), "float32", sets)
            self.item_entries = np.array(items)
            self.value = 1
        else:
            # An image of two channels: the first shows the robot, the second the items.
            self.spec = ArraySpec((2, rows, columns), "uint8")
            self.item_entries = num_cells + shelves @ np.array([columns, 1])
            self.value = 255

    def encode(self, state: WarehouseState) -> np.ndarray:
        n = len(state.robots)
        flat = np.zeros((n, math.prod(self.spec.shape)), self.spec.dtype)
        _dynamics().observe(state, self.item_entries, self.value, flat)
        return flat.reshape(n, *self.spec.shape)
