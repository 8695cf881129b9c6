"""Changes of a run's configuration between its sessions: detection, and the table config_changes.csv.

Each checkpoint contains the configuration of the training that wrote it. When a run is resumed, the configuration in
the checkpoint is compared with config.toml. This finds changes by `resume --steps` and changes that the user made in
config.toml.
"""

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bestiary.config.toml import flatten
from bestiary.config.training_options import TRAINING, Training
from bestiary.runs.csv_tables import CsvTable, describe_damage, read_rows

FILE_NAME = "config_changes.csv"
MISSING = "(not set)"
# Options that may differ between a checkpoint and config.toml without --accept-changes: options of runtime, logging,
# checkpoints and validation, and the length of the training. They do not change what the agent is trained for.
FREE_OPTIONS = {f.name for f in fields(Training) if f.metadata["group"] != TRAINING} | {"steps", "device"}


@dataclass(frozen=True)
class ConfigChange:
    """An option whose value in config.toml differs from its value in a checkpoint."""

    option: str
    old: Any  # value in the checkpoint
    new: Any  # value in config.toml

    @property
    def changes_experiment(self) -> bool:
        """Whether the change turns the run into another experiment, for example a change of the seed.

        If only one of the two configurations has the option, the result is False, because the configurations were then
        written by different versions of Bestiary.
        """
        return self.option.partition(".")[0] not in FREE_OPTIONS and MISSING not in (self.old, self.new)

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
    """Append changes to config_changes.csv of a run folder. `step` is the step from which they take effect.

    Existing rows whose step is `step` or later are removed. They belong to training that is no longer part of the run:
    it ended without a checkpoint, or the user has resumed the run from an earlier checkpoint.
    """
    path = folder / FILE_NAME
    rows = read_rows(path) if path.exists() else []
    with describe_damage(path):
        if rows and "step" not in rows[0]:
            raise ValueError("the column step is missing")
        kept = list(itertools.takewhile(lambda row: float(row["step"]) < step, rows))
    if not changes and len(kept) == len(rows):
        return
    table = CsvTable(path, keep_rows=len(kept))
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    table.write([{"time": now, "step": step, "option": c.option, "old": c.old, "new": c.new} for c in changes])
