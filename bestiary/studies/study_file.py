"""Read a study file: its tables, the line number of each key (for error messages), and its variants as drafts.

A draft is a variant whose options are not checked yet.

The tables [scale.NAME] of a file describe smaller (or larger) versions of the study. `--scale NAME` selects one of
these versions.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bestiary.config.option_merging import override_options
from bestiary.config.toml import flatten, parse_toml
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest
from bestiary.utils.plugin_names import PluginRef, parse_name

FOLDER_NAME = re.compile(r"[\w+=-][\w.,+=-]*")
FOLDER_NAME_RULE = "it is used as a folder name, so only letters, digits and - _ = + , . are allowed"
PUBLISHED_PREFIX = "published/"
PUBLISHED_FOLDER = Path(__file__).parent / "published"
SCALE_KEYS = ("seeds", "zoom", "options", "variant", "grid", "search", "evaluate", "analysis")


@dataclass(frozen=True)
class StudyFile:
    """A parsed study file."""

    path: Path  # as the user typed it
    text: str
    tables: dict[str, Any]
    scale: str = ""  # name of the selected table [scale.NAME]; empty: the study as it is

    @functools.cached_property
    def lines(self) -> dict[tuple[str, str], int]:
        return key_lines(self.text)

    @property
    def selected_scale(self) -> Mapping[str, Any]:
        """The table of the selected scale. It is empty if no scale is selected."""
        return self.tables["scale"][self.scale] if self.scale else {}

    def location(self, table: str, key: str = "") -> str:
        """Return the text "FILE, line N" for a key of a table. If the line is unknown, return only the file.

        An empty `key` stands for the header of the table. An empty `table` stands for the keys outside all tables.
        """
        line = self.lines.get((table, key))
        return f"{self.path}, line {line}" if line else str(self.path)


def published_studies() -> dict[str, Path]:
    """Return {name: path} of the study files that come with the package. A name starts with `published/`."""
    return {PUBLISHED_PREFIX + path.stem: path for path in sorted(PUBLISHED_FOLDER.glob("*.toml"))}


def read_study_file(path: Path, scale: str = "") -> StudyFile:
    """Read and parse a study file, or a study of the package if there is no file with this path.

    `scale` selects the table [scale.NAME] of the file. Raise UserError if the file cannot be read, is not a valid TOML
    file, or has no such table.
    """
    name, published = path.as_posix().removesuffix(".toml"), published_studies()
    if not path.exists() and name.startswith(PUBLISHED_PREFIX) and name not in published:
        raise UserError(f"{path}: no such study{suggest(name, published)} (to list all: bestiary list studies)")
    try:
        text = (path if path.exists() else published.get(name, path)).read_text()
        file = StudyFile(path, text, parse_toml(text), scale)
    except FileNotFoundError as error:
        hint = suggest(PUBLISHED_PREFIX + name, published)
        raise UserError(
            f"{path}: no such file{hint} (to list the studies of the package: bestiary list studies)"
        ) from error
    except (ValueError, RecursionError) as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise UserError(f"{path}: not a valid TOML file: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    _check_scales(file)
    return file


# --- scales ---


def list_of_tables(file: StudyFile, name: str, problems: list[str]) -> list[Mapping[str, Any]]:
    """Return the tables [[NAME]] of a file. If the value is not a list of tables, append a problem and return []."""
    tables = file.tables.get(name, [])
    if isinstance(tables, list) and all(isinstance(table, Mapping) for table in tables):
        return tables
    problems.append(f"{file.location('', name)}: {name}: expected [[{name}]] tables")
    return []


def _check_scales(file: StudyFile) -> None:
    """Raise UserError if a table [scale.NAME] is wrong, or if the table of the selected scale does not exist."""
    scales = file.tables.get("scale", {})
    if not isinstance(scales, Mapping) or not all(isinstance(table, Mapping) for table in scales.values()):
        raise UserError(f"{file.location('', 'scale')}: scale: expected tables [scale.NAME], such as [scale.small]")
    problems = [
        f"{file.location(f'scale {name}', key)}: unknown key {key} of a scale{suggest(key, SCALE_KEYS)} "
        f"(keys: {', '.join(SCALE_KEYS)})"
        for name, table in scales.items()
        for key in table
        if key not in SCALE_KEYS
    ]
    if file.scale and file.scale not in scales:
        known = f"scales: {', '.join(scales)}" if scales else "the file has no table [scale.NAME]"
        problems.append(f"--scale {file.scale}: {file.path} has no such scale{suggest(file.scale, scales)} ({known})")
    if problems:
        raise UserError(*problems)


def scaled_value(file: StudyFile, key: str, default: Any = None) -> Any:
    """Return the value of a top-level key. The selected scale may replace it."""
    return file.selected_scale.get(key, file.tables.get(key, default))


def scale_table(file: StudyFile, *keys: str) -> dict[str, Any]:
    """Return the options of a table of the selected scale: [scale.NAME.KEY...]. It is empty if there is no such table.

    Raise UserError if the value is not a table.
    """
    table: Any = file.selected_scale
    for key in keys:
        table = table.get(key, {})
        if not isinstance(table, Mapping):
            location = file.location(f"scale {file.scale}", keys[0])
            raise UserError(f"{location}: {key}: expected a table [{'.'.join(('scale', file.scale, *keys))}]")
    return flatten(table)


# --- lines of keys ---


def key_lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line numbers of all keys and table headers: (table, key) -> line number.

    The key "" stands for the header of the table. The table "variant 1" is the second [[variant]], "variant 1 grid" is
    its table [variant.grid], and "scale small options" is [scale.small.options]. Keys have underscores instead of
    hyphens, for example `frame_stack`.

    The TOML parser of the standard library reports no line numbers. Therefore the first line of the text is parsed,
    then the first two lines, and so on. Each time the lines so far are valid TOML, some keys are new since the previous
    valid part. The line number of the new keys is the number of the first line after the previous valid part. This
    method is slow, so it is used only for error messages.
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
            yield from _nested_table_keys(table, entries)


def _nested_table_keys(table: str, entries: Any) -> Iterator[tuple[str, str]]:
    """Yield (table, key) for each key of a table and of the tables inside it."""
    if not isinstance(entries, Mapping):
        return
    yield table, ""
    yield from ((table, key) for key in (*entries, *flatten(entries)))
    for name, inner in entries.items():
        yield from _nested_table_keys(f"{table} {name}", inner)


# --- drafts of variants ---


@dataclass(frozen=True)
class VariantDraft:
    """Names and options of a variant before its configuration is checked. See `Variant` for the first five fields."""

    name: str
    name_without_env: str
    own_name: str
    grid_point: str
    after: str
    # Name of a table in the study file -> options that this table sets. Later tables override earlier tables.
    tables: dict[str, dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        return functools.reduce(override_options, self.tables.values(), {})


def draft_variants(file: StudyFile, problems: list[str]) -> list[VariantDraft]:
    """Return one draft for each combination of a [[variant]], a point of its own grid and a point of [grid].

    A point of a grid is a combination of values of the grid's options. Problems are appended to `problems`. If
    `problems` is not empty, no drafts are returned.
    """
    base = _read_table(file, "base", problems)
    named = _named_variants(file, problems)
    points = _grid_points(file, "grid", _scaled_grid(file, problems), problems)
    overrides = {f"scale {file.scale} options": scale_table(file, "options")}
    drafts: list[VariantDraft] = []
    owners: list[_NamedVariant] = []  # for each draft, its [[variant]] table
    for variant, point in itertools.product(named, points):
        labels = _point_label(point, with_env=True)
        grid_point = _point_label(point, with_env=False)
        for own_point in variant.points:
            own_name = ",".join(filter(None, [variant.name, _point_label(own_point, with_env=False)]))
            tables = {"base": base, variant.table: variant.options, f"{variant.table} grid": own_point, "grid": point}
            tables |= overrides
            tables[f"scale {file.scale} variant {variant.name}"] = scale_table(file, "variant", variant.name)
            owners.append(variant)
            drafts.append(
                VariantDraft(
                    name=",".join(filter(None, [variant.name, _point_label(own_point, with_env=True), labels]))
                    or "base",
                    name_without_env=",".join(filter(None, [own_name, grid_point])) or "all",
                    own_name=own_name,
                    grid_point=grid_point,
                    after=",".join(filter(None, [variant.after, labels])) if variant.after else "",
                    tables={table: options for table, options in tables.items() if options},
                )
            )
    for draft in drafts:
        for table, options in draft.tables.items():
            if "seed" in options:
                problems.append(
                    f"{file.location(table, 'seed')}: seed: use seeds = [...] at the top of the file instead"
                )
    _check_names(file, drafts, owners, problems)
    return drafts if not problems else []


def _check_names(
    file: StudyFile, drafts: list[VariantDraft], owners: "list[_NamedVariant]", problems: list[str]
) -> None:
    """Report variants with equal names. Also report unknown names in `after` and in the tables of the selected scale.

    `owners` has the [[variant]] table of each draft.
    """
    # Names are compared in lower case, because some file systems do not distinguish upper and lower case.
    names = [draft.name.lower() for draft in drafts]
    for duplicate in sorted({name for name in names if names.count(name) > 1}):
        locations = [file.location(owner.table, "name") for owner in owners if owner.name.lower() == duplicate]
        problems.append(
            f"{locations[-1] if locations else file.path}: two variants have the name {duplicate}; rename one of them"
        )
    for number, (draft, owner) in enumerate(zip(drafts, owners, strict=True)):
        earlier = [other.name for other in drafts[:number]]
        if draft.after and draft.after not in earlier:
            problems.append(
                f"{file.location(owner.table, 'after')}: after = {owner.after!r}: the file has no variant "
                f"{draft.after} above this one{suggest(draft.after, earlier)}"
            )
    known = list(dict.fromkeys(owner.name for owner in owners))
    for name in file.selected_scale.get("variant", {}):
        if name not in known:
            location = file.location(f"scale {file.scale} variant {name}")
            problems.append(f"{location}: there is no variant {name}{suggest(name, known)}")


def _point_label(point: dict[str, Any], with_env: bool) -> str:
    """Return the options and values of a grid point in a form for folder names.

    If `with_env` is false, leave out the option `env`.
    """
    return ",".join(_option_label(key, value) for key, value in point.items() if with_env or key != "env")


def _read_table(file: StudyFile, name: str, problems: list[str]) -> dict[str, Any]:
    """Return the options of a table as a flat dict, which is empty if there is no such table."""
    table = file.tables.get(name, {})
    if isinstance(table, Mapping):
        return flatten(table)
    problems.append(f"{file.location('', name)}: {name}: expected a table [{name}] with options")
    return {}


@dataclass(frozen=True)
class _NamedVariant:
    """A [[variant]] table. If a file has no such table, it has one variant with empty values."""

    name: str = ""
    table: str = ""  # name of the table in the study file, for example "variant 0"
    after: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=lambda: [{}])  # points of the variant's own grid


def _named_variants(file: StudyFile, problems: list[str]) -> list[_NamedVariant]:
    """Return the [[variant]] tables. If there is none, return one entry with empty values."""
    tables = file.tables.get("variant", [])
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        problems.append(
            f"{file.location('', 'variant')}: variant: expected [[variant]] tables, each with a name and options"
        )
        return []
    variants = []
    for number, content in enumerate(tables):
        table = f"variant {number}"
        options = flatten({key: value for key, value in content.items() if key not in ("name", "after", "grid")})
        name, after, grid = content.get("name"), content.get("after", ""), content.get("grid", {})
        if name is None:
            problems.append(f'{file.location(table)}: this [[variant]] has no name; add name = "..."')
        elif not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
            problems.append(f"{file.location(table, 'name')}: name = {name!r}: {FOLDER_NAME_RULE}")
        elif not isinstance(after, str):
            problems.append(f"{file.location(table, 'after')}: after = {after!r}: expected the name of a variant")
        elif not isinstance(grid, Mapping):
            problems.append(f"{file.location(table, 'grid')}: grid: expected a table [variant.grid] with lists")
        else:
            points = _grid_points(file, f"{table} grid", flatten(grid), problems)
            variants.append(_NamedVariant(name, table, after, options, points))
    return variants or [_NamedVariant()]


def _scaled_grid(file: StudyFile, problems: list[str]) -> dict[str, Any]:
    """Return the table [grid]. Lists in the selected scale replace lists of this table."""
    grid, problems_before = _read_table(file, "grid", problems), len(problems)
    if "grid" in file.tables and not grid and len(problems) == problems_before:
        problems.append(
            f"{file.location('grid')}: the grid is empty; add lists of values, such as memory = ['none', 'lstm']"
        )
    return grid | scale_table(file, "grid")


def _grid_points(file: StudyFile, table: str, grid: dict[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """Return all combinations of values of the grid options. If there is no grid, return one empty combination."""
    problems_before = len(problems)
    for key, values in grid.items():
        location = file.location(table, key)
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
