"""Merging of flat dicts of options from the command line, TOML files and Python, and expansion of environment names."""

import re
from collections.abc import Mapping
from typing import Any

from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name


def override_options(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two dicts of options. If both have a key, the value in `upper` is used.

    If `upper` chooses another component or environment family than `lower`, the options in `lower` for the replaced
    component or family are dropped. Example: if `memory` is replaced, `memory.hidden` of `lower` is dropped. An option
    can have two spellings (`lr` and `algo.lr`). `resolve` uses the spelling that comes last, so the keys of `upper`
    come last in the result.
    """
    kinds = (*DEFAULT_COMPONENTS, "logger")
    replaced = {kind for kind in kinds if kind in upper and kind in lower and upper[kind] != lower[kind]}
    if "env" in upper and "env" in lower and _env_families(upper["env"]) != _env_families(lower["env"]):
        replaced.add("env")
    kept = {k: v for k, v in lower.items() if k not in upper and k.split(".")[0] not in replaced - {k}}
    return {**kept, **upper}


def _env_families(env: Any) -> set[str]:
    """Return the families of environments, for example {"atari"}. A user's environment is its own family."""
    names = expand_env_names(env)
    return {name if isinstance(name, PluginRef) else re.split("[/:]", name)[0] for name in names}


def expand_env_names(env: Any) -> tuple[str, ...]:
    """Return the environment names in `env`, which is one name or a list of names.

    Braces are expanded as in most shells: `atari/{Pong,Breakout}` stands for two names. Names of users' files become
    PluginRefs.
    """
    names = tuple(env) if isinstance(env, list | tuple) else (env,)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"env = {env!r}: expected the name of an environment, for example atari/Pong")
    return tuple(parse_name(expanded) for name in names for expanded in _expand_braces(name))


def _expand_braces(name: str) -> list[str]:
    if isinstance(name, PluginRef):  # the braces in a PluginRef have already been expanded
        return [name]
    braces = re.fullmatch(r"([^{}]*)\{([^{}]*)\}([^{}]*)", name)
    return [f"{braces[1]}{word}{braces[3]}" for word in braces[2].split(",")] if braces else [name]
