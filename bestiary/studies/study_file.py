"""Read a study file: its tables, the line number of each key (for error messages), and its variants as drafts.

A draft is a variant whose options are not checked yet.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.config.option_merging import override_options
from bestiary.config.toml import flatten, parse_toml
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef, parse_name

FOLDER_NAME = re.compile(r"[\w+=-][\w.,+=-]*")
FOLDER_NAME_RULE = "it is used as a folder name, so only letters, digits and - _ = + , . are allowed"


@dataclass(frozen=True)
class StudyFile:
    """A parsed study file."""

    path: Path
    text: str
    tables: dict[str, Any]

    @functools.cached_property
    def lines(self) -> dict[tuple[str, str], int]:
        return key_lines(self.text)

    def location(self, table: str, key: str = "") -> str:
        """Return the text "FILE, line N" for a key of a table. If the line is unknown, return only the file.

        An empty `key` stands for the header of the table. An empty `table` stands for the keys outside all tables.
        """
        line = self.lines.get((table, key))
        return f"{self.path}, line {line}" if line else str(self.path)


def read_study_file(path: Path) -> StudyFile:
    """Read and parse a study file. Raise UserError if it cannot be read or is not a valid TOML file."""
    try:
        text = path.read_text()
        return StudyFile(path, text, parse_toml(text))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, RecursionError) as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


# --- lines of keys ---


def key_lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line numbers of all keys and table headers: (table, key) -> line number.

    The key "" stands for the header of the table, and the table "variant 1" is the second [[variant]]. Keys have
    underscores instead of hyphens, for example `frame_stack`.

    The TOML parser of the standard library reports no line numbers. Therefore the first line of the text is parsed,
    then the first two lines, and so on. Each time the lines so far are valid TOML, some keys are new since the previous
    valid part. The line number of the new keys is that of the first line after the previous valid part. This method is
    slow, so it is used only for error messages.
    """
    lines: dict[tuple[str, str], int] = {}
    rows, first = text.split("\n"), 1
    for last in range(1, len(rows) + 1):
        try:
            tables = tomllib.loads("\n".join(rows[:last]))
        except tomllib.TOMLDecodeError:
            continue  # the value continues on the next line
        for key in _table_keys(tables):
            lines.setdefault(key, first)
        first = last + 1
    return lines


def _table_keys(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (table, key) for each key of a parsed file, and (table, "") for each table header. See `key_lines`."""
    for name, value in tables.items():
        yield "", name
        inner = {f"{name} {n}": item for n, item in enumerate(value)} if isinstance(value, list) else {name: value}
        for table, entries in inner.items():
            if isinstance(entries, Mapping):
                yield table, ""
                yield from ((table, key) for key in flatten(entries))


# --- drafts of variants ---


@dataclass(frozen=True)
class VariantDraft:
    """Names and options of a variant before its configuration is checked. See `Variant` for the first four fields."""

    name: str
    name_without_env: str
    own_name: str
    grid_point: str
    # Name of a table in the study file -> options that this table sets. Later tables override earlier tables.
    tables: dict[str, dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        return functools.reduce(override_options, self.tables.values(), {})


def draft_variants(file: StudyFile, problems: list[str]) -> list[VariantDraft]:
    """Return a draft of each [[variant]] with each combination of grid values.

    Problems are appended to `problems`. If `problems` is not empty, no drafts are returned.
    """
    base = _read_table(file, "base", problems)
    named = _named_variants(file, problems)
    points = _grid_points(file, problems)
    drafts = []
    for (own_name, table, own_options), point in itertools.product(named, points):
        labels = {key: _option_label(key, value) for key, value in point.items()}
        grid_point = ",".join(label for key, label in labels.items() if key != "env")
        tables = {"base": base}
        if table:
            tables[table] = own_options
        if point:
            tables["grid"] = point
        drafts.append(
            VariantDraft(
                name=",".join(filter(None, [own_name, *labels.values()])) or "base",
                name_without_env=",".join(filter(None, [own_name, grid_point])) or "all",
                own_name=own_name,
                grid_point=grid_point,
                tables=tables,
            )
        )
    for draft in drafts:
        for table, options in draft.tables.items():
            if "seed" in options:
                problems.append(
                    f"{file.location(table, 'seed')}: seed: use seeds = [...] at the top of the file instead"
                )
    # Names are compared in lower case, because some file systems do not distinguish upper and lower case.
    names = [draft.name.lower() for draft in drafts]
    for duplicate in sorted({name for name in names if names.count(name) > 1}):
        locations = [file.location(table, "name") for name, table, _ in named if name.lower() == duplicate]
        problems.append(
            f"{locations[-1] if locations else file.path}: two variants have the name {duplicate}; rename one of them"
        )
    return drafts if not problems else []


def _read_table(file: StudyFile, name: str, problems: list[str]) -> dict[str, Any]:
    """Return the options of a table as a flat dict, which is empty if there is no such table."""
    table = file.tables.get(name, {})
    if isinstance(table, Mapping):
        return flatten(table)
    problems.append(f"{file.location('', name)}: {name}: expected a table [{name}] with options")
    return {}


def _named_variants(file: StudyFile, problems: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (name, table, options) of each [[variant]]. If there is none, return one entry with empty values."""
    tables = file.tables.get("variant", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        problems.append(
            f"{file.location('', 'variant')}: variant: expected [[variant]] tables, each with a name and options"
        )
        return []
    variants = []
    for number, content in enumerate(tables):
        table, options = f"variant {number}", flatten(content)
        name = options.pop("name", None)
        if name is None:
            problems.append(f'{file.location(table)}: this [[variant]] has no name; add name = "..."')
        elif not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
            problems.append(f"{file.location(table, 'name')}: name = {name!r}: {FOLDER_NAME_RULE}")
        else:
            variants.append((name, table, options))
    return variants or [("", "", {})]


def _grid_points(file: StudyFile, problems: list[str]) -> list[dict[str, Any]]:
    """Return all combinations of values of the grid options. If there is no grid, return one empty combination."""
    grid, problems_before = _read_table(file, "grid", problems), len(problems)
    if "grid" in file.tables and not grid and not problems:
        problems.append(
            f"{file.location('grid')}: the grid is empty; add lists of values, such as memory = ['none', 'lstm']"
        )
    for key, values in grid.items():
        location = file.location("grid", key)
        if not isinstance(values, list) or not values:
            problems.append(f"{location}: grid {key} = {values!r}: expected a list of values, such as [1, 2]")
            continue
        labels = [_option_label(key, value) for value in values]
        for label in sorted({label for label in labels if labels.count(label) > 1}):
            problems.append(f"{location}: grid {label} is listed twice; remove the duplicate")
    if len(problems) > problems_before:
        return [{}]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _option_label(key: str, value: Any) -> str:
    """Return an option and its value in a form for folder names, for example `memory=gru`."""
    if isinstance(value, str) and isinstance(ref := parse_name(value), PluginRef):
        value = ref.attribute
    if isinstance(value, list):
        value = "x".join(map(str, value))
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"{key}={re.sub(r'[^A-Za-z0-9_.+-]+', '-', str(value))}"
