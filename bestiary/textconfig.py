"""Configs as TOML text, and the presets that come with Bestiary."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary.errors import UserError
from bestiary.options import suggest

NOT_OPTIONS = ("versions", "plugins")  # tables of a run's config.toml that record, and set nothing


def read_toml(path: Path) -> dict[str, Any]:
    """A config file or preset as the flat dict that `resolve` takes."""
    return flatten({name: value for name, value in read_tables(path).items() if name not in NOT_OPTIONS})


def read_tables(path: Path) -> dict[str, Any]:
    """All that a TOML file says."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not readable as TOML: {error}") from error


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{"memory": {"name": "lstm", "hidden": 512}} -> {"memory": "lstm", "memory.hidden": 512}; underscores throughout."""
    flat = {}
    for key, value in tables.items():
        key = key.replace("-", "_")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                flat[key if name == "name" else f"{key}.{name.replace('-', '_')}"] = inner
        else:
            flat[key] = value
    return flat


def presets() -> dict[str, Path]:
    folder = Path(__file__).parent / "presets"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise UserError(f"--preset {name}: there is {', '.join(presets())}{suggest(name, presets())}")
    return read_toml(presets()[name])


def dump_toml(tables: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_toml_value(value)}" for key, value in tables.items() if not isinstance(value, Mapping)]
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{name}]", *(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
