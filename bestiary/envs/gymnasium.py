"""Any discrete-action environment with the Gymnasium interface: `gymnasium/CartPole-v1`, or the user's `my_env.py:Maze`.

Observations become the kinds that agents read: pictures (uint8, channels last or first) `image`, anything else that is flat
numbers `vector`, and a flat Dict of such spaces one entry a key. These environments run in Python, one after the other (or,
with `--processes`, each in its own process), and their state cannot be saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from bestiary.envs.pool import check_actions, first_step, spawn_seeds
from bestiary.errors import RunError, UserError
from bestiary.options import option, suggest
from bestiary.rollout import ActionSpec, Arrays, ArraySpec, Step


@dataclass(frozen=True)
class Reader:
    """How observations of one space become arrays of one kind."""

    kind: str
    spec: ArraySpec
    read: Callable[[Any], np.ndarray]  # batched [N,...] -> [N, *spec.shape]


def make_reader(space: Any, where: str) -> Reader:
    if isinstance(space, Box) and len(space.shape) == 3 and space.dtype == np.uint8:
        if space.shape[2] in (1, 3, 4):  # channels last, as most environments have them
            h, w, c = space.shape
            return Reader("image", ArraySpec((c, h, w), "uint8"), lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 1)))
        return Reader("image", ArraySpec(space.shape, "uint8"), np.asarray)
    if isinstance(space, Box) and len(space.shape) == 2 and space.dtype == np.uint8:
        return Reader("image", ArraySpec((1, *space.shape), "uint8"), lambda x: np.asarray(x)[:, None])
    if isinstance(space, Box | MultiBinary) and len(space.shape) <= 1:
        size = int(np.prod(space.shape))
        return Reader("vector", ArraySpec((size,), "float32"), lambda x: np.asarray(x, np.float32).reshape(-1, size))
    if isinstance(space, Discrete):
        one_hot, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
        return Reader("vector", ArraySpec((int(space.n),), "float32"), lambda x: one_hot[np.asarray(x) - start])
    if isinstance(space, MultiDiscrete):
        tables = [np.eye(int(n), dtype=np.float32) for n in space.nvec.ravel()]
        size = sum(len(t) for t in tables)

        def read(x: Any) -> np.ndarray:
            columns = (np.asarray(x) - space.start).reshape(len(x), -1).T
            return np.concatenate([t[c] for t, c in zip(tables, columns, strict=True)], axis=1)

        return Reader("vector", ArraySpec((size,), "float32"), read)
    raise UserError(
        f"{where}: observations of {_line(space)} are not supported: bestiary reads uint8 pictures [H,W,C], "
        "flat numbers, Discrete, and a flat Dict or Tuple of these"
    )


def make_readers(space: Any, where: str) -> dict[str, tuple[str | None, Reader]]:
    """From each kind of our observation to the key it comes from (None: the whole) and its reader."""
    if not isinstance(space, gymnasium.spaces.Dict):
        reader = make_reader(space, where)
        return {reader.kind: (None, reader)}
    readers = {key: make_reader(inner, f"{where}[{key}]") for key, inner in space.spaces.items()}
    kinds = [reader.kind for reader in readers.values()]
    # A kind that occurs once is named for itself, which the built-in torsos read; others keep their own key.
    own = {key: kinds.count(r.kind) > 1 or (r.kind in readers and r.kind != key) for key, r in readers.items()}
    return {(key if own[key] else r.kind): (key, r) for key, r in readers.items()}


class Checked(gymnasium.Wrapper):
    """Hands on copies of observations (environments may reuse their buffers), each of just the promised shape and type."""

    def __init__(self, env: Any, name: str):
        super().__init__(env)
        self.name, self.steps = name, 0
        self.tuple = isinstance(env.observation_space, gymnasium.spaces.Tuple)
        if self.tuple:  # a Tuple is read as a Dict whose keys count
            self.observation_space = gymnasium.spaces.Dict({str(i): s for i, s in enumerate(env.observation_space)})

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        return self._check(observation), info

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return self._check(observation), reward, terminated, truncated, info

    def _check(self, observation: Any) -> Any:
        keyed = {str(i): part for i, part in enumerate(observation)} if self.tuple else observation
        return self._check_space(keyed, self.observation_space, "observation")

    def _check_space(self, got: Any, space: Any, what: str) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            if not isinstance(got, dict) or set(got) != set(space.spaces):
                raise self._wrong(
                    what, f"a dict of {', '.join(space.spaces)}", ", ".join(got) if isinstance(got, dict) else got
                )
            return {key: self._check_space(got[key], inner, f"{what} {key}") for key, inner in space.spaces.items()}
        array = np.asarray(got)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise self._wrong(what, f"{space.dtype}{list(space.shape)}", f"{array.dtype}{list(array.shape)}")
        if isinstance(space, Discrete | MultiDiscrete) and not space.contains(array.astype(space.dtype)[()]):
            raise self._wrong(what, str(space), got)
        return array.astype(space.dtype)

    def _wrong(self, what: str, expected: str, got: Any) -> RunError:
        return RunError(f"{self.name}: {what} after step {self.steps} should be {expected}, got {got}")


class GymnasiumPool:
    """N environments behind Gymnasium's vector interface, with resets in the same step."""

    @dataclass(frozen=True)
    class Options:
        processes: bool = option(False, "each environment in a process of its own")

    default_steps: ClassVar[int] = 500_000
    frames_per_step = 1
    saveable = False
    has_lives = False

    def __init__(
        self,
        name: str,
        num_envs: int,
        seed: int | np.random.SeedSequence,
        options: Options,
        render: bool = False,
        constructor: Callable[..., Any] | None = None,
    ):
        make = constructor or partial(gymnasium.make, name)
        makers = [partial(_make_one, make, name, render)] * num_envs
        vectorised = AsyncVectorEnv if options.processes else SyncVectorEnv
        self.env = vectorised(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.name, self.num_envs, self.pictured = name, num_envs, render
        self.tasks: tuple[str, ...] = (task_name(name),)
        self.readers = make_readers(self.env.single_observation_space, name)
        self.observation_spec = {kind: reader.spec for kind, (_, reader) in self.readers.items()}
        self.action_spec, self.first_action = _action_spec(self.env.single_action_space, name)
        self.measures_spec: dict[str, ArraySpec] = {}
        self.seeds = spawn_seeds(seed, num_envs)
        self.sent: np.ndarray | None = None

    def reset(self) -> Step:
        observation, _ = self.env.reset(seed=self.seeds)
        return first_step(self._read(observation), {})

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs) + self.first_action

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        observation, reward, terminated, truncated, info = self.env.step(self.sent)
        self.sent = None
        truncated = truncated & ~terminated  # a true end wins over a time limit in the same step
        done = terminated | truncated
        final = self._read_final(info["final_obs"][truncated]) if truncated.any() else {}
        task = np.zeros(self.num_envs, np.int64)
        return Step(
            self._read(observation), np.asarray(reward, np.float32), done, truncated, done.copy(), task, {}, final
        )

    def _read(self, observation: Any) -> Arrays:
        arrays = {}
        for kind, (key, reader) in self.readers.items():
            arrays[kind] = reader.read(
                observation if key is None else observation[key]
            ).copy()  # the buffers are reused
        return arrays

    def _read_final(self, rows: np.ndarray) -> Arrays:
        keyed = isinstance(self.env.single_observation_space, gymnasium.spaces.Dict)
        if keyed:
            return self._read({key: np.stack([row[key] for row in rows]) for key in rows[0]})
        return self._read(np.stack(list(rows)))

    def render(self) -> list[np.ndarray]:
        pictures = self.env.render() if self.pictured else None
        if not pictures or pictures[0] is None:
            raise UserError(f"{self.name} has no picture: it does not support render_mode='rgb_array'")
        return [np.asarray(picture, np.uint8) for picture in pictures]

    def save(self) -> Arrays:
        return {}

    def load(self, state: Arrays) -> None:
        raise NotImplementedError("the state of Gymnasium environments cannot be loaded")

    def close(self) -> None:
        self.env.close()


def task_name(name: str) -> str:
    """`gymnasium/CartPole-v1`; for a user's file just `my_env.py:Maze`, without its folder."""
    return name.rsplit("/", 1)[-1] if ".py:" in name else f"gymnasium/{name}"


def _make_one(make: Callable[..., Any], name: str, render: bool) -> Any:
    return Checked(make(render_mode="rgb_array") if render else make(), name)


def _line(space: Any) -> str:
    return " ".join(str(space).split())


def _action_spec(space: Any, where: str) -> tuple[ActionSpec, int]:
    if not isinstance(space, Discrete):
        raise UserError(
            f"{where}: actions of {_line(space)} are not supported: bestiary's agents choose from Discrete actions"
        )
    return ActionSpec(tuple(str(i) for i in range(int(space.n)))), int(space.start)


def check_id(name: str) -> None:
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        near = suggest(name, gymnasium.registry.keys())
        raise UserError(f"gymnasium/{name}: {str(error).splitlines()[0].rstrip('.')}{near}") from error
