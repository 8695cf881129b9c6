"""Options: how a part declares what can be set, and how text becomes a checked value.

A part (an environment, a torso, a memory, an algorithm ...) declares its options as a frozen dataclass named `Options`
inside its class, each field made by `option(default, help)`. A user's own part may instead use the keyword-only
arguments of its constructor. Both become the same thing here: a dataclass whose fields know their help and limits.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    everyday: bool = False,
    bare: Any = None,
) -> Any:
    """A dataclass field with a help text and limits: low <= value <= high, above < value.

    `everyday` options are flags without their part's name in front (`--lr` for `--algo.lr`).
    `bare` is the value of the flag given without one (`--wandb`).
    """
    limits = {"low": low, "high": high, "above": above, "choices": choices}
    return dataclasses.field(default=default, metadata={"help": help, "everyday": everyday, "bare": bare, **limits})


@functools.cache
def options_of(part: Any) -> type:
    """The options dataclass of a part: its `Options`, or one made from its constructor's keyword-only arguments."""
    if hasattr(part, "Options"):
        return part.Options
    fields = []
    for name, parameter in inspect.signature(part).parameters.items():
        # render_mode is how Gymnasium asks for pictures; it is the movie's to set
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.default is not parameter.empty
            and name != "render_mode"
        ):
            default = tuple(parameter.default) if isinstance(parameter.default, list) else parameter.default
            kind = _kind_of(default) if parameter.annotation is parameter.empty else parameter.annotation
            fields.append((name, kind, option(default, "")))
    return dataclasses.make_dataclass(f"{part.__name__}Options", fields, frozen=True)


def _kind_of(default: Any) -> Any:
    """What an option without an annotation is, seen from its default."""
    if isinstance(default, tuple) and default:
        return types.GenericAlias(tuple, (type(default[0]), ...))
    return type(default)


def construct(part: Any, *args: Any, options: Any, **extra: Any) -> Any:
    """Call a part's constructor with its options, in whichever of the two ways it declared them."""
    if hasattr(part, "Options"):
        return part(*args, options, **extra)
    return part(*args, **dataclasses.asdict(options), **extra)


def same_options(one: type, other: type) -> bool:
    """Whether what is set for one part means the same for another."""

    def described(options: type) -> list[tuple[str, Any, Any]]:
        return [(f.name, f.type, f.default) for f in dataclasses.fields(options)]

    return one is other or described(one) == described(other)


def field_types(options: type) -> dict[str, Any]:
    return typing.get_type_hints(options)


def convert(value: Any, kind: Any) -> Any:
    """Turn text (a flag) or a plain value (TOML, Python) into `kind`, or raise ValueError with what was expected."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        if value is None or (len(inner) < len(typing.get_args(kind)) and value == "none"):
            return None
        return convert(value, inner[0])
    if typing.get_origin(kind) is tuple:
        return _convert_tuple(value, typing.get_args(kind))
    if kind is bool:
        known = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
        if isinstance(value, bool):
            return value
        if str(value).lower() not in known:
            raise ValueError("expected on or off")
        return known[str(value).lower()]
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdecimal():
            return int(value.replace("_", ""))  # not by way of a float, which has 53 bits
        number = float(_convert_number(value))
        if not number.is_integer():
            raise ValueError("expected a whole number")
        return int(number)
    if kind is float:
        return float(_convert_number(value))
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"expected {getattr(kind, '__name__', kind)}")


def _convert_number(value: Any) -> float:
    text = str(value).replace("_", "").strip()
    scale = SUFFIXES.get(text[-1:], 1)
    try:
        number = math.nan if isinstance(value, bool) else float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("expected a number, such as 0.5, 20000, 200k or 5M")
    return round(number) if scale != 1 and abs(number - round(number)) < 1e-6 else number


def _convert_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    items = value.replace("x", ",").split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        items = [items]
    if kinds[-1:] == (Ellipsis,):
        return tuple(convert(item, kinds[0]) for item in items)
    if len(items) != len(kinds):
        raise ValueError(f"expected {len(kinds)} values, such as {'x'.join(['84'] * len(kinds))}")
    return tuple(convert(item, kind) for item, kind in zip(items, kinds, strict=True))


def check_limits(value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError where a converted value is outside the limits that its option declared."""
    if value is None:
        return
    if metadata.get("choices") and value not in metadata["choices"]:
        raise ValueError(f"expected one of {', '.join(metadata['choices'])}{suggest(str(value), metadata['choices'])}")
    for item in value if isinstance(value, tuple) else (value,):
        if metadata.get("low") is not None and item < metadata["low"]:
            raise ValueError(f"must be at least {metadata['low']:g}")
        if metadata.get("high") is not None and item > metadata["high"]:
            raise ValueError(f"must be at most {metadata['high']:g}")
        if metadata.get("above") is not None and item <= metadata["above"]:
            raise ValueError(f"must be above {metadata['above']:g}")


def parse_options(options: type, given: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """Build an options object from raw values, appending every problem found to `problems` (then returns None)."""
    kinds, values, before = field_types(options), {}, len(problems)
    for field in dataclasses.fields(options):
        if field.name not in given:
            continue
        raw = given[field.name]
        try:
            value = convert(raw, kinds[field.name])
            check_limits(value, field.metadata)
            values[field.name] = value
        except (ValueError, TypeError) as error:
            shown = raw if isinstance(raw, str | int | float) else repr(raw)
            problems.append(f"{flag(prefix, field)} {shown}: {error}")
    if len(problems) > before:
        return None
    try:
        return options(**values)
    except ValueError as error:  # what an Options.__post_init__ finds wrong between fields
        problems.append(str(error))
        return None


def flag(prefix: str, field: "dataclasses.Field[Any]") -> str:
    """How an option is written: `--memory.hidden`; without its part where it is an everyday or environment option."""
    name = field.name.replace("_", "-")
    return f"--{name}" if prefix in ("", "env") or field.metadata.get("everyday") else f"--{prefix}.{name}"


def suggest(wrong: str, right: Iterable[str], *, count: int = 3) -> str:
    """`; did you mean X or Y?` for the nearest right names, or nothing where none is near."""
    near = difflib.get_close_matches(wrong, list(right), n=count, cutoff=0.5)
    lowered = {name.lower(): name for name in right}
    near += [lowered[hit] for hit in difflib.get_close_matches(wrong.lower(), lowered, n=count, cutoff=0.5)]
    names = list(dict.fromkeys(near))[:count]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def span(text: str) -> tuple[float, float]:
    """`2M:4M`, a part of an axis -> (2e6, 4e6)."""
    low, colon, high = str(text).partition(":")
    try:
        first, last = float(convert(low, float)), float(convert(high, float))
    except ValueError:
        first, last = 0.0, 0.0
    if not colon or not 0 <= first < last:
        raise ValueError("expected a part of the x axis, from less to more, such as 2M:4M")
    return first, last
