"""What the page of a study shows: its trials, results and statistics. Nothing is executed or written.

The variants are read from study.toml without a check of their options, because the check would execute plug-ins.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bestiary.config.toml import parse_toml
from bestiary.evaluation.statistics import mean_interval
from bestiary.runs.csv_tables import read_rows
from bestiary.studies.run_log import failure_reason
from bestiary.studies.study_file import StudyFile, draft_variants
from bestiary.utils import safe_files
from bestiary.utils.console import format_number, printable
from bestiary.utils.errors import UserError
from bestiary.view.catalogue import Catalogue, RunSummary

RESULT_FILES = ("results.csv", "evaluations.csv")
MAX_RESULT_COLUMNS = 16


@dataclass
class TrialRow:
    """One trial of a study: a variant with a seed."""

    name: str
    variant: str
    run: RunSummary | None  # None: the run folder does not exist yet
    failure: str = ""  # why the last command failed

    @property
    def state(self) -> str:
        """The state as text."""
        if self.failure and (self.run is None or not self.run.is_running):
            return f"failed: {self.failure}"
        return self.run.state if self.run is not None else "not started"


def read_trials(catalogue: Catalogue, key: str) -> tuple[list[TrialRow], str]:
    """Return the trials of a study, and the problem of study.toml or an empty string.

    Runs in the folder that are not trials of study.toml, for example runs of a smaller scale, are at the end.
    """
    folder = catalogue.studies[key]
    names, problem = planned_trials(folder)
    runs = {path.name: run_key for run_key, path in catalogue.runs.items() if path.parent == folder}
    planned = {name: variant for name, variant in names.items() if not runs or name in runs or set(names) & set(runs)}
    others = {name: name.rpartition("-s")[0] or name for name in runs if name not in planned}
    rows = []
    for name, variant in {**planned, **others}.items():
        run = catalogue.summary(runs[name]) if name in runs else None
        rows.append(TrialRow(printable(name), printable(variant), run, read_failure(folder, name)))
    return rows, problem


def planned_trials(folder: Path) -> tuple[dict[str, str], str]:
    """Return {name of a trial: name of its variant} for study.toml, and the problem of this file or an empty string."""
    path = folder / "study.toml"
    try:
        text = safe_files.read_text(path, folder)
        file = StudyFile(path, text, parse_toml(text))
        problems: list[str] = []
        drafts = draft_variants(file, problems)
        if problems:
            return {}, problems[0]
        return {f"{draft.name}-s{seed}": draft.name for draft in drafts for seed in file.tables.get("seeds", [])}, ""
    except (UserError, OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return {}, printable(f"study.toml cannot be read: {error}")


def read_failure(folder: Path, name: str) -> str:
    """Return the reason why the last command of a trial failed, or an empty string."""
    log = folder / "logs" / f"{name}.log"
    if log not in safe_files.list_files(folder / "logs", folder):  # a link is not read
        return ""
    return printable(failure_reason(log))[:300]


def result_tables(folder: Path) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the tables that `bestiary study` has written, as (file name, columns, rows)."""
    tables = []
    for name in RESULT_FILES:
        try:
            rows = read_rows(folder / name)
        except UserError:
            continue
        if rows:
            columns = list(rows[0])[:MAX_RESULT_COLUMNS]
            cells = [[printable(short_number(row.get(column) or "")) for column in columns] for row in rows]
            tables.append((name, [printable(column) for column in columns], cells))
    return tables


def short_number(text: str) -> str:
    """Return a number with 4 digits, or the text if it is not a number."""
    try:
        return format_number(float(text)) if "." in text or "e" in text else text
    except ValueError:
        return text


def variant_rows(catalogue: Catalogue, trials: list[TrialRow]) -> list[list[str]]:
    """Return statistics of the newest returns: variant, column, runs, mean, 95 % interval, lowest and highest run."""
    rows = []
    for variant in dict.fromkeys(trial.variant for trial in trials):
        runs = [trial.run for trial in trials if trial.variant == variant and trial.run is not None]
        values: dict[str, list[float]] = {}
        for run in runs:
            metrics = catalogue.metrics(run.key)
            for name in metrics.number_names:
                if name == "return" or name.endswith("/return"):
                    known = metrics[name][np.isfinite(metrics[name])]
                    values.setdefault(name, []).extend(known[-1:].tolist())
        for name, found in values.items():
            if found:
                array = np.array(found)
                interval = mean_interval(array)
                shown = (
                    ""
                    if interval.low is None or interval.high is None
                    else f"{format_number(interval.low)} to {format_number(interval.high)}"
                )
                mean, low, high = (format_number(float(x)) for x in (array.mean(), array.min(), array.max()))
                rows.append([variant, printable(name), str(len(found)), mean, shown, low, high])
    return rows
