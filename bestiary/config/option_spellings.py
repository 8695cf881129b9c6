"""Spellings of options: the names that a user may write for an option.

For example, the field `lr` of the algorithm's options has two spellings: `algo.lr` and `lr`. Each option belongs to a
kind of component (`env`, `agent`, `algo`, ...). The training options belong to no component; their kind is "".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.components import REGISTRIES
from bestiary.config.foreign_flags import foreign_flag_hint
from bestiary.envs.registry import options_by_family
from bestiary.loggers import LOGGERS
from bestiary.utils.options import field_types, options_class, positional_hint, suggest

# Options that choose the run folder. They are not part of a Config, so they are accepted only on the command line.
LOCATION_OPTIONS = ("name", "run_dir", "if_exists")


def option_spellings(schemas: Mapping[str, type]) -> dict[str, tuple[str, str]]:
    """Map each spelling of an option to its kind and field: both `algo.lr` and `lr` are mapped to ("algo", "lr").

    `schemas` maps each kind of component to its options dataclass.
    """
    spellings: dict[str, tuple[str, str]] = {}
    # Training options come last: if a component has an option of the same name, the short name means the training
    # option.
    for kind in sorted(schemas, key=lambda kind: kind == ""):
        for f in dataclasses.fields(schemas[kind]):
            if kind:
                spellings[f"{kind}.{f.name}"] = (kind, f.name)
            if kind in ("", "env") or f.metadata.get("unprefixed"):
                spellings[f.name] = (kind, f.name)
    return spellings


def values_by_schema(given: Mapping[str, Any], schemas: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Return the given values as {kind: {field name: value}}, without conversion. Unknown keys are left out."""
    spellings = option_spellings(schemas)
    values: dict[str, dict[str, Any]] = {kind: {} for kind in schemas}
    for key, value in given.items():
        if key in spellings:
            kind, name = spellings[key]
            values[kind][name] = value
    return values


def unknown_options(
    given: Mapping[str, Any], schemas: Mapping[str, type], missing: set[str], origin: Mapping[str, str]
) -> list[str]:
    """Return an error message for each given option that does not exist with the chosen components.

    Options of the kinds in `missing` are not checked, because the components of these kinds were not found. `origin`
    maps an option to the file, preset or run that sets it.
    """
    spellings = option_spellings(schemas)
    problems = []
    command_line = ("preset", "config", "dry_run", *LOCATION_OPTIONS)
    valid = [name for name in (*spellings, *DEFAULT_COMPONENTS, *command_line) if not name.startswith("env.")]
    for key in given:
        kind = key.split(".")[0] if "." in key else ""
        if key in spellings or kind in missing or (not kind and missing & {"env", "algo"}):
            continue
        flag = f"--{key.replace('_', '-')}"
        where = f" (in {origin[key]})" if key in origin else ""
        own = positional_hint(schemas.get(kind or "env"), key.rpartition(".")[2])
        flags = [f"--{name.replace('_', '-')}" for name in valid]
        advice = own or _components_with_option(key) or foreign_flag_hint(flag, flags) or suggest(flag, flags)
        if key in LOCATION_OPTIONS:
            advice = ": the location of a run is set on the command line, not in a file"
        problems.append(f"unknown option {flag}{where}{advice}")
    return problems


def _components_with_option(key: str) -> str:
    """Return a hint that names the environments or components that have this option; empty if there is none."""
    kind, dot, name = key.partition(".")
    if dot and kind != "env":
        registry: Mapping[str, type] = LOGGERS if kind == "logger" else REGISTRIES.get(kind, {})
        owners = [n for n, component in registry.items() if name in field_types(options_class(component))]
        return f": it is an option of {kind} {' and '.join(owners)}" if owners else ""
    name = name or key
    families = [family for family, options in options_by_family().items() if name in field_types(options)]
    if families:
        return f": it is an option of {' and '.join(families)} environments"
    algorithms = [
        algorithm
        for algorithm, component in REGISTRIES["algo"].items()
        if any(f.name == name and f.metadata.get("unprefixed") for f in dataclasses.fields(options_class(component)))
    ]
    return f": it is an option of algo {' and '.join(algorithms)}" if algorithms else ""
