"""The origin of each value of a Config, for example "preset hello". `bestiary train --dry-run` prints the origins."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.components import lookup_component
from bestiary.config.config import Config
from bestiary.config.option_merging import convert_or_none
from bestiary.config.option_spellings import option_spellings
from bestiary.config.resolve import declared_defaults
from bestiary.envs import lookup_env
from bestiary.utils.options import field_types

COMMENT_COLUMN = 40  # `annotated_toml` starts comments after this column, or after the text if it is longer


def trace_origins(config: Config, given: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, str]:
    """Return the origin of each value of a config that `resolve(given, sources)` returned.

    The keys are those of `flatten(config.tables())`. An origin is a value of `sources` (for example "preset hello"),
    "given" if the user gave the value directly, "default", or "derived" if `resolve` computed the value.
    """
    agent = lookup_component("agent", config.components["agent"].name)
    default_names = {**DEFAULT_COMPONENTS, **agent.config_defaults}
    origins = {"env": sources.get("env", "given")}
    for kind in config.components:
        if given.get(kind, default_names[kind]) == "auto":
            origins[kind] = "derived"
        else:
            origins[kind] = sources.get(kind, "given") if kind in given else "default"

    options = {"": config.training, "env": config.env_options}
    options |= {kind: component.options for kind, component in config.components.items()}
    spellings = option_spellings({kind: type(values) for kind, values in options.items()})
    agent_name, algo_name = (config.components[kind].name for kind in ("agent", "algo"))
    env_spec = lookup_env(config.envs[0])
    declared = declared_defaults(agent_name, algo_name, env_spec, env_spec.interface(config.env_options))
    defaults = {spellings[key]: value for key, value in declared.items() if key in spellings}
    # If an option is given in two spellings, the last one is used, as in `resolve`.
    given_keys = {spellings[key]: key for key in given if key in spellings}
    for kind, values in options.items():
        types = field_types(type(values))
        for field in dataclasses.fields(values):
            name = f"{kind}.{field.name}" if kind else field.name
            value = getattr(values, field.name)
            given_key = given_keys.get((kind, field.name))
            if given_key is None:
                default = convert_or_none(defaults.get((kind, field.name), field.default), types[field.name])
                origins[name] = "default" if value == default else "derived"
                continue
            converted = convert_or_none(given[given_key], types[field.name])
            # The value of --reward can contain a file path, which `resolve` makes absolute. This change does not make
            # the value "derived".
            is_kept = value == converted or given_key in ("reward", "true_reward")
            origins[name] = sources.get(given_key, "given") if is_kept else "derived"
    return origins


def annotated_toml(config: Config, origins: Mapping[str, str]) -> str:
    """Return the text of config.toml with the origin of each value as a comment."""
    lines = []
    table = ""
    for line in config.to_toml().splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        name = line.partition(" = ")[0]
        key = f"{table}.{name}" if table else name
        origin = origins.get(table if table and name == "name" else key)
        if origin is not None:
            # Line breaks and control characters, for example in the name of a file, are not allowed in TOML comments.
            printable = "".join(char if char.isprintable() else "?" for char in origin)
            line = f"{line:<{COMMENT_COLUMN}}  # {printable}"
        lines.append(line)
    return "\n".join(lines) + "\n"
