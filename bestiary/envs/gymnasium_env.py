"""Gymnasium environments with discrete actions: `gymnasium/CartPole-v1`, or a class or function in a user's file.

Observations are converted to the two kinds that agents read: `image` (uint8, channels first) and `vector` (float32). A
Dict or Tuple observation becomes one array per entry. By default, one process steps the environments one after
the other. With `--processes` (only for `gymnasium/...`), each environment runs in its own process. The state of
Gymnasium environments cannot be saved. Numbers in the `info` of a step become measures (`gymnasium_info.py`).
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from bestiary.envs.gymnasium_info import find_measures, numbers_in
from bestiary.envs.gymnasium_vector import SameStepVectorEnv
from bestiary.envs.rewards.components import SCALAR
from bestiary.envs.vector_env import VectorEnv, check_actions, initial_step, spawn_seeds
from bestiary.step import ActionSpec, Arrays, ArraySpec, Step
from bestiary.utils.console import warn
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import option, suggest

CLOSE_SECONDS = 5.0  # maximum time to wait for an unfinished step before the environments are closed


@dataclass(frozen=True)
class SpaceConverter:
    """Converts observations of one Gymnasium space to arrays that agents can read: images or vectors."""

    kind: str  # image or vector
    spec: ArraySpec  # shape and type of a converted observation
    convert: Callable[[Any], np.ndarray]  # observations of N environments [N,...] -> [N, *spec.shape]


def make_converter(space: Any, name: str) -> SpaceConverter:
    """Return the converter of a space that is not a Dict or Tuple. Raise UserError if the space is not supported.

    `name` is the name of the environment; the error message contains it.
    """
    if isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3):
        return _image_converter(space.shape)
    if isinstance(space, Box | MultiBinary) and len(space.shape) <= 1:
        size = int(np.prod(space.shape))
        return _vector_converter(size, lambda x: np.asarray(x, np.float32).reshape(-1, size))
    if isinstance(space, Discrete):
        one_hot = np.eye(int(space.n), dtype=np.float32)
        start = int(space.start)
        return _vector_converter(int(space.n), lambda x: one_hot[np.asarray(x) - start])
    if isinstance(space, MultiDiscrete):
        one_hots = [np.eye(int(n), dtype=np.float32) for n in space.nvec.ravel()]

        def convert(x: Any) -> np.ndarray:
            columns = (np.asarray(x) - space.start).reshape(len(x), -1).T
            return np.concatenate([one_hot[c] for one_hot, c in zip(one_hots, columns, strict=True)], axis=1)

        return _vector_converter(sum(len(one_hot) for one_hot in one_hots), convert)
    raise UserError(
        f"{name}: observation space {_one_line(space)} is not supported; supported: uint8 images [H,W], [H,W,C] or "
        "[C,H,W], vectors, Discrete, MultiDiscrete, MultiBinary, and a Dict or Tuple of these (not nested)"
    )


def _image_converter(shape: tuple[int, ...]) -> SpaceConverter:
    if len(shape) == 2:
        return SpaceConverter("image", ArraySpec((1, *shape), "uint8"), lambda x: np.asarray(x)[:, None])
    if shape[2] in (1, 3, 4):  # channels last
        height, width, channels = shape
        spec = ArraySpec((channels, height, width), "uint8")
        return SpaceConverter("image", spec, lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 1)))
    return SpaceConverter("image", ArraySpec(shape, "uint8"), np.asarray)


def _vector_converter(size: int, convert: Callable[[Any], np.ndarray]) -> SpaceConverter:
    return SpaceConverter("vector", ArraySpec((size,), "float32"), convert)


def make_converters(space: Any, name: str) -> dict[str, tuple[str | None, SpaceConverter]]:
    """Return a dict {name in `Step.observation`: (key, converter)} with one entry per part of an observation space.

    `key` is the key of the part in Gymnasium's Dict. If the space is not a Dict, `key` is None. `name` is the name of
    the environment in error messages.
    """
    if not isinstance(space, gymnasium.spaces.Dict):
        converter = make_converter(space, name)
        return {converter.kind: (None, converter)}
    converters = {key: make_converter(inner, f"{name}[{key}]") for key, inner in space.spaces.items()}
    kinds = [converter.kind for converter in converters.values()]
    names = {}
    for key, converter in converters.items():
        kind = converter.kind
        # The built-in torsos read the names `image` and `vector`. An observation that is the only one of its kind is
        # therefore renamed to its kind, for example "camera" to "image". If another observation already has the key
        # "image", "camera" keeps its key.
        keeps_key = kinds.count(kind) > 1 or (kind in converters and kind != key)
        names[key if keeps_key else kind] = (key, converter)
    return names


def interface_problem(env: Any) -> str | None:
    """Return a message if an object is not a Gymnasium environment whose `reset` accepts a seed, otherwise None."""
    if not isinstance(env, gymnasium.Env):
        return f"{type(env).__name__} is not a subclass of gymnasium.Env; derive it from gymnasium.Env"
    for space in ("observation_space", "action_space"):
        if not isinstance(getattr(env, space, None), gymnasium.Space):
            return f"{space} is {getattr(env, space, None)!r}; set self.{space} to a space of gymnasium.spaces"
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError:
        return (
            "reset does not accept a seed; write reset(self, *, seed=None, options=None) and super().reset(seed=seed)"
        )
    return None


def reset_problem(result: Any) -> str | None:
    """Return a message if `reset` did not return (observation, info), otherwise None."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return None
    return (
        f"reset returned {_describe_result(result)}; it must return (observation, info), where info is a dict "
        "(the old Gym API returned only the observation)"
    )


def step_problem(result: Any) -> str | None:
    """Return a message if `step` did not return (observation, reward, terminated, truncated, info), otherwise None."""
    if isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict):
        for name, value, kinds, expected in (
            ("reward", result[1], "biuf", "a number"),
            # Accept only bools and integers. Texts and nan would count as True.
            ("terminated", result[2], "biu", "True or False"),
            ("truncated", result[3], "biu", "True or False"),
        ):
            array = np.asarray(value)
            if array.shape != () or array.dtype.kind not in kinds:
                found = f"an array of shape {list(array.shape)}" if array.shape else type(value).__name__
                return f"step returned {name}, which is {found}; expected {expected}"
        return None
    return (
        f"step returned {_describe_result(result)}; it must return (observation, reward, terminated, truncated, info), "
        "where info is a dict (the old Gym API returned 4 values with done)"
    )


def _describe_result(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values ({', '.join(type(item).__name__ for item in result)})"
    return f"one object of type {type(result).__name__}"


class ObservationChecker(gymnasium.Wrapper):
    """Wrapper that checks the shape and type of observations, and copies them, because environments may reuse buffers.

    `step` returns an `info` with only the numbers of the environment's `info`; `reset` returns an empty `info`.
    """

    def __init__(self, env: Any, name: str):
        if (problem := interface_problem(env)) is not None:
            raise UserError(f"{name}: {problem}")
        super().__init__(env)
        self.name = name
        self.steps = 0
        self.is_tuple = isinstance(env.observation_space, gymnasium.spaces.Tuple)
        if self.is_tuple:
            self.observation_space = _tuple_as_dict(env.observation_space)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(**kwargs)
        if (problem := reset_problem(result)) is not None:
            raise RunError(f"{self.name}: {problem}")
        return self._check(result[0]), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = self.env.step(action)
        if (problem := step_problem(result)) is not None:
            raise RunError(f"{self.name}: {problem}")
        observation, reward, terminated, truncated, info = result
        self.steps += 1
        return self._check(observation), reward, terminated, truncated, numbers_in(info)

    def _check(self, observation: Any) -> Any:
        keyed = {str(i): item for i, item in enumerate(observation)} if self.is_tuple else observation
        return self._check_space(keyed, self.observation_space, "observation")

    def _check_space(self, observed: Any, space: Any, what: str) -> Any:
        if isinstance(space, gymnasium.spaces.Dict):
            if not isinstance(observed, dict) or set(observed) != set(space.spaces):
                found = ", ".join(observed) if isinstance(observed, dict) else observed
                raise self._error(what, f"a dict of {', '.join(space.spaces)}", found)
            return {
                key: self._check_space(observed[key], inner, f"{what} {key}") for key, inner in space.spaces.items()
            }
        array = np.asarray(observed)
        if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype, "same_kind"):
            raise self._error(what, f"{space.dtype}{list(space.shape)}", f"{array.dtype}{list(array.shape)}")
        if isinstance(space, Discrete | MultiDiscrete) and not space.contains(array.astype(space.dtype)[()]):
            raise self._error(what, str(space), observed)
        return array.astype(space.dtype)

    def _error(self, what: str, expected: str, found: Any) -> RunError:
        return RunError(f"{self.name}: {what} after step {self.steps} should be {expected}, got {found}")


class GymnasiumVectorEnv(VectorEnv):
    """N Gymnasium environments. When an episode ends, its environment is reset in the same step."""

    @dataclass(frozen=True)
    class Options:
        processes: bool = option(False, "run each environment in its own process")
        info_measures: tuple[str, ...] = option(
            (),
            "further keys of `info` whose values are recorded as measures, for example success (numbers in the info of "
            "the first step are always recorded)",
            metavar="KEY,...",
        )

    has_lives = False
    # Measured on the classic tasks (docs/results/classic.md). Episodes are short and a step takes little time, so many
    # small updates learn fastest. Rewards are not clipped. They are scaled, because returns can be in the hundreds.
    # Without scaling, the loss of the critic would dominate the gradient of the torso, because policy and critic share
    # the torso. IMPALA does not normalise advantages, so `reward_scale` also decides how much the entropy bonus counts.
    # With `reward_scale` 0.1, IMPALA's policies became deterministic within 10,000 steps of LunarLander.
    vector_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {"num_envs": 16, "algo.reward_clipping": "none", "algo.reward_scale": 0.1},
        "ppo": {
            "algo.rollout_length": 64,
            "algo.epochs": 10,
            "algo.minibatches": 8,
            "algo.lr": 5e-4,
            "algo.clip": 0.2,
        },
        "impala": {"algo.lr": 2e-3, "algo.entropy_coef": 0.0003, "algo.reward_scale": 0.01},
    }

    def __init__(
        self,
        name: str,
        num_envs: int,
        seed: int | np.random.SeedSequence,
        options: Options,
        render: bool = False,
        constructor: Callable[..., Any] | None = None,
        vector_constructor: Callable[..., Any] | None = None,
    ):
        """Create the environments with `constructor`. If `constructor` is None, use `gymnasium.make(name)`.

        If `vector_constructor` is given, it is a user's function that returns all environments as one
        `gymnasium.vector.VectorEnv`; its first argument is the number of environments.
        """
        self.seeds: list[int] | int = spawn_seeds(seed, num_envs)
        if vector_constructor is not None:
            measures = find_measures(SameStepVectorEnv(vector_constructor(1), name, 1), options.info_measures)
            rendering = {"render_mode": "rgb_array"} if render else {}
            self.env: Any = SameStepVectorEnv(vector_constructor(num_envs, **rendering), name, num_envs)
            self.seeds = self.seeds[0]  # all vector environments accept one seed, but not all accept a list of seeds
        else:
            make = constructor or partial(gymnasium.make, name)
            vector_class = AsyncVectorEnv if options.processes else SyncVectorEnv
            constructors = [partial(_make_checked, make, name, render)] * num_envs
            # Create one environment in this process first: an error about a missing package is then raised here, not
            # inside a worker process.
            measures = find_measures(_make_checked(make, name, False), options.info_measures)
            self.env = vector_class(constructors, autoreset_mode=AutoresetMode.SAME_STEP)
        self.name = name
        self.num_envs = num_envs
        self.render_enabled = render
        self.tasks = (task_name(name),)
        self.gymnasium_space = self.env.single_observation_space
        self.converters = make_converters(self.gymnasium_space, name)
        self.observation_spec = {kind: converter.spec for kind, (_, converter) in self.converters.items()}
        self.action_spec, self.first_action = _make_action_spec(self.env.single_action_space, name)
        self.measures_spec = dict.fromkeys(measures, SCALAR)
        self.ignored_numbers: set[str] = set()  # names of numbers in `info` about which `_measures` has warned
        self.sent: np.ndarray | None = None

    def reset(self) -> Step:
        observation, _ = self.env.reset(seed=self.seeds)
        return initial_step(self._convert(observation), self._measures({}, np.zeros(self.num_envs, bool)))

    def send(self, actions: np.ndarray) -> None:
        self.sent = check_actions(actions, self.action_spec, self.num_envs) + self.first_action

    def recv(self) -> Step:
        assert self.sent is not None, "recv without send"
        observation, reward, terminated, truncated, info = self.env.step(self.sent)
        self.sent = None
        truncated = truncated & ~terminated  # an episode that also terminates in this step is not truncated
        done = terminated | truncated
        return Step(
            observation=self._convert(observation),
            reward=np.asarray(reward, np.float32),
            done=done,
            truncated=truncated,
            game_over=done.copy(),
            task=np.zeros(self.num_envs, np.int64),
            measures=self._measures(info, done),
            final=self._convert_final(info["final_obs"][truncated]) if truncated.any() else {},
        )

    def _measures(self, info: dict[str, Any], done: np.ndarray) -> Arrays:
        """Return the measures of a step by name. `done`, bool [N], is True if an episode ended.

        Gymnasium stores the `info` of the last step of an episode under the key `final_info`.
        """
        final = info.get("final_info", {})
        measures = {}
        for name in self.measures_spec:
            going_on, ended = (np.asarray(numbers.get(name, 0.0), np.float32) for numbers in (info, final))
            measures[name] = np.where(done, ended, going_on).astype(np.float32)
        new = {name for name in (*info, *final) if not name.startswith(("_", "final_"))}
        new -= self.measures_spec.keys() | self.ignored_numbers
        if new:
            self.ignored_numbers |= new
            remedy = f"--info-measures {','.join(sorted(new))}"
            if ".py:" in self.name:
                remedy = f"info_measures = ({', '.join(map(repr, sorted(new)))},) to the class"
            warn(
                f"{self.name}: {', '.join(sorted(new))} in info is not recorded, because it was not in the info of the "
                f"first step; to record it, add {remedy}"
            )
        return measures

    def _convert(self, observation: Any) -> Arrays:
        """Convert the observations of N environments. Return copies, because Gymnasium reuses its buffers."""
        arrays = {}
        for name, (key, converter) in self.converters.items():
            arrays[name] = converter.convert(observation if key is None else observation[key]).copy()
        return arrays

    def _convert_final(self, rows: np.ndarray) -> Arrays:
        """Convert the final observations of truncated episodes. Gymnasium returns them as an array of objects."""
        if isinstance(self.env.single_observation_space, gymnasium.spaces.Dict):
            return self._convert({key: np.stack([row[key] for row in rows]) for key in rows[0]})
        return self._convert(np.stack(list(rows)))

    def render(self) -> list[np.ndarray]:
        with _missing_packages(self.name):
            images = self.env.render() if self.render_enabled else None
        if not images or images[0] is None:
            raise UserError(f"{self.name} cannot be rendered: its class does not support render_mode='rgb_array'")
        return [np.asarray(image, np.uint8) for image in images]

    def close(self) -> None:
        # With --processes, Gymnasium waits for an unfinished step before it ends the processes.
        self.env.close(timeout=CLOSE_SECONDS)


def task_name(name: str) -> str:
    """Return the task name: `gymnasium/CartPole-v1`, or `my_env.py:Maze` (without folder) for a class in a file."""
    return name.rsplit("/", 1)[-1] if ".py:" in name else f"gymnasium/{name}"


def _make_checked(make: Callable[..., Any], name: str, render: bool) -> ObservationChecker:
    with _missing_packages(name):
        return ObservationChecker(make(render_mode="rgb_array") if render else make(), name)


@contextlib.contextmanager
def _missing_packages(name: str) -> Iterator[None]:
    """Return a context manager that raises UserError if an environment needs a package that is not installed.

    If Gymnasium's error contains the command that installs the package, the message contains it, too.
    """
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        text = " ".join(str(error).split())
        extra = re.search(r"gymnasium\[[\w-]+\]", text)
        problem = re.split(r"[,;.] ", text)[0] if extra else text
        remedy = f"; install it with: pip install '{extra[0]}'" if extra else ""
        raise UserError(f"{task_name(name)}: {problem}{remedy}") from error


def _tuple_as_dict(space: Any) -> Any:
    """Return a Tuple space as a Dict with the keys "0", "1", ..."""
    return gymnasium.spaces.Dict({str(i): inner for i, inner in enumerate(space)})


def _one_line(space: Any) -> str:
    return " ".join(str(space).split())


def _make_action_spec(space: Any, name: str) -> tuple[ActionSpec, int]:
    """Return the actions of a Discrete space, and the number of the first action in Gymnasium (`Discrete.start`).

    Raise UserError if the space is not Discrete.
    """
    if not isinstance(space, Discrete):
        raise UserError(
            f"{name}: action space {_one_line(space)} is not supported; only Discrete actions are supported"
        )
    return ActionSpec(tuple(str(i) for i in range(int(space.n)))), int(space.start)


def check_spaces(env: Any, name: str) -> None:
    """Raise UserError if the observations or actions of an environment are not supported. Report all problems."""
    problems: list[str] = []
    space = env.observation_space
    if isinstance(space, gymnasium.spaces.Tuple):
        space = _tuple_as_dict(space)
    checks: tuple[Callable[[], Any], ...] = (
        lambda: make_converters(space, name),
        lambda: _make_action_spec(env.action_space, name),
    )
    for check in checks:
        try:
            check()
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


def check_id(name: str) -> None:
    """Raise UserError if Gymnasium has no environment of this name. The message suggests similar names."""
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        hint = suggest(name, gymnasium.registry.keys())
        raise UserError(f"gymnasium/{name}: {str(error).splitlines()[0].rstrip('.')}{hint}") from error
