"""The loggers of a run and their options.

A run can have several loggers. Their options have the prefix `logger`: `--logger.project NAME` sets the project of all
loggers that have this option.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from bestiary.loggers import LOGGERS, Logger
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.options import field_types, options_class, suggest
from bestiary.utils.plugin_names import PluginRef

ALWAYS_ON = "csv"  # the CSV tables of the run folder; accepted in --logger but without effect: they are always written


def find_loggers(names: Any, problems: list[str]) -> dict[str, type[Logger]]:
    """Return the classes of loggers by name. Append messages about wrong names to `problems`.

    `names` is the value of the option `logger`: None, or names that `map_plugins` has split and parsed.
    """
    found: dict[str, type[Logger]] = {}
    for name in () if names in (None, "none") else names:
        if name == ALWAYS_ON:
            continue
        if name in found:
            problems.append(f"--logger {name}: given twice")
            continue
        try:
            found[name] = _find_logger(name)
        except UserError as error:
            problems += error.problems
    problems += _conflicts(found)
    return found


def _find_logger(name: str) -> type[Logger]:
    if not isinstance(name, PluginRef):
        if name not in LOGGERS:
            known = (ALWAYS_ON, *LOGGERS)
            raise UserError(
                f"--logger {name}: unknown; expected {', '.join(known)} or your own file.py:Name{suggest(name, known)}"
            )
        return LOGGERS[name]
    component = plugins.load(name, "logger")
    if not (isinstance(component, type) and issubclass(component, Logger)):
        raise UserError(
            f"--logger {name}: must be a subclass of bestiary.loggers.Logger (see docs/extending.md#logger)"
        )
    if component.log is Logger.log:
        raise UserError(f"--logger {name}: has no method log (see docs/extending.md#logger)")
    for method in vars(component):
        if method.startswith("log_") and not hasattr(Logger, method):
            hint = suggest(method, dir(Logger))
            raise UserError(f"--logger {name}: {method} is not a method of Logger{hint}")
    return component


def _conflicts(loggers: Mapping[str, type[Logger]]) -> list[str]:
    """Return a problem for each option that two loggers declare with different types or defaults."""
    owners: dict[str, tuple[str, Any]] = {}
    problems = []
    for name, logger in loggers.items():
        for field_name, declared in _fields(logger).items():
            owner, other = owners.setdefault(field_name, (name, declared))
            if (declared[0], declared[1].default) != (other[0], other[1].default):
                problems.append(
                    f"--logger {name}: the option {field_name} has another type or default than the option of the same "
                    f"name of logger {owner}; rename one of the two options"
                )
    return problems


def _fields(logger: Any) -> dict[str, tuple[Any, "dataclasses.Field[Any]"]]:
    """Return the type and the dataclass field of each option of a logger, by name."""
    options = options_class(logger)
    types = field_types(options)
    return {field.name: (types[field.name], field) for field in dataclasses.fields(options)}


def merged_options(loggers: Iterable[Any]) -> type:
    """Return a dataclass with the options of all loggers. An option that several loggers declare is one field."""
    return _merge(tuple(loggers))


@functools.cache
def _merge(loggers: tuple[Any, ...]) -> type:
    merged = {name: declared for logger in loggers for name, declared in _fields(logger).items()}
    fields = [
        (name, kind, dataclasses.field(default=field.default, metadata=field.metadata))
        for name, (kind, field) in merged.items()
    ]
    return dataclasses.make_dataclass("LoggerOptions", fields, frozen=True)


def options_of(logger: Any, merged: Any) -> Any:
    """Return the options of one logger. `merged` is an instance of the class that `merged_options` returns."""
    return options_class(logger)(**{name: getattr(merged, name) for name in _fields(logger)})
