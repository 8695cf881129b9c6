"""Command-line flags for the options of training, of environments and of components, with help texts."""

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from bestiary.utils.errors import UserError
from bestiary.utils.options import field_types, flag_name

BOOLEAN_METAVAR = "on|off"


def add_option_flags(
    group: Any,
    options: type,
    kind: str,
    taken: Collection[str] = (),
    only: Collection[str] | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add a flag for each field of an options dataclass to an argument group.

    `kind` is the prefix of the flags, for example "memory": the field `hidden` gets the flag --memory.hidden. Flags in
    `taken` are not added, because the command uses these names itself. If `only` is given, only the fields in `only`
    get a flag. `defaults` maps dotted names ("memory.hidden") to values; the help shows these values instead of the
    defaults of the fields.
    """
    types = field_types(options)
    for field in dataclasses.fields(options):
        if only is not None and field.name not in only:
            continue
        dest = f"{kind}.{field.name}" if kind else field.name
        spellings = [flag_name(kind, field)]
        if kind:
            spellings.append(f"--{kind}.{field.name}".replace("_", "-"))
        spellings = [spelling for spelling in dict.fromkeys(spellings) if spelling not in taken]
        is_boolean = types[field.name] is bool
        nargs: dict[str, Any] = {"nargs": "?", "const": True} if is_boolean else {}
        if "tuple[str" in str(types[field.name]):
            nargs = {"action": "append"}  # each use of the flag adds a name to the list
        default = defaults.get(dest, None if field.default is dataclasses.MISSING else field.default)
        try:
            group.add_argument(
                *spellings,
                dest=dest,
                metavar=_metavar(types[field.name], field.metadata),
                help=_help_with_default(field.metadata, default),
                **nargs,
            )
        except argparse.ArgumentError as error:
            raise UserError(
                f"the option {field.name} of the component ({kind}) cannot have the flag {spellings[0]}, because "
                f"{spellings[0]} is another option of this command; rename it, for example to {kind}_{field.name}"
            ) from error
        if is_boolean:
            negated = [spelling.replace("--", "--no-", 1) for spelling in spellings]
            group.add_argument(*negated, dest=dest, action="store_const", const=False, help=argparse.SUPPRESS)


def _metavar(kind: Any, metadata: Mapping[str, Any]) -> str:
    """Return the placeholder that stands for the value of an option in the help, for example N."""
    if kind is bool:
        return BOOLEAN_METAVAR
    if metadata.get("metavar"):
        return str(metadata["metavar"])
    name = str(getattr(kind, "__name__", kind))
    if metadata.get("choices"):
        return "NAME"
    if "tuple" in name:
        return "N,N,..."
    if "int" in name:
        return "N"
    if "float" in name:
        return "X"
    return "TEXT" if "str" in name else "VALUE"


def _help_with_default(metadata: Mapping[str, Any], default: Any) -> str:
    """Return the help text of an option, followed by its allowed values, its runtimes and its default value."""
    text = str(metadata.get("help", ""))
    if choices := metadata.get("choices"):
        text += f" [{', '.join(choices)}]"
    runtimes = metadata.get("runtimes")
    if runtimes and runtimes != ("cluster",):  # cluster options: the title of their group in the help says this
        text += f"; only with --runtime {' or '.join(runtimes)}"
    if "(default:" not in text:
        text += f" (default: {_format_value(default)})"
    return text.strip().replace("%", "%%")


def _format_value(value: Any) -> str:
    """Return a default value as the help shows it, for example "on" for True and "84x84" for (84, 84)."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
