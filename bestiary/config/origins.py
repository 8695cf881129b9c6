"""The origin of each value of a Config, for example "preset hello". `bestiary train --dry-run` prints the origins.

The origin of a value is one of the following:

    - the source of the value, for example "preset hello", or GIVEN if the user gave the value directly
    - "default"
    - "derived" if `resolve` computed the value
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

GIVEN = "given"
COMMENT_COLUMN = 40  # `annotated_toml` starts comments after this column, or after the text if it is longer


def trace_names(
    names: Mapping[str, str], default_names: Mapping[str, str], given: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, str]:
    """Return {kind: origin} for the names of the environments and of each component.

    The arguments are the final names, the default names, the given options, and the sources of the options that the
    user did not give directly.
    """
    origins = {"env": sources.get("env", GIVEN)}
    for kind, name in names.items():
        if given.get(kind, "auto") != "auto":
            origins[kind] = sources.get(kind, GIVEN)
        else:
            origins[kind] = "default" if name == default_names[kind] else "derived"
    return origins


def trace_options(
    final: Mapping[str, Any], parsed: Mapping[str, Any], sources: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the origin of each option as {key of `flatten(config.tables())`: origin}.

    `final` and `parsed` have the options objects by kind, after and before the derivation of options. `sources` has the
    source of each given option, {kind: {field: source}}.
    """
    origins = {}
    for kind, options in final.items():
        for field in dataclasses.fields(options):
            is_kept = getattr(options, field.name) == getattr(parsed[kind], field.name)
            key = f"{kind}.{field.name}" if kind else field.name
            origins[key] = sources[kind].get(field.name, "default") if is_kept else "derived"
    return origins


def annotated_toml(text: str, origins: Mapping[str, str]) -> str:
    """Return the text of config.toml with the origin of each value as a comment."""
    lines = []
    table = ""
    for line in text.removesuffix("\n").split("\n"):  # `splitlines` would also split at characters inside a value
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
