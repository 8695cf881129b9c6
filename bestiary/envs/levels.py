"""Ranges of levels. Some environment families have games with generated levels, which are identified by numbers."""

from dataclasses import dataclass, replace
from typing import Any

from bestiary.utils.errors import UserError
from bestiary.utils.options import option

NUM_LEVELS = 2**31 - 1  # number of levels of each game


@dataclass(frozen=True)
class LevelOptions:
    """Base class of the options of environment families with levels."""

    levels: str = option("all", "range of levels, for example 0:200 (levels 0 to 199), or all", metavar="RANGE")

    def __post_init__(self) -> None:
        parse_levels(self.levels)


def levels_of(options: Any) -> str | None:
    """Return the range of levels in the options of an environment, or None if the environment has no levels."""
    return options.levels if isinstance(options, LevelOptions) else None


def parse_levels(text: str) -> tuple[int, int]:
    """Parse a range of levels: `0:200` -> (0, 200), `all` -> (0, NUM_LEVELS). The end is not part of the range.

    Raise ValueError if the range is invalid.
    """
    if text == "all":
        return 0, NUM_LEVELS
    start, colon, stop = (word.strip() for word in text.partition(":"))
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise ValueError(f"--levels {text}: expected a range such as 0:200 (levels 0 to 199), or all")
    first, last = int(start), int(stop)
    if last > NUM_LEVELS:
        raise ValueError(f"--levels {text}: levels are numbered 0 to {NUM_LEVELS - 1}")
    if first == last:
        raise ValueError(f"--levels {text}: the range is empty; try 0:{max(1, last)}")
    if first > last:
        raise ValueError(f"--levels {text}: the start is above the end; did you mean {last}:{first}?")
    return first, last


def with_levels(env: str, options: Any, levels: str, flag: str = "--levels") -> Any:
    """Return the options of an environment with another range of levels.

    Raise UserError if the environment has no levels or the range is invalid; the message names the option `flag`.
    """
    if not isinstance(options, LevelOptions):
        raise UserError(f"{flag} {levels}: {env} has no levels; remove {flag}")
    try:
        return replace(options, levels=levels)
    except ValueError as error:
        raise UserError(str(error).replace("--levels", flag)) from error


def levels_overlap(first_range: str, second_range: str) -> bool:
    """Return True if two ranges of levels have a level in common."""
    first, second = parse_levels(first_range), parse_levels(second_range)
    return max(first[0], second[0]) < min(first[1], second[1])
