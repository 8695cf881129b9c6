"""Run the search of a study: train its trials, report their intermediate values to Optuna, and stop bad trials.

    runs/STUDY/search/journal.log      all trials with their values, written by Optuna
    runs/STUDY/search/tNUMBER-sSEED/   run folder of each trial; configs/ and logs/ as in a study

The journal contains each trial before its training starts. If a search was killed and is started again, it therefore
continues the trials that had not ended, and does not repeat the trials that had ended.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.config.config import Config
from bestiary.envs import lookup_score_range
from bestiary.envs.multitask import task_name
from bestiary.evaluation.learning_curves import final_return
from bestiary.runs.checkpoints import unused_path
from bestiary.runs.csv_tables import read_rows
from bestiary.runs.run import Run
from bestiary.studies.executors import Executor, Process
from bestiary.studies.results import episode_task
from bestiary.studies.run_log import close_log, failure_reason
from bestiary.studies.search import REPORTS_PER_TRIAL, make_pruner, make_sampler
from bestiary.studies.study import BEST, Study
from bestiary.studies.trial import Trial
from bestiary.studies.variants import Variant
from bestiary.training.interrupts import Interrupts
from bestiary.utils import safe_files
from bestiary.utils.console import note, warn
from bestiary.utils.errors import UserError

if TYPE_CHECKING:
    import optuna

POLL_SECONDS = 0.2
MAX_RETRIES = 3  # maximum number of times that a trial is restarted after its machine was lost
FOLDER = "search"
JOURNAL = "journal.log"
SETTINGS = "settings"  # attribute of the journal: hash of the search's settings


def search_folder(folder: Path) -> Path:
    """Return the folder of the search of a study. `folder` is the folder of the study."""
    return folder / FOLDER


# --- journal ---


def open_journal(study: Study, folder: Path, *, create: bool = False) -> "optuna.Study | None":
    """Return the Optuna study in the journal of a search.

    If there is no journal, create one if `create` is true, otherwise return None.

    Raises:
        UserError: the journal belongs to a search with other settings.
    """
    assert study.search is not None
    path = search_folder(folder) / JOURNAL
    if not path.exists() and not create:
        return None
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    safe_files.make_folder(path.parent, folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if create:
        _repair(path)
    backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
    journal = optuna.create_study(
        storage=JournalStorage(backend), study_name=FOLDER, direction="maximize", load_if_exists=True
    )
    settings = study.search.fingerprint(_total_steps(study))
    saved = journal.user_attrs.get(SETTINGS)
    if saved is None:
        journal.set_user_attr(SETTINGS, settings)
    elif saved != settings:
        raise UserError(
            f"{search_folder(folder)}: this search was started with other settings; at least one of these has "
            "changed: [base], [search.space], `value`, `interval`, `seed`, the scale",
            f"{study.path}: rename the study, or add --if-changed new to rename this folder and start a new search",
        )
    journal.pruner = make_pruner(study.search, report_interval(study))
    return journal


def _repair(path: Path) -> None:
    """Remove what a killed process has left: the lock of the journal, and an incomplete line at the end.

    The caller holds the lock of the study's folder, so no other process uses the journal.
    """
    for lock in path.parent.glob(f"{path.name}.lock*"):
        lock.unlink()
    with contextlib.suppress(FileNotFoundError):
        content = safe_files.read_bytes(path)
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            safe_files.write_bytes(path, complete)


def example_config(study: Study) -> Config:
    """Return the configuration of one point of the search, from which settings common to all points can be read."""
    assert study.search_example is not None
    return study.search_example.config


def _total_steps(study: Study) -> int:
    steps = example_config(study).training.steps
    assert steps is not None
    return steps


def report_interval(study: Study) -> int:
    """Return the number of steps between two intermediate values of a trial."""
    assert study.search is not None
    if study.search.value == "validation":
        return example_config(study).training.valid_every
    return study.search.interval or max(1, _total_steps(study) // REPORTS_PER_TRIAL)


# --- trials ---


def make_search_trial(study: Study, folder: Path, number: int, drawn: Mapping[str, Any]) -> Trial:
    """Return the trial with this number. `drawn` maps each searched option to the value that Optuna drew."""
    assert study.search is not None
    assert study.point_variant is not None
    variant = study.point_variant(trial_name(number), study.search.point_options(drawn))
    training = variant.config.training
    log_every = min(training.log_every, report_interval(study))
    config = replace(variant.config, training=replace(training, log_every=log_every))
    return Trial(replace(variant, config=config), study.search.seed, search_folder(folder))


def trial_name(number: int) -> str:
    return f"t{number:04d}"


def best_variant(study: Study, folder: Path) -> Variant | None:
    """Return the variant with the best configuration, or None if the search has not ended or has no result."""
    journal = open_journal(study, folder)
    if journal is None or remaining_trials(study, journal):
        return None
    best = best_trial(journal)
    if best is None:
        return None
    assert study.search is not None
    assert study.point_variant is not None
    variant = study.point_variant(trial_name(best.number), study.search.point_options(best.params))
    return replace(variant, name_without_env=BEST, own_name=BEST)


def best_trial(journal: "optuna.Study") -> "optuna.trial.FrozenTrial | None":
    """Return the complete trial with the highest value, or None if no trial is complete."""
    import optuna

    complete = journal.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    return max(complete, key=lambda trial: trial.value or -math.inf) if complete else None


def remaining_trials(study: Study, journal: "optuna.Study") -> int:
    """Return the number of trials that have not ended."""
    assert study.search is not None
    return study.search.trials - sum(trial.state.is_finished() for trial in journal.get_trials(deepcopy=False))


# --- values ---


def _average(study: Study, values: Mapping[str, float]) -> float:
    """Return the mean of `values`, the returns by task. If there are several tasks, normalise the returns first."""
    if len(values) == 1:
        return next(iter(values.values()))
    normalised = []
    for env, value in values.items():
        found = lookup_score_range(env)
        low, high = study.normalise[env] if env in study.normalise or found is None else (found.low, found.high)
        normalised.append((value - low) / (high - low))
    return float(np.mean(normalised))


def intermediate_values(study: Study, trial: Trial, interval: int) -> dict[int, float]:
    """Return {step: value} at the multiples of `interval` that the training has passed.

    The value at a step comes from the first row of metrics.csv (or validation.csv) at or after this step.
    """
    assert study.search is not None
    try:
        rows = _value_rows(study, trial)
    except (UserError, OSError, ValueError, KeyError):  # the CSV file does not exist yet, or a row is being written
        return {}
    values: dict[int, float] = {}
    for step, value in rows:
        for multiple in range(interval * (max(values, default=0) // interval + 1), step + 1, interval):
            if math.isfinite(value):
                values.setdefault(multiple, value)
    return values


def _value_rows(study: Study, trial: Trial) -> list[tuple[int, float]]:
    """Return (step, value) for each row of metrics.csv, or of validation.csv if the search maximises validation."""
    assert study.search is not None
    envs = trial.config.envs
    if study.search.value == "validation":
        by_step: dict[int, dict[str, float]] = {}
        for row in read_rows(trial.path / "validation.csv"):
            by_step.setdefault(int(row["step"]), {})[row["task"]] = float(row["return"])
        names = {task_name(env): env for env in envs}
        complete = {step: found for step, found in by_step.items() if len(found) == len(envs)}
        return [
            (step, _average(study, {names.get(task, task): value for task, value in found.items()}))
            for step, found in sorted(complete.items())
        ]
    rows = read_rows(trial.path / "metrics.csv")
    columns = {env: f"{task_name(env)}/return" if len(envs) > 1 else "return" for env in envs}
    return [
        (int(row["step"]), _average(study, {env: float(row[column]) for env, column in columns.items()}))
        for row in rows
    ]


def final_value(study: Study, trial: Trial) -> float | None:
    """Return the value of a trained trial: its final return, or its last validation. Return None if it has none."""
    assert study.search is not None
    try:
        if study.search.value == "validation":
            value = _value_rows(study, trial)[-1][1]
        else:
            value = _average(
                study, {env: final_return(trial.run, episode_task(trial, env)) for env in trial.config.envs}
            )
    except (UserError, OSError, ValueError, KeyError, IndexError):
        return None
    return value if math.isfinite(value) else None


# --- running ---


@dataclass
class _Job:
    """A running trial."""

    trial: Trial
    handle: "optuna.trial.Trial"  # the trial in the journal of Optuna
    command: list[str]
    process: Process
    reported: set[int]  # steps whose values have been reported to Optuna
    modified: int = 0  # time of the last change of the CSV file with the values, in ns
    is_pruned: bool = False


def run_search(study: Study, folder: Path, executor: Executor, if_changed: str) -> int | None:
    """Run all trials of the search that have not ended.

    `if_changed` says what to do if the search was started with other settings (see `run_study`). Return None, or the
    number of the signal if a signal interrupted the search.
    """
    search = study.search
    assert search is not None
    safe_files.write_text(folder / "study.toml", study.text)
    journal = _open_or_replace_journal(study, folder, if_changed)
    for name in ("configs", "logs"):
        safe_files.make_folder(search_folder(folder) / name, folder)
    unfinished = _unfinished(journal)
    if remaining_trials(study, journal) <= 0:
        note(f"the search has ended: {search.trials} trials")
        return None
    running: list[_Job] = []
    retries: Counter[int] = Counter()
    with Interrupts() as interrupts:
        try:
            while True:
                stopping = interrupts.received is not None
                if stopping:
                    for job in running:
                        job.process.stop()
                while not stopping and len(running) < executor.capacity():
                    handle = unfinished.pop(0) if unfinished else _ask(study, journal)
                    if handle is None:
                        break
                    if _is_locked(study, folder, handle):
                        unfinished.append(handle)
                        break
                    running += _start(study, folder, handle, executor)
                for job in running:
                    if not job.is_pruned and not stopping:
                        _report(study, job)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    if job.process.error and retries[job.handle.number] < MAX_RETRIES and not stopping:
                        retries[job.handle.number] += 1
                        close_log(job.trial.log, None, job.process.error)
                        note(f"{job.trial.name}: {job.process.error}; retrying")
                        unfinished.insert(0, job.handle)
                    else:
                        _finish(study, journal, job, stopping)
                if not running and (stopping or not remaining_trials(study, journal)):
                    break
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # a second signal stops the study immediately
            for job in running:
                job.process.kill()
            raise
        finally:
            for job in running:
                job.process.stop()
            for job in running:
                job.process.wait()
    return interrupts.received


def _open_or_replace_journal(study: Study, folder: Path, if_changed: str) -> "optuna.Study":
    try:
        journal = open_journal(study, folder, create=True)
    except UserError:
        if if_changed == "error":
            raise
        abandoned = unused_path(folder / f"abandoned-{FOLDER}")
        search_folder(folder).rename(abandoned)
        note(
            f"{search_folder(folder)} has other settings than the study file; the folder was renamed to "
            f"{abandoned.name}, and a new search starts"
        )
        journal = open_journal(study, folder, create=True)
    assert journal is not None
    return journal


def _unfinished(journal: "optuna.Study") -> "list[optuna.trial.Trial]":
    """Return the trials that were running when the search was stopped or killed."""
    import optuna

    frozen = journal.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    return [optuna.trial.Trial(journal, trial._trial_id) for trial in frozen]


def _ask(study: Study, journal: "optuna.Study") -> "optuna.trial.Trial | None":
    """Return a new trial, or None if all trials have been started."""
    search = study.search
    assert search is not None
    number = len(journal.get_trials(deepcopy=False))
    if number >= search.trials:
        return None
    journal.sampler = make_sampler(search, number)
    return journal.ask({name: parameter.distribution() for name, parameter in search.space.items()})


def _is_locked(study: Study, folder: Path, handle: "optuna.trial.Trial") -> bool:
    """Return whether another process is writing the run of a trial.

    This happens if a search was killed and started again while the old commands still save their runs.
    """
    assert study.search is not None
    run = Run(search_folder(folder) / f"{trial_name(handle.number)}-s{study.search.seed}")
    return run.is_locked


def _start(study: Study, folder: Path, handle: "optuna.trial.Trial", executor: Executor) -> list[_Job]:
    """Start the next command of a trial and return [job]. If the trial is trained already, return an empty list."""
    assert study.search is not None
    try:
        trial = make_search_trial(study, folder, handle.number, handle.params)
    except UserError as error:  # a combination of values that is not valid
        handle.study.tell(handle, state=_state("FAIL"))
        warn(f"{trial_name(handle.number)}: {error.problems[0]}")
        return []
    trial.remove_incomplete_folder()
    safe_files.write_text(trial.config_path, trial.config.to_toml(), folder)
    command = trial.next_command()
    if command is None:
        _tell_value(study, handle, trial)
        return []
    options = study.search.point_options(handle.params)
    text = ", ".join(f"{name} = {value}" for name, value in options.items())
    note(f"trial {handle.number + 1} of {study.search.trials}  {trial.name}: {command[0]} with {text}")
    reported = set(handle.study.get_trials(deepcopy=False)[handle.number].intermediate_values)
    return [_Job(trial, handle, command, executor.start(trial, command), reported)]


def _report(study: Study, job: _Job) -> None:
    """Report the new intermediate values of a running trial. If the pruner decides so, stop the trial."""
    table = job.trial.path / ("metrics.csv" if study.search and study.search.value == "training" else "validation.csv")
    with contextlib.suppress(OSError):
        modified = table.stat().st_mtime_ns
        if modified == job.modified:
            return
        job.modified = modified
    for step, value in intermediate_values(study, job.trial, report_interval(study)).items():
        if step in job.reported:
            continue
        job.handle.report(value, step)
        job.reported.add(step)
        if job.handle.should_prune():
            job.handle.study.tell(job.handle, state=_state("PRUNED"))
            job.is_pruned = True
            note(f"{job.trial.name}: stopped early at step {step}, value {value:.4g}")
            job.process.stop()
            return


def _finish(study: Study, journal: "optuna.Study", job: _Job, stopping: bool) -> None:
    """Log the end of a trial's command, and tell Optuna the trial's value."""
    status = job.process.poll()
    job.process.stop()
    stopped = stopping or job.is_pruned
    close_log(job.trial.log, None if stopped and status else status, job.process.error)
    if job.is_pruned:
        return
    if job.trial.is_trained:
        _report_all(study, job)
        _tell_value(study, job.handle, job.trial)
    elif stopping:
        note(f"{job.trial.name}: stopped at step {job.trial.run.steps if job.trial.exists else 0}")
    else:
        journal.tell(job.handle, state=_state("FAIL"))
        warn(f"{job.trial.name} failed: {failure_reason(job.trial.log) or 'it has not been trained to its end'}")


def _report_all(study: Study, job: _Job) -> None:
    """Report the last intermediate values of a trial that is trained to its end."""
    for step, value in intermediate_values(study, job.trial, report_interval(study)).items():
        if step not in job.reported:
            job.handle.report(value, step)


def _tell_value(study: Study, handle: "optuna.trial.Trial", trial: Trial) -> None:
    value = final_value(study, trial)
    if value is None:
        handle.study.tell(handle, state=_state("FAIL"))
        warn(f"{trial.name} has no value: no game or validation has ended in its training")
        return
    handle.study.tell(handle, value)
    best = best_trial(handle.study)
    assert best is not None
    note(f"{trial.name}: value {value:.4g}; best so far: {trial_name(best.number)} with {best.value:.4g}")


def _state(name: str) -> "optuna.trial.TrialState":
    import optuna

    return optuna.trial.TrialState[name]
