"""A study file: one TOML that stands for many runs.

    name = "recall-memories"
    seeds = [1, 2, 3]
    evaluate = 200                      # games that each agent plays when its training is done
    dashed = ["stack8"]                 # variants drawn as a line at their final return, not as a curve
    zoom = "200k:300k"                  # a second panel with this part of the x axis

    [base]                              # what all runs have in common: whatever a config file may say
    preset = "recall"

    [grid]                              # every combination of these lists is a variant
    memory = ["none", "gru", "lstm"]

    [[variant]]                         # or named ones, each with options of its own
    name = "stack8"
    frame_stack = 8

Everything is checked before anything runs, and what is wrong is named with its line.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bestiary import plugins
from bestiary.agents.agent import count_parameters
from bestiary.config import Config
from bestiary.errors import UserError
from bestiary.options import span, suggest
from bestiary.resolve import layers, over, resolve
from bestiary.runs.loggers import check_loggers
from bestiary.runtime.devices import check_device
from bestiary.studies.lines import Lines, key_lines
from bestiary.textconfig import flatten

KEYS = ("name", "seeds", "evaluate", "dashed", "zoom", "base", "grid", "variant", "normalise")
FOLDER_NAME = re.compile(r"[\w+=-][\w.,+=-]*")


@dataclass(frozen=True)
class Variant:
    """One configuration; its runs differ only in their seed."""

    name: str
    family: str  # the name without the environment, where that is in the grid: what to average over environments
    own: str  # what it is called in its [[variant]] ...
    point: str  # ... and where it is on the grid, but for the environment; nothing where there is no such thing
    config: Config
    parameters: int

    def with_seed(self, seed: int, evaluate: int) -> Config:
        training = self.config.training
        asked = replace(training, seed=seed, eval_at_end=evaluate or training.eval_at_end)
        return replace(self.config, training=asked)


@dataclass(frozen=True)
class Study:
    path: Path
    text: str
    name: str
    seeds: tuple[int, ...]
    evaluate: int
    variants: list[Variant]
    normalise: dict[str, tuple[float, float]]  # environment -> the returns that count as 0 and as 1
    dashed: tuple[str, ...] = ()  # variants whose final return is drawn, not their curve
    zoom: tuple[float, float] | None = None  # a part of the x axis to look at closely


@dataclass(frozen=True)
class Source:
    """The file as it was read; knows where things stand in it."""

    path: Path
    text: str
    tables: dict[str, Any]

    @functools.cached_property
    def lines(self) -> Lines:
        return key_lines(self.text)

    def at(self, table: str, key: str = "") -> str:
        line = self.lines.get((table, key))
        return f"{self.path}, line {line}" if line else str(self.path)


@dataclass(frozen=True)
class Sketch:
    """A variant that nobody has checked yet: its name, and options by the table that they come from, the strongest last."""

    name: str
    family: str
    own: str
    point: str
    tables: dict[str, dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        return functools.reduce(over, self.tables.values(), {})


def read_study(path: Path) -> Study:
    """The file with all its variants resolved; raises UserError with all problems found."""
    source, problems = _read(path), list[str]()
    tables = source.tables
    for key in set(tables) - set(KEYS):
        problems.append(f"{source.at('', key)}: a study has no {key}{suggest(key, KEYS)} (it has {', '.join(KEYS)})")
    name = tables.get("name", path.stem)
    if not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
        problems.append(f"{source.at('', 'name')}: name = {name!r}: {_FOLDERS}")
    evaluate = tables.get("evaluate", 0)
    if not isinstance(evaluate, int) or isinstance(evaluate, bool) or evaluate < 0:
        problems.append(
            f"{source.at('', 'evaluate')}: evaluate = {evaluate!r}: expected a number of games, such as 100"
        )
    seeds = _seeds(source, problems)
    normalise = _normalise(source, problems)
    sketches = _sketches(source, problems)
    dashed, zoom = _figure(source, [sketch.name for sketch in sketches], problems)
    if problems:
        raise UserError(*problems)
    variants = _resolve_all(source, sketches, seeds[0])
    _check_normalise(source, variants, normalise)
    return Study(path, source.text, name, seeds, evaluate, variants, normalise, dashed, zoom)


_FOLDERS = "it names folders, so it is made of letters, digits and - _ = + , ."


def _read(path: Path) -> Source:
    try:
        text = path.read_text()
        return Source(path, text, tomllib.loads(text))
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _seeds(source: Source, problems: list[str]) -> tuple[int, ...]:
    seeds, where = source.tables.get("seeds"), source.at("", "seeds")
    if not isinstance(seeds, list) or not seeds:
        problems.append(f"{where}: which seeds? For example: seeds = [1, 2, 3]")
        return ()
    wrong = [seed for seed in seeds if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63]
    problems += [f"{where}: seeds: {seed!r} is not a whole number from 0 on" for seed in wrong]
    twice = {seed for seed in seeds if not wrong and seeds.count(seed) > 1}
    problems += [f"{where}: seed {seed} is listed twice" for seed in sorted(twice)]
    return tuple(seeds)


# --- from tables to variants ---


def _sketches(source: Source, problems: list[str]) -> list[Sketch]:
    """Every variant at every point of the grid."""
    base = _table(source, "base", problems)
    named = _named(source, problems)
    points = _points(source, problems)
    sketches = []
    for (name, table, own), point in itertools.product(named, points):
        words = {key: _word(key, value) for key, value in point.items()}
        full = ",".join(filter(None, [name, *words.values()]))
        where = ",".join(word for key, word in words.items() if key != "env")
        family = ",".join(filter(None, [name, where]))
        options = {"base": base, **({table: own} if table else {}), **({"grid": point} if point else {})}
        sketches.append(Sketch(full or "base", family or "all", name, where, options))
    for sketch in sketches:
        for table, options in sketch.tables.items():
            if "seed" in options:
                problems.append(f"{source.at(table, 'seed')}: seed: a study's seeds are listed once, in seeds = [...]")
    names = [sketch.name.lower() for sketch in sketches]  # as file systems compare them that know no case
    for twice in sorted({name for name in names if names.count(name) > 1}):
        places = [source.at(table, "name") for name, table, _ in named if name.lower() == twice]
        problems.append(f"{places[-1] if places else source.path}: there are two variants called {twice}")
    return sketches if not problems else []


def _table(source: Source, name: str, problems: list[str]) -> dict[str, Any]:
    table = source.tables.get(name, {})
    if isinstance(table, Mapping):
        return flatten(table)
    problems.append(f"{source.at('', name)}: {name} is a table: [{name}], and options below it")
    return {}


def _named(source: Source, problems: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, table and options of each [[variant]]; a nameless one without options where there is none."""
    given = source.tables.get("variant", [])
    if not isinstance(given, list) or not all(isinstance(table, Mapping) for table in given):
        problems.append(f"{source.at('', 'variant')}: variants are written [[variant]], each with a name and options")
        return []
    found = []
    for number, table in enumerate(given):
        place, options = f"variant {number}", flatten(table)
        name = options.pop("name", None)
        if name is None:
            problems.append(f'{source.at(place)}: this [[variant]] has no name = "..."')
        elif not isinstance(name, str) or not FOLDER_NAME.fullmatch(name):
            problems.append(f"{source.at(place, 'name')}: name = {name!r}: {_FOLDERS}")
        else:
            found.append((name, place, options))
    return found or [("", "", {})]


def _points(source: Source, problems: list[str]) -> list[dict[str, Any]]:
    """The combinations of the grid's lists; one without options where there is no grid."""
    grid, before = _table(source, "grid", problems), len(problems)
    if "grid" in source.tables and not grid and not problems:
        problems.append(
            f"{source.at('grid')}: the grid is empty: it has lists of options, such as memory = ['none', 'lstm']"
        )
    for key, values in grid.items():
        where = source.at("grid", key)
        if not isinstance(values, list) or not values:
            problems.append(f"{where}: grid {key} = {values!r}: expected a list of values, such as [1, 2]")
            continue
        words = [_word(key, value) for value in values]
        problems += [
            f"{where}: grid {word} is listed twice" for word in sorted({w for w in words if words.count(w) > 1})
        ]
    if len(problems) > before:
        return [{}]
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _word(key: str, value: Any) -> str:
    """`memory=gru`, fit for the name of a folder."""
    if isinstance(value, str) and plugins.is_plugin(value):
        value = plugins.split(value)[1]
    if isinstance(value, list):
        value = "x".join(map(str, value))
    value = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    return f"{key}={re.sub(r'[^A-Za-z0-9_.+-]+', '-', str(value))}"


# --- from variants to configs ---


def _resolve_all(source: Source, sketches: list[Sketch], seed: int) -> list[Variant]:
    variants: list[Variant] = []
    problems: dict[str, list[str]] = {}  # to the names of the variants that have each
    for sketch in sketches:
        try:
            variants.append(_resolve(sketch, seed))
        except UserError as error:
            for problem in error.problems:
                problems.setdefault(f"{_locate(source, problem, sketch)}: {problem}", []).append(sketch.name)
    lines = [text + _which(names, len(sketches)) for text, names in problems.items()]
    for first, second in itertools.combinations(variants, 2):
        if first.config == second.config:
            lines.append(f"{source.path}: variants {first.name} and {second.name} are the same configuration")
    if lines:
        raise UserError(*lines)
    return variants


def _resolve(sketch: Sketch, seed: int) -> Variant:
    """The config, and everything that it describes built once: what cannot be built is refused now."""
    given, origin = layers({**sketch.options, "seed": seed})
    config = resolve(given, origin)
    if len(config.envs) > 1:
        raise UserError(
            f"env = {list(config.envs)}: a study's runs have one task each; compare --by task takes several"
        )
    check_loggers(config)
    check_device(config)
    pool = config.make_pool(1, 0)
    try:
        agent = config.make_agent(pool)
    finally:
        pool.close()
    return Variant(sketch.name, sketch.family, sketch.own, sketch.point, config, count_parameters(agent))


def _locate(source: Source, problem: str, sketch: Sketch) -> str:
    """Where in the file the option stands that a problem is about: the flag it names, or else a value that it quotes."""
    said = re.split("; did you mean|: it is an option of", problem)[0]
    flags = [flag.replace("-", "_") for flag in re.findall(r"--([\w.-]*\w)", said)]
    entries = [(table, key, value) for table, options in sketch.tables.items() for key, value in options.items()][::-1]
    for flag, (table, key, _) in itertools.product(flags, entries):
        if key == flag or key.endswith(f".{flag}") or flag.endswith(f".{key}"):
            return source.at(table, key)
    for table, key, value in entries:
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, str) and len(v) > 2 and v in said for v in values):
            return source.at(table, key)
    return str(source.path)


def _which(names: list[str], of: int) -> str:
    """Which variants a problem is of, unless it is of all."""
    if len(names) == of:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (variant {', '.join(names[:3])}{more})"


# --- how the curves are drawn ---


def _figure(
    source: Source, variants: list[str], problems: list[str]
) -> tuple[tuple[str, ...], tuple[float, float] | None]:
    dashed, zoom = source.tables.get("dashed", []), source.tables.get("zoom")
    if not isinstance(dashed, list):
        problems.append(f'{source.at("", "dashed")}: dashed = {dashed!r}: expected a list of variants, such as ["a"]')
        dashed = []
    for name in dashed:
        if name not in variants:
            problems.append(f"{source.at('', 'dashed')}: there is no variant {name}{suggest(str(name), variants)}")
    part = None
    if zoom is not None:
        try:
            part = span(zoom)
        except ValueError as error:
            problems.append(f"{source.at('', 'zoom')}: zoom = {zoom!r}: {error}")
    return tuple(dashed), part


# --- scores across environments ---


def _normalise(source: Source, problems: list[str]) -> dict[str, tuple[float, float]]:
    table = source.tables.get("normalise", {})
    if not isinstance(table, Mapping):
        problems.append(f"{source.at('', 'normalise')}: normalise is a table: [normalise], environments below it")
        return {}
    found = {}
    for env, value in table.items():
        good = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
        if not good or value[0] == value[1]:
            where = source.at("normalise", env.replace("-", "_"))
            problems.append(
                f"{where}: {env} = {value!r}: expected the returns that count as 0 and as 1, such as [0, 50]"
            )
            continue
        found[env] = (float(value[0]), float(value[1]))
    return found


def _check_normalise(source: Source, variants: list[Variant], normalise: dict[str, tuple[float, float]]) -> None:
    played = dict.fromkeys(variant.config.envs[0] for variant in variants)
    missing = [env for env in played if normalise and env not in normalise]
    strange = [env for env in normalise if env not in played]
    if missing:
        raise UserError(f"{source.at('normalise')}: [normalise] says nothing about {', '.join(missing)}")
    if strange:
        where = source.at("normalise", strange[0].replace("-", "_"))
        raise UserError(f"{where}: no variant plays {strange[0]}{suggest(strange[0], played)}")
