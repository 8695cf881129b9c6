"""Check that refuses run folders and config files of Bestiary 0.1."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.config.toml import read_tables
from bestiary.utils.errors import UserError


def old_version(tables: Mapping[str, Any]) -> str | None:
    """Return the version number if Bestiary 0.1 wrote a config.toml, otherwise None.

    `tables` is the content of config.toml.
    """
    versions = tables.get("versions", {})
    version = str(versions.get("bestiary", "")) if isinstance(versions, Mapping) else ""
    return version if version.split(".")[:2] == ["0", "1"] else None


def check_version(path: Path) -> None:
    """Raise UserError if a run folder or a config file was made by Bestiary 0.1."""
    is_run = path.is_dir()
    version = old_version(read_tables(path / "config.toml" if is_run else path, in_run_folder=is_run))
    if version is not None:
        raise UserError(
            f"{path} was made by Bestiary {version} and cannot be used with {__version__}; "
            f"train again with {__version__}, or install Bestiary {version}"
        )
