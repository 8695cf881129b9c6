"""Lookup of environments by name, and `make_env`.

A name is `family/game` (`atari/Pong`), a standalone environment with an optional variant (`warehouse:mini`), or a class
or function in a user's file (`path/to/file.py:Name`).
"""

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.envs import atari, atari_games, original_names, procgen, toy
from bestiary.envs.atari_scores import RANDOM_AND_HUMAN_SCORES
from bestiary.envs.step_checks import interface_problems
from bestiary.envs.vector_env import EnvInterface, VectorEnv
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from bestiary.envs.warehouse.variants import VARIANTS
from bestiary.utils import plugins, trust
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct, options_class, parse_keywords, suggest
from bestiary.utils.plugin_names import PluginRef, parse_name

if TYPE_CHECKING:
    import gymnasium.vector


def _unchanged(options: Any) -> Any:
    return options


@dataclass(frozen=True)
class ScoreRange:
    """The two returns of an environment that are normalised to 0 (`low`) and to 1 (`high`).

    Both are returns of the environment's own reward (not of `--reward`).
    """

    low: float
    high: float
    meaning: str  # what 0 and 1 stand for, and the source of the two returns

    def normalise(self, value: Any) -> Any:
        """Return (value - low) / (high - low) for a return or an array of returns."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class EnvSpec:
    """The description of one environment: its options and defaults, and functions to create it."""

    name: str  # canonical name: a ProcGen name includes the mode, and the path of a user's file is absolute
    build: Callable[..., VectorEnv]  # build(num_envs, seed, options, render) creates the vector environment
    # interface(options) returns the interface. For users' and Gymnasium environments it creates one environment; for
    # all others it creates none.
    interface: Callable[[Any], EnvInterface]
    options: type  # dataclass of the options
    default_steps: int  # number of training steps if --steps is not given
    # unify_actions(options) returns options with which all environments of the family have the same actions. Multi-task
    # training uses these options.
    unify_actions: Callable[[Any], Any] = _unchanged
    # Default values for this environment, {algorithm: {option: value}}; the algorithm "" stands for all algorithms.
    # They replace the general defaults of training and component options such as "num_envs" and "memory.hidden".
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Further defaults, in the same form. They are used only if all observations are vectors, and override `defaults`.
    vector_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    score_range: ScoreRange | None = None  # None: returns cannot be normalised
    # in_mode(mode) returns the name of the same game in another mode. None: the environment has no modes.
    in_mode: Callable[[str], str] | None = None

    def defaults_for(self, algorithm: str, interface: EnvInterface | None) -> dict[str, Any]:
        """Return the default values for an algorithm, by option. `interface` is None if it is not known."""
        tables = [self.defaults]
        if interface is not None and all(len(array.shape) == 1 for array in interface.observation_spec.values()):
            tables.append(self.vector_defaults)
        return {
            key: value for table in tables for name in ("", algorithm) for key, value in table.get(name, {}).items()
        }


def _spec(env_class: Any, full_name: str, name: str, **fields: Any) -> EnvSpec:
    return EnvSpec(
        name=full_name,
        build=partial(env_class, name),
        interface=partial(env_class.make_interface, name),
        options=env_class.Options,
        default_steps=env_class.default_steps,
        defaults=env_class.defaults,
        vector_defaults=env_class.vector_defaults,
        **fields,
    )


_built_interfaces: dict[tuple[Any, str], EnvInterface] = {}  # (environment, its options as text) -> interface


def _spec_of_built(
    name: str, key: Any, build: Callable[..., VectorEnv], options: type, vector_class: type[VectorEnv]
) -> EnvSpec:
    """Return the EnvSpec of an environment that must be built before its interface is known.

    `EnvSpec.interface` builds the environment once for each combination of `key` and values of the options, and caches
    the interface. `options` is the class of the options. The class attributes of `vector_class` contain the default
    number of training steps, and the default values of training options.
    """

    def interface(values: Any) -> EnvInterface:
        cache_key = (key, repr(values))
        if cache_key not in _built_interfaces:
            pool = _build_or_explain(build, values)
            try:
                if problems := interface_problems(pool, 1):
                    raise UserError(*(f"{name}: {problem} (see docs/extending.md)" for problem in problems))
                _built_interfaces[cache_key] = pool.interface
            finally:
                pool.close()
        return _built_interfaces[cache_key]

    return EnvSpec(
        name,
        build,
        interface,
        options,
        vector_class.default_steps,
        defaults=vector_class.defaults,
        vector_defaults=vector_class.vector_defaults,
    )


def _build_or_explain(build: Callable[..., VectorEnv], options: Any) -> VectorEnv:
    """Build a vector environment with one environment. If the constructor fails, raise UserError with the cause."""
    working_directory = Path.cwd()
    try:
        return build(1, 0, options, False)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"the environment could not be created: {type(error).__name__}: {error}") from error
    finally:
        os.chdir(working_directory)  # undo a change of directory by the constructor


def _atari(name: str) -> EnvSpec:
    atari_games.check_game(name)
    scores = RANDOM_AND_HUMAN_SCORES.get(name)
    return _spec(
        atari.AtariVectorEnv,
        f"atari/{name}",
        name,
        unify_actions=atari.with_full_actions,
        score_range=ScoreRange(*scores, "0: random policy, 1: human (Wang et al. 2016)") if scores else None,
    )


def _procgen(name: str) -> EnvSpec:
    game, mode = procgen.parse_name(name)
    limits = procgen.return_limits(game, mode)
    score_range = ScoreRange(*limits, "0 and 1: constants of Cobbe et al. 2020") if limits else None
    return _spec(
        procgen.ProcgenVectorEnv,
        f"procgen/{game}:{mode}",
        name,
        score_range=score_range,
        in_mode=f"procgen/{game}:{{}}".format,
    )


def _toy(name: str) -> EnvSpec:
    if name not in toy.TOY_GAMES:
        hint = suggest(name, toy.TOY_GAMES)
        raise UserError(f"toy/{name}: unknown toy environment; available: {', '.join(toy.TOY_GAMES)}{hint}")
    return _spec(toy.ToyVectorEnv, f"toy/{name}", name)


def _gymnasium_env() -> ModuleType:
    """Return the module `gymnasium_env`. It is imported late, because it imports Gymnasium, which is slow."""
    return importlib.import_module("bestiary.envs.gymnasium_env")


def _gymnasium(name: str) -> EnvSpec:
    gymnasium_env = _gymnasium_env()
    gymnasium_env.check_id(name)
    vector_class = gymnasium_env.GymnasiumVectorEnv
    build = partial(vector_class, name)
    return _spec_of_built(f"gymnasium/{name}", name, build, vector_class.Options, vector_class)


def _warehouse(name: str) -> EnvSpec:
    if name not in VARIANTS:
        raise UserError(f"{name}: unknown variant; available: {', '.join(VARIANTS)}")
    return _spec(WarehouseVectorEnv, name, name)


# Families of environments. Names have the form `family/game`.
ENV_FAMILIES: dict[str, Callable[[str], EnvSpec]] = {
    "atari": _atari,
    "procgen": _procgen,
    "gymnasium": _gymnasium,
    "toy": _toy,
}
# Environments outside the families. Names have the form `environment` or `environment:variant`.
STANDALONE_ENVS: dict[str, Callable[[str], EnvSpec]] = {"warehouse": _warehouse}


def options_by_family() -> dict[str, type]:
    """Return the options class of each built-in environment family and standalone environment, by name."""
    return {
        "atari": atari.AtariVectorEnv.Options,
        "procgen": procgen.ProcgenVectorEnv.Options,
        "gymnasium": _gymnasium_env().GymnasiumVectorEnv.Options,
        "toy": toy.ToyVectorEnv.Options,
        "warehouse": WarehouseVectorEnv.Options,
    }


def lookup_env(name: str) -> EnvSpec:
    """Return the EnvSpec of the environment with this name.

    Raise UserError if there is no such environment. The message suggests similar names.
    """
    name = parse_name(name)
    if isinstance(name, PluginRef):
        return _plugin(name)
    if (standalone := name.partition(":")[0]) in STANDALONE_ENVS:
        return STANDALONE_ENVS[standalone](name)
    family, slash, game = name.partition("/")
    if family not in ENV_FAMILIES or not game:
        if names := original_names.bestiary_names(name):
            raise UserError(f"{name}: a name of another project; in Bestiary, write {' '.join(names)}")
        hint = suggest(family, [*ENV_FAMILIES, *STANDALONE_ENVS])
        if family in STANDALONE_ENVS:
            hint = f"; did you mean {name.replace('/', ':', 1)}?"
        elif not slash and (full_name := _games_without_family().get(name.partition(":")[0].lower())):
            hint = f"; did you mean {full_name}{''.join(name.partition(':')[1:])}?"
        elif not slash and name in _gymnasium_env().gymnasium.registry:
            hint = f"; did you mean gymnasium/{name}?"
        known = ", ".join([*(f"{family}/..." for family in ENV_FAMILIES), *STANDALONE_ENVS])
        raise UserError(f"unknown environment {name}; available: {known} or path/to/file.py:Name{hint}")
    return ENV_FAMILIES[family](game)


def _games_without_family() -> dict[str, str]:
    """Return {last part in lower case: name} for all Atari, ProcGen and toy games: {"pong": "atari/Pong", ...}."""
    names = [f"toy/{game}" for game in toy.TOY_GAMES]
    names += [f"procgen/{game}" for game in procgen.GAMES]
    names += [f"atari/{game}" for game in atari_games.list_games()]
    return {name.partition("/")[2].lower(): name for name in names}


def lookup_score_range(name: str) -> ScoreRange | None:
    """Return the score range of an environment, or None if its returns cannot be normalised.

    Unknown names and users' files have no score range. The files are not imported.
    """
    if isinstance(parse_name(name), PluginRef):
        return None
    try:
        return lookup_env(name).score_range
    except UserError:
        return None


def with_mode(name: str, mode: str | None, flag: str = "--valid-mode") -> str:
    """Return the name of the same game in another mode. If `mode` is None, return `name`.

    Raise UserError if the environment has no modes; the message names the option `flag`.
    """
    if mode is None:
        return name
    in_mode = lookup_env(name).in_mode
    if in_mode is None:
        raise UserError(f"{flag} {mode}: {name} has no modes; remove {flag}")
    return in_mode(mode)


def canonical_name(name: str) -> str:
    """Return the unique name of an environment (`EnvSpec.name`). A user's file is not executed."""
    parsed = parse_name(name)
    return parsed.absolute() if isinstance(parsed, PluginRef) else lookup_env(parsed).name


def _plugin(name: PluginRef) -> EnvSpec:
    """Return the EnvSpec of a class or function in a user's file."""
    component = plugins.load(name, "environment")
    if inspect.isfunction(component):
        return function_spec(component, name)
    if not hasattr(component, "recv"):
        plugins.load(name, "environment", required=("reset", "step"))
    return class_spec(component, name)


def function_spec(function: Callable[..., Any], name: str) -> EnvSpec:
    """Return the EnvSpec of a user's function `function(num_envs, ...)` that returns a `gymnasium.vector.VectorEnv`."""
    build = partial(_build_gymnasium_vector, name, function)
    return _spec_of_built(name, function, build, options_class(function), _gymnasium_env().GymnasiumVectorEnv)


def class_spec(env_class: Any, name: str) -> EnvSpec:
    """Return the EnvSpec of a user's class. `name` is the name of the environment (`EnvSpec.name`).

    If the class has a method `recv`, it is a vector environment. If it is a subclass of `gymnasium.vector.VectorEnv`,
    it is treated as a function that returns a vector environment. Otherwise it is a Gymnasium environment.
    """
    options = options_class(env_class)
    if hasattr(env_class, "recv"):
        vector_class = _with_defaults(env_class)
        build = partial(_build_vector_env, vector_class)
        return _spec_of_built(name, env_class, build, options, vector_class)
    if issubclass(env_class, _gymnasium_env().gymnasium.vector.VectorEnv):
        return function_spec(env_class, name)
    for method in ("reset", "step"):
        if getattr(env_class, method) is getattr(_gymnasium_env().gymnasium.Env, method):
            raise UserError(f"{name}: the method {method} is missing (see docs/extending.md#environment)")
    build = partial(_build_gymnasium_env, name, env_class)
    return _spec_of_built(name, env_class, build, options, _gymnasium_env().GymnasiumVectorEnv)


def _with_defaults(env_class: type) -> Any:
    """Return the class itself if it is a VectorEnv. Otherwise return a subclass that adds the defaults of VectorEnv."""
    if issubclass(env_class, VectorEnv):
        return env_class
    return type(env_class.__name__, (env_class, VectorEnv), {})


def _build_vector_env(env_class: Any, num_envs: int, seed: Any, options: Any, render: bool = False) -> VectorEnv:
    rendering = {"render": render} if "render" in inspect.signature(env_class).parameters else {}
    return construct(env_class, num_envs, seed, options=options, **rendering)


def _build_gymnasium_env(
    name: str, env_class: Any, num_envs: int, seed: Any, options: Any, render: bool = False
) -> VectorEnv:
    if render and "render_mode" not in inspect.signature(env_class).parameters:
        raise UserError(
            f"{name} cannot be rendered: its constructor has no parameter render_mode; add render_mode=None"
        )

    def constructor(**rendering: Any) -> Any:
        return construct(env_class, options=options, **rendering)

    vector_class = _gymnasium_env().GymnasiumVectorEnv
    return vector_class(name, num_envs, seed, vector_class.Options(), render, constructor)


def _build_gymnasium_vector(
    name: str, function: Callable[..., Any], num_envs: int, seed: Any, options: Any, render: bool = False
) -> VectorEnv:
    if render and "render_mode" not in inspect.signature(function).parameters:
        raise UserError(f"{name} cannot be rendered: the function has no parameter render_mode; add render_mode=None")
    vector_class = _gymnasium_env().GymnasiumVectorEnv
    make = partial(construct, function, options=options)
    return vector_class(name, num_envs, seed, vector_class.Options(), render, vector_constructor=make)


def make_env(
    name: str, num_envs: int = 1, seed: int | np.random.SeedSequence = 0, render: bool = False, **options: Any
) -> VectorEnv:
    """Return a vector environment of `num_envs` environments.

    Example: `make_env("atari/Pong", num_envs=32, seed=1, sticky=0.25)`. `VectorEnv.render` requires `render=True`.
    A user's file (`my_env.py:Maze`) is executed.

    Raises:
        UserError: the name is unknown, or options are unknown or invalid. The error lists all such options.
    """
    spec = lookup_env(trust.named_by_user(name))
    return spec.build(num_envs, seed, parse_keywords(spec.options, options, name), render)


def make_vec(
    name: str,
    num_envs: int = 1,
    *,
    seed: int | np.random.SeedSequence = 0,
    render_mode: str | None = None,
    **options: Any,
) -> "gymnasium.vector.VectorEnv":
    """Return a Gymnasium vector environment of `num_envs` environments, for programs other than Bestiary.

    Example: `make_vec("atari/Pong", num_envs=8, seed=1, sticky=0.25)`. `render` requires `render_mode="rgb_array"`. A
    user's file (`my_env.py:Maze`) is executed. docs/python-api.md describes observations, resets and `info`.

    Raises:
        UserError: the name is unknown, or options are unknown or invalid. The error lists all such options.
    """

    from bestiary.envs.as_gymnasium import GymnasiumAdapter  # here, because importing Gymnasium is slow

    def build(seed: int | np.random.SeedSequence) -> VectorEnv:
        return make_env(name, num_envs, seed, render_mode is not None, **options)

    return GymnasiumAdapter(build, seed, render_mode)
