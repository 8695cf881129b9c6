"""Changes of a run's configuration between its sessions: detection, and the table config_changes.csv.

Each checkpoint contains the configuration that it was trained with. When a run is resumed, this configuration is
compared with config.toml, so that changes by `resume --steps` and changes by hand are both found.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.config.toml import flatten
from bestiary.runs.csv_tables import CsvTable, read_rows

FILE_NAME = "config_changes.csv"
MISSING = "(not set)"


@dataclass(frozen=True)
class ConfigChange:
    """An option whose value in config.toml differs from its value in a checkpoint."""

    option: str
    old: Any  # value in the checkpoint
    new: Any  # value in config.toml

    def __str__(self) -> str:
        return f"{self.option} {self.old} -> {self.new}"


def find_changes(old_tables: Mapping[str, Any], new_tables: Mapping[str, Any]) -> list[ConfigChange]:
    """Return the options whose values differ between two configurations.

    Names of plug-ins are not compared, because a plug-in may be loaded from its copy in the run folder.
    """
    old, new = ({k: v for k, v in flatten(t).items() if ".py:" not in str(v)} for t in (old_tables, new_tables))
    pairs = {name: (old.get(name, MISSING), new.get(name, MISSING)) for name in {**old, **new}}
    return [ConfigChange(name, *values) for name, values in pairs.items() if values[0] != values[1]]


def record_changes(folder: Path, step: int, changes: list[ConfigChange]) -> None:
    """Append changes to config_changes.csv of a run folder. `step` is the step from which they take effect."""
    path = folder / FILE_NAME
    table = CsvTable(path, keep_rows=len(read_rows(path)) if path.exists() else 0)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    table.write([{"time": now, "step": step, "option": c.option, "old": c.old, "new": c.new} for c in changes])
