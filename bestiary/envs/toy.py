"""Small worlds whose answers are known, for tests and first steps: `toy/bandit`, `toy/chain`, `toy/recall`, `toy/catch`.

Each world is pure NumPy over all N environments at once, with one random stream an environment, and its whole state can be
saved. The docstring of each says what the best and the blind player earn.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from bestiary.envs.pool import check_actions, first_step, spawn_seeds
from bestiary.envs.streams import Streams
from bestiary.options import option
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step


class World(Protocol):
    """One of the toys: state in plain arrays, so that saving it is copying them."""

    actions: tuple[str, ...]
    spec: ArraySpec
    kind: str  # image or vector
    state: Arrays

    def restart(self, rows: np.ndarray, streams: Streams) -> None: ...

    def step(self, actions: np.ndarray, streams: Streams) -> tuple[np.ndarray, np.ndarray]:
        """Rewards float32 [N] and terminations bool [N]."""
        ...

    def observe(self) -> np.ndarray: ...

    def draw(self, row: int) -> np.ndarray: ...


class Bandit:
    """Pull the arm that pays: one step an episode. Arm k of K pays k/(K-1). Best 1, blind 0.5."""

    kind = "vector"

    def __init__(self, n: int, options: "ToyPool.Options"):
        self.arms = options.size
        self.actions = tuple(f"arm{k}" for k in range(self.arms))
        self.spec = ArraySpec((1,), "float32")
        self.state = {"pulled": np.full(n, -1)}  # last; only for the picture

    def restart(self, rows: np.ndarray, streams: Streams) -> None:
        pass

    def step(self, actions: np.ndarray, streams: Streams) -> tuple[np.ndarray, np.ndarray]:
        self.state["pulled"] = actions.copy()
        return (actions / (self.arms - 1)).astype(np.float32), np.ones(len(actions), bool)

    def observe(self) -> np.ndarray:
        return np.ones((len(self.state["pulled"]), 1), np.float32)

    def draw(self, row: int) -> np.ndarray:
        levels = np.linspace(40, 220, self.arms).astype(np.uint8)
        picture = np.repeat(np.tile(levels, (3, 1))[:, :, None], 3, axis=2)
        if self.state["pulled"][row] >= 0:
            picture[1, self.state["pulled"][row]] = (220, 60, 60)
        return picture


class Chain:
    """Walk right along K cells to the end, which pays 1; each step left or staying costs 0.01 and K*4 steps are the limit.

    Best 1 (in K-1 steps); a player that always walks left never gets there and is cut off: a truncation.
    """

    kind = "vector"
    actions = ("left", "right")

    def __init__(self, n: int, options: "ToyPool.Options"):
        self.cells = options.size
        self.spec = ArraySpec((self.cells,), "float32")
        self.state = {"place": np.zeros(n, np.int64)}

    def restart(self, rows: np.ndarray, streams: Streams) -> None:
        self.state["place"][rows] = 0

    def step(self, actions: np.ndarray, streams: Streams) -> tuple[np.ndarray, np.ndarray]:
        place = np.clip(self.state["place"] + np.where(actions == 1, 1, -1), 0, self.cells - 1)
        self.state["place"] = place
        arrived = place == self.cells - 1
        return np.where(arrived, 1.0, np.where(actions == 1, 0.0, -0.01)).astype(np.float32), arrived

    def observe(self) -> np.ndarray:
        return np.eye(self.cells, dtype=np.float32)[self.state["place"]]

    def draw(self, row: int) -> np.ndarray:
        picture = np.full((1, self.cells, 3), 40, np.uint8)
        picture[0, -1] = (60, 160, 60)
        picture[0, self.state["place"][row]] = (230, 200, 60)
        return picture


class Recall:
    """See one of K signs, wait `delay` steps in the dark, then name it: +1 if right, else 0.

    Only memory tells the sign: best 1, and 1/K without. (An agent that sees its last action can use that as a memory, by
    saying the sign all the while; `--agent.inputs reward` takes it away.)
    """

    kind = "vector"

    def __init__(self, n: int, options: "ToyPool.Options"):
        self.signs, self.delay = options.size, options.delay
        self.actions = tuple(f"say{k}" for k in range(self.signs))
        self.spec = ArraySpec((self.signs + 1,), "float32")  # the sign, and a light when it is time to answer
        self.state = {"sign": np.zeros(n, np.int64), "clock": np.zeros(n, np.int64)}

    def restart(self, rows: np.ndarray, streams: Streams) -> None:
        self.state["sign"][rows] = streams.integers(rows, self.signs)[rows]
        self.state["clock"][rows] = 0

    def step(self, actions: np.ndarray, streams: Streams) -> tuple[np.ndarray, np.ndarray]:
        answered = self.state["clock"] == self.delay
        right = answered & (actions == self.state["sign"])
        self.state["clock"] = self.state["clock"] + 1
        return right.astype(np.float32), answered

    def observe(self) -> np.ndarray:
        shown = np.eye(self.signs + 1, dtype=np.float32)[self.state["sign"]]
        shown[self.state["clock"] > 0] = 0.0
        shown[self.state["clock"] == self.delay, -1] = 1.0
        return shown

    def draw(self, row: int) -> np.ndarray:
        return np.repeat((self.observe()[row] * 200 + 30).astype(np.uint8)[None, :, None], 3, axis=2)


class Catch:
    """A ball falls through a field of `size` rows and half as many columns; move the paddle below it: +1 caught, -1 missed.

    Seen as a picture. Best 1. One game lasts size-1 steps.
    """

    kind = "image"
    actions = ("left", "stay", "right")

    def __init__(self, n: int, options: "ToyPool.Options"):
        self.rows, self.columns = options.size, max(3, options.size // 2)
        self.spec = ArraySpec((1, self.rows, self.columns), "uint8")
        self.state = {name: np.zeros(n, np.int64) for name in ("row", "column", "paddle")}

    def restart(self, rows: np.ndarray, streams: Streams) -> None:
        self.state["row"][rows] = 0
        self.state["column"][rows] = streams.integers(rows, self.columns)[rows]
        self.state["paddle"][rows] = self.columns // 2

    def step(self, actions: np.ndarray, streams: Streams) -> tuple[np.ndarray, np.ndarray]:
        self.state["row"] = self.state["row"] + 1
        self.state["paddle"] = np.clip(self.state["paddle"] + actions - 1, 0, self.columns - 1)
        landed = self.state["row"] == self.rows - 1
        caught = self.state["paddle"] == self.state["column"]
        return np.where(landed, np.where(caught, 1.0, -1.0), 0.0).astype(np.float32), landed

    def observe(self) -> np.ndarray:
        lanes = np.arange(len(self.state["row"]))
        field = np.zeros((len(lanes), 1, self.rows, self.columns), np.uint8)
        field[lanes, 0, self.rows - 1, self.state["paddle"]] = 128
        field[lanes, 0, self.state["row"], self.state["column"]] = 255
        return field

    def draw(self, row: int) -> np.ndarray:
        field = self.observe()[row, 0]
        picture = np.full((*field.shape, 3), 25, np.uint8)
        picture[field == 128] = (90, 160, 230)
        picture[field == 255] = (240, 200, 70)
        return picture


WORLDS: dict[str, type] = {"bandit": Bandit, "chain": Chain, "recall": Recall, "catch": Catch}
SIZES = {"bandit": 4, "chain": 8, "recall": 4, "catch": 10}


class ToyPool:
    """N copies of one toy world."""

    @dataclass(frozen=True)
    class Options:
        size: int = option(0, "arms, cells, signs or rows of the world (0: the world's own size)", low=0, high=1000)
        delay: int = option(4, "steps of darkness in toy/recall", low=1, high=100_000)
        time_limit: int = option(
            0, "steps after which an episode is cut off (0: 4 x size in toy/chain, else none)", low=0
        )

        def __post_init__(self) -> None:
            if self.size == 1:
                raise ValueError("--size 1: a world needs at least two of a thing")

    default_steps: ClassVar[int] = 100_000
    frames_per_step = 1
    saveable = True
    has_lives = False
    whole_screen: ClassVar[bool] = True

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        sized = ToyPool.Options(options.size or SIZES[name], options.delay, options.time_limit)
        self.world: World = WORLDS[name](num_envs, sized)
        self.num_envs = num_envs
        self.tasks: tuple[str, ...] = (f"toy/{name}",)
        self.observation_spec = {self.world.kind: self.world.spec}
        self.action_spec = ActionSpec(self.world.actions)
        self.measures_spec: dict[str, ArraySpec] = {}
        self.time_limit = self.longest_game = options.time_limit or (4 * sized.size if name == "chain" else 0)
        self.streams = Streams(spawn_seeds(seed, num_envs))
        self.age = np.zeros(num_envs, np.int64)
        self.sent: np.ndarray | None = None

    def reset(self) -> Step:
        self.world.restart(np.ones(self.num_envs, bool), self.streams)
        self.age[:] = 0
        return first_step(self._observe(), {})

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs)

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        reward, terminated = self.world.step(self.sent, self.streams)
        self.sent = None
        self.age += 1
        truncated = ~terminated & (self.age == self.time_limit)
        final = {k: v[truncated] for k, v in self._observe().items()} if truncated.any() else {}
        done = terminated | truncated
        self.world.restart(done, self.streams)
        self.age[done] = 0
        task = np.zeros(self.num_envs, np.int64)
        return Step(self._observe(), reward, done, truncated, done.copy(), task, {}, final)

    def _observe(self) -> Arrays:
        return {self.world.kind: self.world.observe()}

    def render(self) -> list[np.ndarray]:
        return [self.world.draw(row) for row in range(self.num_envs)]

    def save(self) -> Arrays:
        return {"streams": self.streams.state.copy(), "age": self.age.copy(), **_copied(self.world.state)}

    def load(self, state: Arrays) -> None:
        self.streams.state, self.age = state["streams"].copy(), state["age"].copy()
        self.world.state = _copied({name: state[name] for name in self.world.state})

    def close(self) -> None:
        pass


def _copied(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}
