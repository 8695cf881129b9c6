"""On which line of a TOML file each key is set, so that an error can say so."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from bestiary.textconfig import flatten

Lines = dict[tuple[str, str], int]


def key_lines(text: str) -> Lines:
    """(table, key) -> line, keys as `flatten` writes them; key "" is the table itself, "variant 1" the second [[variant]].

    The standard library's parser knows no lines. So it is shown the file again and again, a line longer each time, and
    what is new then stands there. That is slow, and done only where something is wrong."""
    lines: Lines = {}
    rows, first = text.split("\n"), 1
    for last in range(1, len(rows) + 1):
        try:
            tables = tomllib.loads("\n".join(rows[:last]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a value
        for place in _places(tables):
            lines.setdefault(place, first)
        first = last + 1
    return lines


def _places(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in tables.items():
        yield "", name
        inner = {f"{name} {n}": item for n, item in enumerate(value)} if isinstance(value, list) else {name: value}
        for table, entries in inner.items():
            if isinstance(entries, Mapping):
                yield table, ""
                yield from ((table, key) for key in flatten(entries))
