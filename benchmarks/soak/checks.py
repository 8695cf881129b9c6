"""The invariants of the soak test. Each function returns a list of problems."""

import re
from itertools import pairwise
from pathlib import Path

from benchmarks.soak.mixture import Variant
from benchmarks.soak.process import Sample
from bestiary.runs.csv_tables import read_rows
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError

WARM_UP_SECONDS = 20.0  # a leak is a growth of resources from this time after the start to the end of a process
MIN_SECONDS = 15.0  # leaks are only checked in processes that run at least this long after the warm-up
MAX_GROWTH_MB = 24.0
MAX_NEW_DESCRIPTORS = 4
MAX_NEW_THREADS = 3


def check_run(path: Path, variant: Variant) -> list[str]:
    """Check the checkpoints and tables of a run. No process may be training the run."""
    problems = []
    run = Run(path)
    for checkpoint in run.checkpoints:
        damage = checkpoint.find_damage()
        if damage is not None:
            problems.append(f"checkpoint {checkpoint.steps}: {damage}")
    if run.is_locked:
        problems.append("the run is still locked")
    try:
        if (path / "metrics.csv").exists():
            steps = [int(row["step"]) for row in read_rows(path / "metrics.csv") if row["max_policy_lag"]]
            problems += check_metrics_steps(steps, variant.max_row_gap)
        if (path / "episodes.csv").exists():
            rows = [row for row in read_rows(path / "episodes.csv") if row["env"]]
            problems += check_episodes([(int(row["step"]), int(row["env"])) for row in rows])
    except (UserError, KeyError, ValueError) as error:
        problems.append(f"table: {type(error).__name__}: {error}")
    return problems


def check_metrics_steps(steps: list[int], max_gap: int) -> list[str]:
    """Check the column `step` of metrics.csv: it increases from row to row, by at most `max_gap`."""
    problems = []
    for before, after in zip([0, *steps[:-1]], steps, strict=True):
        if after <= before:
            problems.append(f"metrics.csv: step {after} follows step {before}")
        elif after - before > max_gap:
            problems.append(f"metrics.csv: no row between steps {before} and {after}")
    return problems[:3]


def check_episodes(rows: list[tuple[int, int]]) -> list[str]:
    """Check the columns `step` and `env` of episodes.csv: steps do not decrease, and no row occurs twice."""
    problems = [
        f"episodes.csv: step {after[0]} follows step {before[0]}"
        for before, after in pairwise(rows)
        if after[0] < before[0]
    ]
    if len(set(rows)) < len(rows):
        problems.append(f"episodes.csv: {len(rows) - len(set(rows))} rows occur twice")
    return problems[:3]


def check_finished(path: Path, variant: Variant, reference: Path | None) -> list[str]:
    """Check a run that has reached its end. If `reference` is given, it is an uninterrupted run with equal options."""
    run = Run(path)
    problems = []
    if run.steps < variant.steps:
        problems.append(f"the run ended at step {run.steps} of {variant.steps}")
    if unfinished := [name.name for name in (path / "checkpoints").glob(".*")]:
        problems.append(f"temporary files remain: {', '.join(unfinished)}")
    if reference is not None and not problems:
        names = ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "episodes.csv")
        problems += [
            f"{name} differs from the uninterrupted run"
            for name in names
            if (path / name).read_bytes() != (reference / name).read_bytes()
        ]
    return problems


def check_samples(samples: list[Sample]) -> list[str]:
    """Check that memory, file descriptors and threads do not grow after the warm-up."""
    warm = [sample for sample in samples if sample.seconds >= WARM_UP_SECONDS]
    if not warm or warm[-1].seconds - warm[0].seconds < MIN_SECONDS:
        return []
    first, last = warm[0], warm[-1]
    problems = []
    if last.rss_mb - first.rss_mb > MAX_GROWTH_MB:
        problems.append(f"the memory grew from {first.rss_mb:.0f} to {last.rss_mb:.0f} MB")
    if last.descriptors - first.descriptors > MAX_NEW_DESCRIPTORS:
        problems.append(f"the open files grew from {first.descriptors} to {last.descriptors}")
    if last.threads - first.threads > MAX_NEW_THREADS:
        problems.append(f"the threads grew from {first.threads} to {last.threads}")
    return problems


def check_output(text: str) -> list[str]:
    """Check that a process has printed no traceback and no crash of native code."""
    found = re.findall(r"Traceback|Fatal Python error|Segmentation fault", text)
    return [f"the output contains {found[0]!r}"] if found else []
