"""List of runs: functions that find all runs in a folder and describe each run as one row of a table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bestiary.config.toml import read_tables, read_toml
from bestiary.envs.episode_stats import short_name
from bestiary.runs.checkpoints import list_checkpoints
from bestiary.runs.csv_tables import read_columns
from bestiary.runs.format_version import old_version
from bestiary.runs.run_lock import is_locked, was_killed
from bestiary.utils import safe_files
from bestiary.utils.console import format_count, format_duration, format_number, printable
from bestiary.utils.errors import UserError
from bestiary.utils.options import convert

ERRORS_OF_WRONG_VALUES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError)
MAX_SHOWN = 2_000  # maximum number of characters of a text in a table row; a name of a game has about 20
COLUMNS = ("environment", "seed", "steps", "of", "return", "time", "state")


def find_runs(folder: Path) -> list[Path]:
    """Return all run folders in a folder and its subfolders, from the oldest to the newest.

    Raise UserError if there is no run.
    """
    runs = list_run_folders(folder)
    if not runs:
        raise UserError(f"there is no run below {folder}; create one with: bestiary train --preset hello")
    return sorted(runs, key=_modification_time)


def _modification_time(path: Path) -> float:
    """Return the modification time of a folder, or 0 if it has been removed since it was found."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def list_run_folders(folder: Path) -> list[Path]:
    """Return all run folders in a folder and its subfolders, sorted by path. Links are not followed."""
    return sorted(entry.parent for entry in safe_files.walk(folder) if entry.name == "config.toml")


def describe_run(path: Path) -> list[str]:
    """Return the table row of a run: one text per column in COLUMNS. If the run is damaged, the first text says so.

    Only text files are read, and no code in the run folder is imported. Therefore it is safe to list the runs of other
    people, and runs of older versions of Bestiary can also be listed.
    """
    try:
        return [_shown(text) for text in _describe_run(path)]
    # The files may contain anything, and a damaged run must not prevent the listing of other runs.
    except (UserError, OSError, *ERRORS_OF_WRONG_VALUES) as error:
        problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return [_shown(f"unreadable: {problem}"), *[""] * (len(COLUMNS) - 1)]


def _shown(text: str) -> str:
    """Return a text without control characters. Cut it if it is much longer than the texts of real runs."""
    return printable(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def _describe_run(path: Path) -> list[str]:
    tables = read_tables(path / "config.toml", in_run_folder=True)
    config = read_toml(path / "config.toml", in_run_folder=True)
    total_steps = convert(config.get("steps", 0), int)
    metrics = read_columns(path / "metrics.csv")
    has_metrics = bool(metrics) and len(metrics["step"]) > 0
    saved = list_checkpoints(path / "checkpoints")
    steps = saved[-1].steps if saved else 0
    state = run_state(path, steps, total_steps)
    if has_metrics and state == "running":
        steps = metrics["step"][-1]
    version = old_version(tables)
    if version is not None:
        state += f" (Bestiary {version}, not supported)"
    return [
        describe_envs(config.get("env", [])),
        str(config.get("seed", "")),
        format_count(steps),
        format_count(total_steps),
        describe_returns({name: float(column[-1]) for name, column in metrics.items()} if has_metrics else {}),
        format_duration(float(metrics["seconds"][-1])) if has_metrics else "",
        state,
    ]


def run_state(path: Path, steps: int, total_steps: int) -> str:
    """Return the state of a run: finished, running, crashed or interrupted.

    `steps` is the step count of the last checkpoint, `total_steps` the number of steps of the whole training.
    """
    if steps >= total_steps:
        return "finished"
    if is_locked(path):
        return "running"
    return "crashed" if was_killed(path) else "interrupted"


def describe_envs(names: Sequence[str]) -> str:
    """Return the names of environments as text. Paths of users' files are shortened to the file name."""
    return ", ".join(Path(name).name if ".py:" in name else name for name in names)


def describe_returns(row: dict[str, float]) -> str:
    """Return the mean returns in the last row of metrics.csv as text.

    Examples: "18.2"; with several tasks, "Pong 18.2, Breakout 31.5"; with a true reward, "training 18.2 true 3.1".
    """
    texts = []
    for column in row:
        prefix, _, name = column.rpartition("/")
        if name != "return":
            continue
        start = f"{prefix}/" if prefix else ""
        values = {"": row[column]}
        if f"{start}true_return" in row:
            values = {"training ": row[f"{start}training_return"], "true ": row[f"{start}true_return"]}
        shown = " ".join(f"{key}{'-' if np.isnan(value) else format_number(value)}" for key, value in values.items())
        texts.append(f"{short_name(prefix)} {shown}" if prefix else shown)
    # Until each environment has finished a game, the mean return is biased: short games end first.
    unfinished = row.get("envs_in_first_game", 0)
    note = f" ({unfinished:.0f} environments in their first game)" if unfinished > 0 else ""
    return ", ".join(texts) + note
