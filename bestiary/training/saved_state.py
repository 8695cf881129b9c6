"""Check of state.json before a run is resumed, because a run folder may be damaged or come from another person."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bestiary.utils.errors import UserError

Check = Callable[[Any], bool]
MISSING = object()  # value of a key that state.json does not have


def check_saved_state(state: Mapping[str, Any]) -> None:
    """Raise UserError if a value of state.json has a type or range that `Session.save` never writes.

    The states of users' callbacks are not checked.
    """
    problems = []
    for name, is_valid in CHECKS.items():
        value: Any = state
        for part in name.split("/"):
            value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
        # A nested value (its name contains a slash) may be missing. For example, a run without validation has no state
        # of the validation callback, and older versions of Bestiary did not save the state of some callbacks.
        is_optional = name.count("/") > 0 and value is MISSING
        if not is_optional and not is_valid(value):
            problems.append(f"{name} is {str(value)[:60]!r}")
    if problems:
        raise UserError("state.json of the checkpoint is damaged:", *problems[:8])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return (type(value) in (int, float) and abs(value) < 1e300) or (type(value) is float and math.isnan(value))


def _is_table(value: Any, is_valid: Check) -> bool:
    return isinstance(value, dict) and all(is_valid(item) for item in value.values())


def _is_list(value: Any, is_valid: Check) -> bool:
    return isinstance(value, list) and all(is_valid(item) for item in value)


def _is_task(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"games", "recent", "waiting"}
        and _is_count(value["games"])
        and _is_list(value["recent"], lambda game: _is_list(game, _is_number) and len(game) >= 2)
        and _is_list(value["waiting"], _is_count)
    )


def _is_monitor(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"recent_returns", "num_alerts", "games_since_check"}
        and _is_list(value["recent_returns"], lambda pair: _is_list(pair, _is_number) and len(pair) == 2)
        and _is_count(value["num_alerts"])
        and _is_count(value["games_since_check"])
    )


# {key of a value in state.json, with slashes between nested keys: function that returns whether the value is valid}
CHECKS: dict[str, Check] = {
    "steps": _is_count,
    "version": _is_count,
    "skipped_updates": _is_count,
    "seconds": lambda value: _is_number(value) and value >= 0,
    "tasks": lambda value: _is_table(value, _is_task),
    "runtime_counters": lambda value: _is_table(value, _is_count),
    "callbacks": lambda value: isinstance(value, dict),
    "config": lambda value: isinstance(value, dict) and "env" in value,
    "callbacks/metrics/rows": lambda value: (
        isinstance(value, dict) and value.keys() == {"metrics", "episodes"} and _is_table(value, _is_count)
    ),
    "callbacks/metrics/log_intervals": _is_count,
    "callbacks/metrics/pending": lambda value: _is_list(value, lambda update: _is_table(update, _is_number)),
    "callbacks/reward_monitor": lambda value: _is_table(value, _is_monitor),
    "callbacks/checkpoints/best_returns": lambda value: _is_table(value, _is_number),
    "callbacks/checkpoints/last_best_check": _is_count,
    "callbacks/validation/rows": _is_count,
    "callbacks/validation/best_score": lambda value: value is None or _is_number(value),
    "callbacks/validation/last_step": _is_count,
    "callbacks/video/last_step": _is_count,
}
