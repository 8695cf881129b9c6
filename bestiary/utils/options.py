"""Declaration of the options of components, and conversion of user input to valid option values.

A component (environment, torso, memory, algorithm, ...) declares its options in a frozen dataclass `Options` inside its
class. Each field is created by `option(default, help)`. A plug-in can do without the class `Options`: the keyword-only
arguments of its constructor that have a default are then its options. In both cases, `options_class` returns a
dataclass of the options.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from bestiary.utils.errors import UserError

MIN_SIMILARITY = 0.6  # minimum similarity of a suggested name to the wrong name (0 to 1; see `_similarity`)
# Rule for the options of plug-ins, for error messages.
OPTIONS_RULE = "options are keyword-only arguments with a default: write *, {name}=... at the end of the arguments"

BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    unprefixed: bool = False,
    metavar: str = "",
    group: str = "",
    runtimes: tuple[str, ...] = (),
    compared: bool = True,
    machine: bool = False,
) -> Any:
    """Return a dataclass field for an option, with a help text and limits of its value.

    Args:
        default: default value.
        help: help text of the command line.
        low: smallest allowed value.
        high: largest allowed value.
        above: exclusive lower limit: the value must be larger than this number.
        choices: allowed values; empty: no restriction.
        unprefixed: whether the flag has no component prefix (`--lr` instead of `--algo.lr`).
        metavar: placeholder for the value in the help text, for example N.
        group: title of the group in the help text (training options only).
        runtimes: runtimes in which the option has an effect; empty: all (training options only).
        compared: whether two runs that differ only in this option count as different experiments (training options
            only).
        machine: whether the option depends on the machine, for example --device. Its value is not taken from the run
            folder of another person (training options only).
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def options_class(component: Any) -> type:
    """Return the options class of a component: `component.Options`, if it exists.

    Otherwise return a dataclass with one field per keyword-only argument of the constructor that has a default. Other
    arguments with defaults are not options. The attribute `positional_arguments` of the dataclass contains their names
    for error messages.

    Raises:
        UserError: `component.Options` is not a dataclass, so its fields would be ignored; a field has no default; or a
            keyword-only argument has a default that cannot be changed into an option, for example a dict.
    """
    if hasattr(component, "Options"):
        # A subclass of a dataclass is itself a dataclass only if it also has the decorator @dataclass.
        if "__dataclass_fields__" not in vars(component.Options):
            raise UserError(
                f"{component.__name__}.Options: not a dataclass; write @dataclass(frozen=True) above class Options"
            )
        for field in dataclasses.fields(component.Options):
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise UserError(
                    f"{component.__name__}.Options: the field {field.name} has no default; write "
                    f'{field.name}: ... = option(DEFAULT, "help text")'
                )
        return component.Options
    fields = []
    positional = []
    for name, parameter in inspect.signature(component).parameters.items():
        # The user cannot set render_mode. Bestiary sets it when it creates a Gymnasium environment for rendering.
        if parameter.default is parameter.empty or name == "render_mode":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = tuple(parameter.default) if isinstance(parameter.default, list) else parameter.default
            if type(default).__hash__ is None:  # a dataclass does not accept this default
                raise UserError(
                    f"{component.__name__}: the default of argument {name} of the constructor is a "
                    f"{type(default).__name__}; keyword-only arguments with a default are options, and the types of "
                    "options are int, float, bool, str and tuples of these"
                )
            fields.append((name, _option_type(component, parameter, default), option(default, "")))
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            positional.append(name)
    namespace = {"positional_arguments": tuple(positional)}
    return dataclasses.make_dataclass(f"{component.__name__}Options", fields, namespace=namespace, frozen=True)


def _option_type(component: Any, parameter: inspect.Parameter, default: Any) -> Any:
    """Return the type of an option: its annotation or, without annotation, the type of its default value."""
    if parameter.annotation is parameter.empty:
        is_filled_tuple = isinstance(default, tuple) and default
        return types.GenericAlias(tuple, (type(default[0]), ...)) if is_filled_tuple else type(default)
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    # A file with `from __future__ import annotations` has annotations as text.
    is_class = isinstance(component, type)
    function = inspect.unwrap(component.__init__ if is_class else component)
    try:
        return eval(parameter.annotation, getattr(function, "__globals__", {}))
    except Exception as error:
        raise UserError(
            f"{component.__name__}: the type {parameter.annotation} of argument {parameter.name} of the constructor is "
            f"not valid: {error}"
        ) from error


def positional_hint(options: type | None, name: str) -> str:
    """Return a hint for the error message about an unknown option `name`.

    If the component's constructor has an argument `name` that is not keyword-only, the hint says that options must be
    keyword-only. Otherwise the hint is empty.
    """
    if name not in getattr(options, "positional_arguments", ()):
        return ""
    return f": {name} is an argument of the constructor, but not keyword-only; {OPTIONS_RULE.format(name=name)}"


def construct(component: Any, *args: Any, options: Any, **extra: Any) -> Any:
    """Call the constructor of a component and return the new object.

    If the component has a class `Options`, pass the options as one object. If the constructor has an argument
    `options`, the object is this argument. Otherwise it is the positional argument after `args`. If the component has
    no class `Options`, pass each option as a keyword argument.

    Raises:
        TypeError: the constructor does not accept these arguments. The message explains how options are declared.
    """
    signature = inspect.signature(component)
    names = list(signature.parameters)[len(args) :]
    if not hasattr(component, "Options"):
        extra = {**dataclasses.asdict(options), **extra}
    elif "options" in names:
        extra = {**extra, "options": options}
    else:
        args = (*args, options)
        names = names[1:]
    try:
        signature.bind(*args, **extra)
    except TypeError as error:
        required = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty]
        missing = [name for name in required if name not in extra]
        hint = f"it is called with {len(args)} positional arguments"
        if "render_mode" in missing:
            hint = "Bestiary passes render_mode only for videos: write render_mode=None"
        elif hasattr(component, "Options"):
            hint = (
                f"{component.__name__} has a class Options, so its constructor must have an argument options, which "
                "gets an object of this class"
            )
        elif missing and "missing" in str(error):
            hint = OPTIONS_RULE.format(name=missing[0])
        raise TypeError(f"{error}; {hint} (see docs/extending.md#options)") from error
    return component(*args, **extra)


def same_options(first: type, second: type) -> bool:
    """Return whether two options classes have the same fields, types and defaults."""
    described = [[(f.name, f.type, f.default) for f in dataclasses.fields(options)] for options in (first, second)]
    return first is second or described[0] == described[1]


def field_types(options: type) -> dict[str, Any]:
    """Return the type of each field of an options class."""
    return typing.get_type_hints(options)


def convert(value: Any, kind: Any) -> Any:
    """Convert the text of a flag, or a value from TOML or Python, to the type `kind`.

    Raises:
        ValueError: the value cannot be converted. The message describes the expected value.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None or (value == "none" and type(None) in inner):
            return None
        return convert(value, next(k for k in inner if k is not type(None)))
    if origin is tuple:
        return _convert_tuple(value, inner)
    if kind is bool:
        if str(value).lower() not in BOOLEANS:
            raise ValueError("expected on or off")
        return BOOLEANS[str(value).lower()]
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdecimal():
            return int(value.replace("_", ""))  # not via float, because float cannot represent all large integers
        number = float(_convert_number(value))
        if not number.is_integer():
            raise ValueError("expected an integer")
        return int(number)
    if kind is float:
        return float(_convert_number(value))
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"expected {'text' if kind is str else getattr(kind, '__name__', kind)}")


def _convert_number(value: Any) -> float:
    """Convert a number, or a text such as 0.5, 200k or 5M, to a number. Raise ValueError if this is not possible."""
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
    """Convert a list, or a text such as 0,150M or 84x84, to a tuple whose items have the types `kinds`."""
    items = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        items = [item.strip() for item in re.split("," if kinds[0] is str else "[,x]", value)]
    if kinds[-1:] == (Ellipsis,):
        return tuple(convert(item, kinds[0]) for item in items)
    if len(items) != len(kinds):
        raise ValueError(f"expected {len(kinds)} values, such as {'x'.join(['84'] * len(kinds))}")
    return tuple(convert(item, kind) for item, kind in zip(items, kinds, strict=True))


def check_limits(value: Any, metadata: Mapping[str, Any]) -> None:
    """Raise ValueError if a value is not within the limits of its option.

    `metadata` is the metadata of the option's dataclass field, see `option`.
    """
    if value is None:
        return
    if metadata.get("choices") and value not in metadata["choices"]:
        raise ValueError(f"expected one of {', '.join(metadata['choices'])}{suggest(str(value), metadata['choices'])}")
    limits = (("low", "at least", operator.ge), ("high", "at most", operator.le), ("above", "above", operator.gt))
    for name, words, is_within in limits:
        limit = metadata.get(name)
        if limit is not None and not all(is_within(x, limit) for x in (value if isinstance(value, tuple) else [value])):
            raise ValueError(f"must be {words} {limit:g}")


def parse_options(options: type, given: Mapping[str, Any], prefix: str, problems: list[str]) -> Any:
    """Build an options object from raw values. If values are invalid, append messages to `problems` and return None.

    Args:
        options: the options class.
        given: raw values by field name. Values of unknown fields are ignored.
        prefix: kind of the component, for example "memory". It is the prefix of flags in messages: --memory.hidden.
        problems: list to which error messages are appended.
    """
    kinds = field_types(options)
    values = {}
    num_problems = len(problems)
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
            problems.append(f"{flag_name(prefix, field)} {shown}: {error}")
    if len(problems) > num_problems:
        return None
    try:
        return options(**values)
    except ValueError as error:  # raised by __post_init__ of the options class, which checks combinations of fields
        problems.append(str(error))
        return None


def parse_keywords(options: type, given: Mapping[str, Any], name: str) -> Any:
    """Build an options object from keyword arguments of a function. `name` is the name of the component in messages.

    Raises:
        UserError: options are unknown or invalid. The error lists all of them.
    """
    known = [field.name for field in dataclasses.fields(options)]
    problems = [
        f"{name}: unknown option {key}{positional_hint(options, key) or suggest(key, known)}"
        for key in given
        if key not in known
    ]
    parsed = parse_options(options, given, "", problems)
    if problems:
        raise UserError(*problems)
    return parsed


def flag_name(prefix: str, field: "dataclasses.Field[Any]") -> str:
    """Return the flag of an option: `--memory.hidden`, or `--lr` for unprefixed options and environment options."""
    name = field.name.replace("_", "-")
    return f"--{name}" if prefix in ("", "env") or field.metadata.get("unprefixed") else f"--{prefix}.{name}"


def suggest(wrong: str, valid: Iterable[str], *, count: int = 3) -> str:
    """Return "; did you mean X or Y?" with the valid names that are most similar to `wrong`; "" if none is similar."""
    scores = {name: _similarity(wrong, name) for name in valid}
    lowest = max(MIN_SIMILARITY, max(scores.values(), default=0.0) - 0.1)
    names = sorted((name for name in scores if scores[name] >= lowest), key=lambda name: -scores[name])[:count]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _similarity(wrong: str, name: str) -> float:
    """Return the similarity of two names, from 0 to 1. Equal names have the similarity 1.

    Case and leading hyphens are ignored. If `wrong` has no prefix such as `algo.`, the prefix of `name` is also
    ignored.
    """
    first, second = (text.lower().lstrip("-").replace("_", "-") for text in (wrong, name))
    ratio = difflib.SequenceMatcher(None, first, second).ratio()
    if "." in second and "." not in first:
        ratio = max(ratio, 0.99 * difflib.SequenceMatcher(None, first, second.rpartition(".")[2]).ratio())
    return ratio


def parse_range(text: str) -> tuple[float, float]:
    """Convert the text of a range of the x axis to two numbers: `2M:4M` -> (2e6, 4e6).

    Raises:
        ValueError: the text is not a range, or the range is empty or negative.
    """
    try:
        first, last = (float(convert(end, float)) for end in str(text).split(":"))
    except ValueError:
        first, last = 0.0, 0.0
    if not 0 <= first < last:
        raise ValueError("expected a range LOW:HIGH of the x axis, such as 2M:4M")
    return first, last
