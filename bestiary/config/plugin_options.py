"""Plug-in names in the options of a run.

`map_plugins` is the only place that knows which options can name a user's file: environments, components, rewards,
callbacks and loggers. The options of each source (command line, Python, config file, study file, run folder) pass
through this function once. `map_plugins` first expands braces and removes white space. Otherwise a file name that
contains braces or white space would not be recognised.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.option_merging import expand_env_names
from bestiary.utils import trust
from bestiary.utils.plugin_names import PluginRef, parse_name, split_rewards


def map_plugins(options: Mapping[str, Any], function: Callable[[PluginRef], str]) -> dict[str, Any]:
    """Return a copy of a flat dict of options in which each plug-in `ref` is replaced by `function(ref)`."""

    def replace(value: Any) -> Any:
        name = parse_name(value) if isinstance(value, str) else value
        return function(name) if isinstance(name, PluginRef) else name

    mapped = dict(options)
    for key, value in options.items():
        if key == "env" and value is not None:
            names = expand_env_names(value)
            mapped[key] = replace(names[0]) if isinstance(value, str) and len(names) == 1 else [*map(replace, names)]
        elif key in DEFAULT_COMPONENTS or key == "reward":
            mapped[key] = replace(value)
        elif key == "true_reward" and isinstance(value, str):
            rewards = [replace(reward) for reward in split_rewards(value)]
            mapped[key] = rewards[0] if len(rewards) == 1 else "; ".join(rewards)
        elif key in ("callback", "logger") and isinstance(value, str | list | tuple) and value != "none":
            mapped[key] = [replace(part) for part in _split_names(value)]
    return mapped


def _split_names(value: Any) -> list[Any]:
    """Return the names in the value of --callback or --logger: one name, names separated by commas, or a list."""
    if isinstance(value, PluginRef):
        return [value]
    return value.split(",") if isinstance(value, str) else list(value)


def trust_named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Mark all plug-ins in the options as trusted, so that their code may be executed. Return the options.

    Call this function only with options that the user gave on the command line or in Python.
    """

    def trust_ref(ref: PluginRef) -> str:
        trust.trust_named(ref)
        return ref

    return map_plugins(options, trust_ref)


def trust_in_file(options: Mapping[str, Any], where: str, trust_code: bool) -> dict[str, Any]:
    """Check that all plug-ins in the options of a config or study file are trusted. Return the options.

    If `trust_code` is true, all plug-ins are trusted. Otherwise, raise UserError for a plug-in whose content the user
    has not used before. `where` describes the file in this error.
    """

    def trust_ref(ref: PluginRef) -> str:
        trust.trust_in_file(ref, where, trust_code)
        return ref

    return map_plugins(options, trust_ref)
