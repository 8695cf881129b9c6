"""Small environments with known optimal returns, for tests and first experiments.

Each game steps all N environments at once with NumPy. Each environment has its own random stream. The complete state
can be saved. The docstring of each game states the optimal return.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from bestiary.envs.rng import RandomStreams
from bestiary.envs.vector_env import (
    EnvInterface,
    VectorEnv,
    check_actions,
    check_saved_arrays,
    initial_step,
    spawn_seeds,
)
from bestiary.step import ActionSpec, Arrays, ArraySpec, Step
from bestiary.utils.options import option


class ToyGame(Protocol):
    """Interface of toy games. One object plays N copies of a game. `state` contains all data that change in a game."""

    actions: tuple[str, ...]
    spec: ArraySpec
    kind: str  # image or vector
    state: Arrays

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        """Start new episodes in the environments in which `rows`, bool [N], is True.

        `streams` are the random streams of the N environments.
        """
        ...

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        """Perform the actions [N]. Return the rewards, float32 [N], and a bool [N]: True if the episode terminated.

        `streams` are the random streams of the N environments.
        """
        ...

    def observe(self) -> np.ndarray:
        """Return the observations [N, *spec.shape]."""
        ...

    def draw(self, row: int) -> np.ndarray:
        """Return an RGB image uint8 [H,W,3] of one environment."""
        ...


class Bandit:
    """Choose one of `size` arms. An episode has one step. Arm k, from 0 to size-1, gives the reward k/(size-1).

    The optimal return is 1; a random policy has the mean return 0.5.
    """

    kind = "vector"

    def __init__(self, n: int, options: "ToyVectorEnv.Options"):
        self.arms = options.size
        self.actions = tuple(f"arm{k}" for k in range(self.arms))
        self.spec = ArraySpec((1,), "float32")
        self.state = {"last_arm": np.full(n, -1)}  # only for the rendered image

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        pass

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        self.state["last_arm"] = actions.copy()
        return (actions / (self.arms - 1)).astype(np.float32), np.ones(len(actions), bool)

    def observe(self) -> np.ndarray:
        return np.ones((len(self.state["last_arm"]), 1), np.float32)

    def draw(self, row: int) -> np.ndarray:
        shades = np.linspace(40, 220, self.arms).astype(np.uint8)
        image = np.repeat(np.tile(shades, (3, 1))[:, :, None], 3, axis=2)
        if self.state["last_arm"][row] >= 0:
            image[1, self.state["last_arm"][row]] = (220, 60, 60)
        return image


class Chain:
    """Walk to the right along `size` cells. The last cell gives the reward 1, each step to the left gives -0.01.

    The optimal return is 1, reached in size-1 steps. A policy that always walks left never reaches the last cell; the
    time limit, by default 4*size steps, truncates its episodes.
    """

    kind = "vector"
    actions = ("left", "right")

    def __init__(self, n: int, options: "ToyVectorEnv.Options"):
        self.cells = options.size
        self.spec = ArraySpec((self.cells,), "float32")
        self.state = {"cell": np.zeros(n, np.int64)}

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        self.state["cell"][rows] = 0

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        cell = np.clip(self.state["cell"] + np.where(actions == 1, 1, -1), 0, self.cells - 1)
        self.state["cell"] = cell
        arrived = cell == self.cells - 1
        step_reward = np.where(actions == 1, 0.0, -0.01)
        return np.where(arrived, 1.0, step_reward).astype(np.float32), arrived

    def observe(self) -> np.ndarray:
        return np.eye(self.cells, dtype=np.float32)[self.state["cell"]]

    def draw(self, row: int) -> np.ndarray:
        image = np.full((1, self.cells, 3), 40, np.uint8)
        image[0, -1] = (60, 160, 60)
        image[0, self.state["cell"][row]] = (230, 200, 60)
        return image


class Recall:
    """Observe one of `size` signs in the first step. `delay` steps later, choose the action with the sign's number.

    The reward of the last action is 1 if it is correct, else 0. The optimal return is 1 with a memory and 1/size
    without a memory. If the inputs of an agent contain its previous action, it needs no memory. It can choose the
    correct action in the first step, and then always repeat its previous action. To prevent this, remove the previous
    action from the inputs with `--agent.extra-inputs reward`.
    """

    kind = "vector"

    def __init__(self, n: int, options: "ToyVectorEnv.Options"):
        self.signs = options.size
        self.delay = options.delay
        self.actions = tuple(f"say{k}" for k in range(self.signs))
        self.spec = ArraySpec((self.signs + 1,), "float32")  # one-hot sign; the last entry is 1 if an answer is due
        self.state = {"sign": np.zeros(n, np.int64), "clock": np.zeros(n, np.int64)}

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        self.state["sign"][rows] = streams.integers(rows, self.signs)[rows]
        self.state["clock"][rows] = 0

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        answered = self.state["clock"] == self.delay
        correct = answered & (actions == self.state["sign"])
        self.state["clock"] = self.state["clock"] + 1
        return correct.astype(np.float32), answered

    def observe(self) -> np.ndarray:
        observation = np.eye(self.signs + 1, dtype=np.float32)[self.state["sign"]]
        observation[self.state["clock"] > 0] = 0.0
        observation[self.state["clock"] == self.delay, -1] = 1.0
        return observation

    def draw(self, row: int) -> np.ndarray:
        return np.repeat((self.observe()[row] * 200 + 30).astype(np.uint8)[None, :, None], 3, axis=2)


class Parity:
    """Observe a number from 0 to size-1 in each step, and choose the action with the sum of all numbers modulo `size`.

    With size 2, this is the parity of the number of ones. An episode has `delay` steps. Each correct action gives the
    reward 1/delay. The optimal return is 1 with a memory. Without a memory, only the answer of the first step is known,
    because the sum is then the observed number. The optimal return is (1 + (delay-1)/size) / delay.
    """

    kind = "vector"

    def __init__(self, n: int, options: "ToyVectorEnv.Options"):
        self.modulus = options.size
        self.length = options.delay
        self.actions = tuple(f"say{k}" for k in range(self.modulus))
        self.spec = ArraySpec((self.modulus + 1,), "float32")  # one-hot number; the last entry is 1 in the first step
        self.state = {name: np.zeros(n, np.int64) for name in ("number", "sum", "clock")}

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        self.state["sum"][rows] = 0
        self.state["clock"][rows] = 0
        self._draw_numbers(rows, streams)

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        correct = actions == self.state["sum"]
        self.state["clock"] = self.state["clock"] + 1
        ended = self.state["clock"] == self.length
        self._draw_numbers(~ended, streams)
        return (correct / self.length).astype(np.float32), ended

    def _draw_numbers(self, rows: np.ndarray, streams: RandomStreams) -> None:
        """Draw the next number of each environment i with `rows[i]` True, and add it to the sum of environment i."""
        self.state["number"][rows] = streams.integers(rows, self.modulus)[rows]
        self.state["sum"][rows] = (self.state["sum"] + self.state["number"])[rows] % self.modulus

    def observe(self) -> np.ndarray:
        observation = np.eye(self.modulus + 1, dtype=np.float32)[self.state["number"]]
        observation[self.state["clock"] == 0, -1] = 1.0
        return observation

    def draw(self, row: int) -> np.ndarray:
        return np.repeat((self.observe()[row] * 200 + 30).astype(np.uint8)[None, :, None], 3, axis=2)


class Catch:
    """Move a paddle below a falling ball. The reward is +1 if the ball is caught and -1 if it is missed.

    The optimal return is 1. The observation is an image of `size` rows. It has half as many columns as rows, but at
    least 3. A game lasts size-1 steps.
    """

    kind = "image"
    actions = ("left", "stay", "right")

    def __init__(self, n: int, options: "ToyVectorEnv.Options"):
        self.rows = options.size
        self.columns = max(3, options.size // 2)
        self.spec = ArraySpec((1, self.rows, self.columns), "uint8")
        self.state = {name: np.zeros(n, np.int64) for name in ("row", "column", "paddle")}

    def restart(self, rows: np.ndarray, streams: RandomStreams) -> None:
        self.state["row"][rows] = 0
        self.state["column"][rows] = streams.integers(rows, self.columns)[rows]
        self.state["paddle"][rows] = self.columns // 2

    def step(self, actions: np.ndarray, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        self.state["row"] = self.state["row"] + 1
        self.state["paddle"] = np.clip(self.state["paddle"] + actions - 1, 0, self.columns - 1)
        landed = self.state["row"] == self.rows - 1
        outcome = np.where(self.state["paddle"] == self.state["column"], 1.0, -1.0)
        return np.where(landed, outcome, 0.0).astype(np.float32), landed

    def observe(self) -> np.ndarray:
        envs = np.arange(len(self.state["row"]))
        image = np.zeros((len(envs), 1, self.rows, self.columns), np.uint8)
        image[envs, 0, self.rows - 1, self.state["paddle"]] = 128
        image[envs, 0, self.state["row"], self.state["column"]] = 255
        return image

    def draw(self, row: int) -> np.ndarray:
        observation = self.observe()[row, 0]
        image = np.full((*observation.shape, 3), 25, np.uint8)
        image[observation == 128] = (90, 160, 230)
        image[observation == 255] = (240, 200, 70)
        return image


TOY_GAMES: dict[str, type] = {"bandit": Bandit, "chain": Chain, "recall": Recall, "parity": Parity, "catch": Catch}
DEFAULT_SIZES = {"bandit": 4, "chain": 8, "recall": 4, "parity": 2, "catch": 10}


class ToyVectorEnv(VectorEnv):
    """N environments of one toy game."""

    @dataclass(frozen=True)
    class Options:
        size: int = option(
            0, "size of the game: number of arms, cells, signs or rows (0: the default of the game)", low=0, high=1000
        )
        delay: int = option(
            4,
            "toy/recall: number of steps between sign and answer; toy/parity: number of steps of an episode",
            low=1,
            high=100_000,
        )
        time_limit: int = option(
            0, "maximum episode length, in steps (0: 4 x size in toy/chain, unlimited in other games)", low=0
        )

        def __post_init__(self) -> None:
            if self.size == 1:
                raise ValueError("--size 1: must be at least 2")

    default_steps: ClassVar[int] = 100_000

    def __init__(
        self, name: str, num_envs: int, seed: int | np.random.SeedSequence, options: Options, render: bool = False
    ):
        self.set_interface(self.make_interface(name, options))
        self.game = _make_game(name, num_envs, options)
        self.num_envs = num_envs
        self.streams = RandomStreams(spawn_seeds(seed, num_envs))
        self.episode_steps = np.zeros(num_envs, np.int64)
        self.sent: np.ndarray | None = None

    @staticmethod
    def make_interface(name: str, options: Options) -> EnvInterface:
        """Return the interface of a game."""
        game = _make_game(name, 1, options)
        return EnvInterface(
            tasks=(f"toy/{name}",),
            observation_spec={game.kind: game.spec},
            action_spec=ActionSpec(game.actions),
            saveable=True,
            has_lives=False,
            max_game_steps=options.time_limit or (4 * _size(name, options) if name == "chain" else 0),
            observes_whole_screen=True,
        )

    def reset(self) -> Step:
        self.game.restart(np.ones(self.num_envs, bool), self.streams)
        self.episode_steps[:] = 0
        return initial_step(self._observe(), {})

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs)

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        reward, terminated = self.game.step(self.sent, self.streams)
        self.sent = None
        self.episode_steps += 1
        truncated = ~terminated & (self.episode_steps == self.max_game_steps)
        final = {k: v[truncated] for k, v in self._observe().items()} if truncated.any() else {}
        done = terminated | truncated
        self.game.restart(done, self.streams)
        self.episode_steps[done] = 0
        return Step(
            observation=self._observe(),
            reward=reward,
            done=done,
            truncated=truncated,
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
            final=final,
        )

    def _observe(self) -> Arrays:
        return {self.game.kind: self.game.observe()}

    def render(self) -> list[np.ndarray]:
        return [self.game.draw(row) for row in range(self.num_envs)]

    def save(self) -> Arrays:
        own = {"streams": self.streams.state, "episode_steps": self.episode_steps}
        return {name: array.copy() for name, array in {**own, **self.game.state}.items()}

    def load(self, state: Arrays) -> None:
        check_saved_arrays(state, self.save())
        self.streams.state = state["streams"].copy()
        self.episode_steps = state["episode_steps"].copy()
        self.game.state = {name: state[name].copy() for name in self.game.state}


def _size(name: str, options: ToyVectorEnv.Options) -> int:
    return options.size or DEFAULT_SIZES[name]


def _make_game(name: str, num_envs: int, options: ToyVectorEnv.Options) -> ToyGame:
    return TOY_GAMES[name](num_envs, replace(options, size=_size(name, options)))
