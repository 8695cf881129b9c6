"""Find the runs and studies that the application shows, and summarise them for tables.

A run or study is identified by its name in the table (`key`): its path relative to the folder that the user named. Keys
of requests are only looked up in the catalogue, so a request cannot name a path outside of these folders.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.config.toml import read_tables, read_toml
from bestiary.runs.checkpoints import list_checkpoints
from bestiary.runs.format_version import old_version
from bestiary.runs.listing import describe_envs, describe_returns, run_state
from bestiary.runs.plugin_copies import shown_options
from bestiary.runs.run import Run
from bestiary.runs.zoo import ZOO_FOLDER
from bestiary.utils.console import printable
from bestiary.utils.errors import UserError
from bestiary.utils.options import convert
from bestiary.view.table_tail import TableTail, read_last_row

MAX_DEPTH = 8  # maximum number of folders between a named folder and a run
MAX_FOLDERS = 20_000  # maximum number of folders that one scan visits
SCAN_SECONDS = 3.0  # a new run appears after at most this time
MAX_TABLES = 64  # maximum number of tables that are kept in memory
SUMMARY_ERRORS = (UserError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, OSError)


@dataclass
class RunSummary:
    """One row of the table of runs."""

    key: str
    path: Path
    envs: str = ""
    seed: str = ""
    state: str = ""  # running, finished, interrupted, crashed, or "unreadable: ..."
    steps: float = 0
    total_steps: float = 0
    rate: float | None = None  # steps/s
    returns: str = ""  # mean return of the last 100 games of each task
    sort_return: float | None = None  # value by which the column of returns is sorted; None with several tasks
    changed: float = 0  # time of the last change of metrics.csv, in seconds since 1970

    @property
    def is_running(self) -> bool:
        """Whether a process is training the run now."""
        return self.state == "running"


@dataclass
class _ConfigCache:
    """The content of config.toml, read again when the file has changed."""

    stamp: tuple[int, int] = (0, 0)  # time of the last change of the file in ns, and its size in bytes
    options: dict[str, Any] = field(default_factory=dict)
    version: str | None = None  # version of Bestiary that wrote the file, if this version is not supported any more
    error: str = ""  # why the file cannot be read


class Catalogue:
    """All runs and studies below the folders that the user named, and the runs that the user named."""

    def __init__(self, folders: Sequence[Path], named_runs: Sequence[Path] = (), trust_code: bool = False):
        self.folders = list(folders)
        self.named_runs = list(named_runs)
        self.trust_code = trust_code
        self.runs: dict[str, Path] = {}
        self.studies: dict[str, Path] = {}
        self._scanned = -SCAN_SECONDS
        self._configs: dict[Path, _ConfigCache] = {}
        self._tables: dict[Path, TableTail] = {}
        self.refresh()

    def refresh(self) -> None:
        """Search the folders for new runs, unless they were searched less than SCAN_SECONDS ago."""
        now = time.monotonic()
        if now - self._scanned < SCAN_SECONDS:
            return
        self._scanned = now
        runs = dict(zip(unique_names(self.named_runs, named_run_key), self.named_runs, strict=True))
        studies: dict[str, Path] = {}
        names = unique_names(self.folders, lambda folder: folder.resolve().name)
        for folder, folder_name in zip(self.folders, names, strict=True):
            prefix = f"{folder_name}/" if len(self.folders) > 1 else ""
            for path, is_study in scan_folder(folder):
                name = path.relative_to(folder).as_posix() if path != folder else folder.resolve().name
                key = printable(prefix + name)  # names may contain bytes that are not text
                (studies if is_study else runs).setdefault(key, path)
        self.runs = runs
        self.studies = studies

    def run(self, key: str) -> Run:
        """Return a run. Raise KeyError if there is no run with this key."""
        return Run(self.runs[key], self.trust_code)

    def table(self, path: Path, root: Path) -> TableTail:
        """Return a table of a run with its newest rows. The most recently used tables are kept in memory."""
        table = self._tables.pop(path, None) or TableTail(path, root)
        self._tables[path] = table
        while len(self._tables) > MAX_TABLES:
            del self._tables[next(iter(self._tables))]
        table.refresh()
        return table

    def metrics(self, key: str) -> TableTail:
        """Return the table metrics.csv of a run."""
        path = self.runs[key]
        return self.table(path / "metrics.csv", path)

    def options(self, key: str) -> dict[str, Any]:
        """Return the options in config.toml of a run, or an empty dict if the file is damaged."""
        return self._config(self.runs[key]).options

    def summary(self, key: str) -> RunSummary:
        """Return the table row of a run. The state of a damaged run describes the damage."""
        path = self.runs[key]
        summary = RunSummary(key, path)
        try:
            self._fill(summary, path)
        # The files may contain anything, and a damaged run must not hide the other runs.
        except SUMMARY_ERRORS as error:
            problem = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            summary.state = printable(f"unreadable: {problem}")
        return summary

    def summaries(self) -> list[RunSummary]:
        """Return the table rows of all runs.

        Running runs come first, then the other runs. In both groups, the run that changed last comes first.
        """
        self.refresh()
        rows = [self.summary(key) for key in self.runs]
        return sorted(rows, key=lambda row: (not row.is_running, -row.changed))

    def _fill(self, summary: RunSummary, path: Path) -> None:
        config = self._config(path)
        if config.error:
            raise UserError(config.error)
        options = config.options
        row = read_last_row(path / "metrics.csv", path)
        saved = list_checkpoints(path / "checkpoints")
        summary.total_steps = convert(options.get("steps", 0), int)
        summary.steps = saved[-1].steps if saved else 0
        summary.state = run_state(path, saved[-1].steps if saved else 0, int(summary.total_steps))
        if summary.is_running:
            summary.steps = max(summary.steps, row.get("step", 0))
        if config.version is not None:
            summary.state += f" (Bestiary {config.version}, not supported)"
        summary.envs = printable(describe_envs(options.get("env", [])))
        summary.seed = printable(str(options.get("seed", "")))
        summary.rate = _finite(row.get("sps"))
        summary.returns = printable(describe_returns(row))
        summary.sort_return = _finite(row.get("return"))
        summary.changed = _modified(path / "metrics.csv") or _modified(path / "config.toml")

    def _config(self, path: Path) -> _ConfigCache:
        try:
            status = os.stat(path / "config.toml", follow_symlinks=False)
            stamp = (status.st_mtime_ns, status.st_size)
        except OSError:
            stamp = (0, -1)
        cached = self._configs.get(path)
        if cached is None or cached.stamp != stamp:
            cached = _ConfigCache(stamp)
            try:
                cached.version = old_version(read_tables(path / "config.toml", in_run_folder=True))
                options = read_toml(path / "config.toml", in_run_folder=True)
                cached.options = shown_options(options, path)
            except SUMMARY_ERRORS as error:
                cached.error = str(error)
            self._configs[path] = cached
        return cached


def named_run_key(path: Path) -> str:
    """Return the key of a run that the user named. Agents of the zoo are called zoo/NAME."""
    resolved = path.resolve()
    return f"zoo/{resolved.name}" if resolved.is_relative_to(ZOO_FOLDER) else printable(resolved.name)


def unique_names(paths: Sequence[Path], name: Callable[[Path], str]) -> list[str]:
    """Return the name of each path. If several paths have the same name, return the whole paths instead."""
    names = [name(path) for path in paths]
    return [own if names.count(own) == 1 else printable(str(path)) for own, path in zip(names, paths, strict=True)]


def scan_folder(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the run and study folders in a folder and its subfolders, as pairs (path, whether it is a study).

    Links are not followed. The subfolders of runs and hidden folders are not searched.
    """
    pending = [(folder, 0)]
    for _ in range(MAX_FOLDERS):
        if not pending:
            return
        path, depth = pending.pop()
        try:
            with os.scandir(path) as entries:
                found = list(entries)
            names = {entry.name for entry in found if entry.is_file(follow_symlinks=False)}
            subfolders = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        if "config.toml" in names:
            yield path, False
            continue
        if "study.toml" in names:
            yield path, True
        if depth < MAX_DEPTH:
            pending += [(path / name, depth + 1) for name in sorted(subfolders) if not name.startswith(".")]


def _modified(path: Path) -> float:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
