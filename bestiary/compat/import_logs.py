"""Conversion of logs.csv of TorchBeast to rows of metrics.csv.

TorchBeast writes one row per update. A row of metrics.csv is a mean over the updates of one --log-every interval.
TorchBeast logs losses as sums over the steps of an update, multiplied by their coefficients; metrics.csv has means per
step without coefficients.
"""

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.config.config import Config
from bestiary.runs.csv_tables import describe_damage
from bestiary.utils import safe_files
from bestiary.utils.errors import UserError

# Column of logs.csv -> column of metrics.csv.
COLUMNS = {
    "mean_episode_return": "return",
    "mean_episode_true_return": "true_return",  # reward-misspecification fork
    "total_loss": "loss",
    "pg_loss": "policy_loss",
    "baseline_loss": "value_loss",
    "entropy_loss": "entropy",
}
MAX_UPDATES = 10_000_000  # maximum number of rows that are read
MAX_ROWS = 200_000  # maximum number of rows that are written


def read_logs(path: Path, config: Config) -> list[dict[str, Any]]:
    """Convert a logs.csv of TorchBeast to rows of metrics.csv. Raise UserError if the file is not valid."""
    options = config.components["algo"].options
    steps_per_update = options.batch_size * options.rollout_length
    factors = {
        "loss": 1 / steps_per_update,
        "policy_loss": 1 / steps_per_update,
        "value_loss": _inverse(options.value_coef * steps_per_update),
        "entropy": -_inverse(options.entropy_coef * steps_per_update),
    }
    rows = []
    first_time = None
    interval = config.training.log_every
    updates = itertools.groupby(_read_updates(path), key=lambda update: int(update["step"]) // interval)
    for _, group in updates:
        members = list(group)
        last = members[-1]
        first_time = members[0]["_time"] if first_time is None else first_time
        row = {
            "step": int(last["step"]),
            "frames": int(last["step"]) * config.interface.frames_per_step,
            "seconds": round(last["_time"] - first_time, 3),
        }
        for original, name in COLUMNS.items():
            values = [member[original] for member in members if math.isfinite(member.get(original, math.nan))]
            if values:
                row[name] = float(np.mean(values)) * factors.get(name, 1.0)
        rows.append({**row, "updates": int(last["step"]) // steps_per_update})
        if len(rows) > MAX_ROWS:
            raise UserError(f"--logs {path}: more than {MAX_ROWS} rows would be written; remove --logs")
    if not rows:
        raise UserError(f"--logs {path}: no row of the file contains a number of steps")
    return rows


def _inverse(value: float) -> float:
    return 1 / value if value else math.nan


def _read_updates(path: Path) -> Iterator[dict[str, float]]:
    """Yield the numbers of each row of logs.csv by column. Rows without a step are left out.

    The header starts with "# _tick". A run that was resumed may contain several headers.
    """
    header: list[str] = []
    with describe_damage(path), safe_files.open_table(path) as file:
        for words in itertools.islice(csv.reader(file), MAX_UPDATES):
            if words and words[0].lstrip("# ") == "_tick":
                header = [word.lstrip("# ") for word in words]
                continue
            if not {"step", "_time"} <= set(header):
                raise UserError(f"--logs {path}: its header has no columns _time and step")
            update = {name: _number(word) for name, word in zip(header, words, strict=False)}
            if all(math.isfinite(update.get(name, math.nan)) for name in ("step", "_time")):
                yield update


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # not a number, but for example a tuple of returns
        return math.nan
