"""Environments by name: `family/name`, `world` or `world:mode`, or the user's own `path/to/file.py:Name`."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bestiary import plugins
from bestiary.envs import atari, gymnasium, procgen, toy
from bestiary.envs.pool import Pool
from bestiary.errors import UserError
from bestiary.options import construct, options_of, parse_options, suggest

__all__ = ["FAMILIES", "WORLDS", "Family", "Pool", "canonical", "lookup", "make"]


@dataclass(frozen=True)
class Family:
    """What builds the pools of one environment: `build(num_envs, seed, options, render)`."""

    build: Callable[..., Pool]
    options: type
    default_steps: int
    unite: Callable[[Any], Any] = lambda options: (
        options
    )  # options under which all its environments have the same actions


def _atari(name: str) -> Family:
    atari.check_game(name)
    pool = atari.AtariPool
    return Family(partial(pool, name), pool.Options, pool.default_steps, atari.with_all_actions)


def _procgen(name: str) -> Family:
    procgen.split(name)
    pool = procgen.ProcgenPool
    return Family(partial(pool, name), pool.Options, pool.default_steps)


def _toy(name: str) -> Family:
    if name not in toy.WORLDS:
        raise UserError(f"toy/{name}: the toys are {', '.join(toy.WORLDS)}{suggest(name, toy.WORLDS)}")
    return Family(partial(toy.ToyPool, name), toy.ToyPool.Options, toy.ToyPool.default_steps)


def _gymnasium(name: str) -> Family:
    gymnasium.check_id(name)
    pool = gymnasium.GymnasiumPool
    return Family(partial(pool, name), pool.Options, pool.default_steps)


def _warehouse(name: str) -> Family:
    from bestiary.envs import warehouse  # here, because Numba takes a quarter of a second to import

    if name not in warehouse.VARIANTS:
        raise UserError(f"{name}: the warehouses are {', '.join(warehouse.VARIANTS)}")
    pool = warehouse.WarehousePool
    return Family(partial(pool, name), pool.Options, pool.default_steps)


FAMILIES: dict[str, Callable[[str], Family]] = {  # family/name
    "atari": _atari,
    "procgen": _procgen,
    "gymnasium": _gymnasium,
    "toy": _toy,
}
WORLDS: dict[str, Callable[[str], Family]] = {"warehouse": _warehouse}  # world or world:mode


def lookup(name: str) -> Family:
    """The family that a name belongs to, or a UserError that says what is wrong with the name."""
    if plugins.is_plugin(name):
        return _plugin(name)
    if (world := name.partition(":")[0]) in WORLDS:
        return WORLDS[world](name)
    family, slash, rest = name.partition("/")
    if family not in FAMILIES or not rest:
        hint = suggest(family, [*FAMILIES, *WORLDS])
        if family in WORLDS:
            hint = f"; did you mean {name.replace('/', ':', 1)}?"
        elif not slash and name in atari.games():
            hint = f"; did you mean atari/{name}?"
        elif not slash and name in gymnasium.gymnasium.registry:
            hint = f"; did you mean gymnasium/{name}?"
        known = ", ".join([*(f"{family}/..." for family in FAMILIES), *WORLDS])
        raise UserError(f"unknown environment {name}: names are {known} or path/to/file.py:Name{hint}")
    return FAMILIES[family](rest)


def canonical(name: str) -> str:
    """One name for one environment: with its mode where it has modes, and a user's file by its whole path."""
    if plugins.is_plugin(name):
        return plugins.absolute(name)
    if name.startswith("procgen/"):
        return "procgen/{}:{}".format(*procgen.split(name.removeprefix("procgen/")))
    return name


def _plugin(name: str) -> Family:
    """A user's class: a Pool (it has send and recv) or a Gymnasium environment (it has reset and step)."""
    part = plugins.load(name, "environment", needs=("reset",))
    if hasattr(part, "recv"):
        return Family(partial(_build_pool, part), options_of(part), getattr(part, "default_steps", 500_000))
    plugins.load(name, "environment", needs=("reset", "step"))
    return Family(partial(_build_plugin, name, part), options_of(part), gymnasium.GymnasiumPool.default_steps)


def _build_pool(part: Any, num_envs: int, seed: Any, options: Any, render: bool = False) -> Pool:
    picture = {"render": render} if "render" in inspect.signature(part).parameters else {}
    return construct(part, num_envs, seed, options=options, **picture)


def _build_plugin(name: str, part: Any, num_envs: int, seed: Any, options: Any, render: bool = False) -> Pool:
    if render and "render_mode" not in inspect.signature(part).parameters:
        raise UserError(f"{name} has no picture: its constructor takes no render_mode")

    def constructor(**picture: Any) -> Any:
        return construct(part, options=options, **picture)

    return gymnasium.GymnasiumPool(name, num_envs, seed, gymnasium.GymnasiumPool.Options(), render, constructor)


def make(
    name: str, num_envs: int = 1, seed: int | np.random.SeedSequence = 0, render: bool = False, **options: Any
) -> Pool:
    """A pool of `num_envs` environments: `make("atari/Pong", num_envs=32, seed=1, sticky=0.25)`."""
    family, problems = lookup(name), list[str]()
    known = [f.name for f in dataclasses.fields(family.options)]
    problems += [f"{name}: no option {key}{suggest(key, known)}" for key in options if key not in known]
    parsed = parse_options(family.options, options, "", problems)
    if problems:
        raise UserError(*problems)
    return family.build(num_envs, seed, parsed, render)
