"""Reading and writing of TOML config files, and reading of the presets of the package."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from bestiary.utils import safe_files
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

MAX_CONFIG_BYTES = 2**20  # maximum size of a config.toml in a run folder
MAX_KEY_PARTS = 20
# A regular expression of one part of a dotted key: text without quotes, in double quotes, or in single quotes. The
# quantifiers `++` and `*+` do not backtrack, so that a damaged file cannot make the search slow.
_KEY_PART = r"""(?:(?<![\w-])[\w-]++|(?<!\\)"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"{_KEY_PART}(?:[ \t]*+\.[ \t]*+{_KEY_PART}){{{MAX_KEY_PARTS}}}")
NON_OPTION_TABLES = ("versions", "plugins")  # tables of config.toml that only document a run and set no option


def read_toml(path: Path, in_run_folder: bool = False) -> dict[str, Any]:
    """Read a config file or preset and return it as a flat dict for `resolve`. For the arguments see `read_tables`."""
    options = flatten_options(read_tables(path, in_run_folder))
    envs = options.get("env", [])
    if in_run_folder and not (isinstance(envs, list) and all(isinstance(name, str) for name in envs)):
        raise UserError(f"{path}: env is {str(envs)[:60]!r}; it must be a list of names of environments")
    return options


def read_tables(path: Path, in_run_folder: bool = False) -> dict[str, Any]:
    """Read a TOML file and return its tables. Raise UserError if it is missing or invalid.

    With `in_run_folder`, the file must be a regular file, because a run folder may come from another person. Otherwise
    it may also be a link or a pipe.
    """
    try:
        text = safe_files.read_text(path, max_bytes=MAX_CONFIG_BYTES) if in_run_folder else path.read_text()
        return parse_toml(text)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path}: not a valid TOML file: {error}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raise ValueError if it is not valid, if a dotted key has more than MAX_KEY_PARTS parts, or if an integer has more
    than 64 bits.
    """
    # The time and memory that `tomllib` needs for a key grow quadratically with the number of its parts.
    if (found := _LONG_KEY.search(text)) is not None:
        raise ValueError(f"the key {found[0][:40]}... has more than {MAX_KEY_PARTS} parts")
    tables = tomllib.loads(text)
    _check_integers(tables)
    return tables


def _check_integers(value: Any) -> None:
    """Raise ValueError for integers that the TOML standard does not allow, because they have more than 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"an integer has {value.bit_length()} bits; at most 64 bits are allowed")
    if isinstance(value, Mapping):
        _check_integers(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            _check_integers(item)


def flatten_options(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the tables of a config file as a flat dict for `resolve`."""
    return flatten({name: value for name, value in tables.items() if name not in NON_OPTION_TABLES})


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested tables into a flat dict with dotted keys.

    {"memory": {"name": "lstm", "num-layers": 2}} becomes {"memory": "lstm", "memory.num_layers": 2}.
    """
    flat = {}
    for key, value in tables.items():
        key = key.replace("-", "_")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                flat[key if name == "name" else f"{key}.{name.replace('-', '_')}"] = inner
        else:
            flat[key] = value
    return flat


def preset_paths() -> dict[str, Path]:
    """Return {preset name: path of its TOML file}."""
    folder = Path(__file__).resolve().parents[1] / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset and return it as a flat dict for `resolve`."""
    paths = preset_paths()
    if name not in paths:
        raise UserError(f"--preset {name}: unknown; expected one of {', '.join(paths)}{suggest(name, paths)}")
    return read_toml(paths[name])


def dump_toml(tables: Mapping[str, Any]) -> str:
    """Return tables as TOML text: first the keys outside tables, then one section per table.

    Each array is written on one line. Characters that are not printable are escaped, because the text is also printed.
    """
    text = tomli_w.dumps(tables, indent=0)
    # tomli-w writes each item of an array on its own line. The replacements join these lines. They do not change
    # strings, because tomli-w writes a line break inside a string as \n.
    text = text.replace("[\n", "[").replace(",\n]", "]").replace(",\n", ", ")
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


def _escape(character: str) -> str:
    """Return the escape sequence of a character in a TOML string."""
    code = ord(character)
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
