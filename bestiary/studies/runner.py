"""Run a study: train missing runs, resume interrupted runs, and skip finished runs.

Each command of a run (train, resume, eval) is a separate process, so a crash does not affect other runs. The output of
the commands is written to the log file of the run. The progress of a study is stored only in its run folders, so a
study that was stopped in any way can be continued.

    runs/STUDY/study.toml              copy of the study file
    runs/STUDY/VARIANT-sSEED/          run folders
    runs/STUDY/configs/, logs/         config file and log file of each run
    runs/STUDY/analysis/NAME/          files of the analyses, which run after the training
    runs/STUDY/results.csv, runs.csv, evaluations.csv, curves.png, index.html
"""

import itertools
import shlex
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
from rich.table import Table

from bestiary.runs.checkpoints import unused_path
from bestiary.studies.analysis_runner import run_analyses
from bestiary.studies.executors import Executor, LocalExecutor, Process, RayExecutor
from bestiary.studies.run_log import close_log, failure_reason, last_output
from bestiary.studies.search import check_installed
from bestiary.studies.search_report import search_table
from bestiary.studies.search_runner import best_variant, run_search
from bestiary.studies.study import Study, read_study
from bestiary.studies.study_progress import StudyProgress
from bestiary.studies.study_report import write_study_report
from bestiary.studies.trial import Trial, make_trials
from bestiary.training.interrupts import Interrupted, Interrupts
from bestiary.utils import safe_files
from bestiary.utils.console import format_count, note, plain, print_table, stdout, warn
from bestiary.utils.errors import RunError, UserError

POLL_SECONDS = 0.2
MAX_RETRIES = 3  # maximum number of times that a trial is restarted after its machine was lost
LOG_TAIL_LINES = 5  # number of lines at the end of a failed run's log that are printed
ABANDONED_PREFIX = "abandoned-"  # start of the new folder name of a run that `--if-changed new` replaces


@dataclass(frozen=True)
class ClusterOptions:
    """The Ray cluster that trains the runs of a study, and the resources of each run."""

    address: str
    cpus_per_run: float = 1
    gpus_per_run: float = 0
    trust_open: bool = False  # accept a cluster that requires no token

    def to_flags(self) -> list[str]:
        """Return the options as command-line arguments."""
        flags = ["--cluster", self.address, "--cpus-per-run", f"{self.cpus_per_run:g}"]
        if self.gpus_per_run:
            flags += ["--gpus-per-run", f"{self.gpus_per_run:g}"]
        if self.trust_open:
            flags.append("--trust-open-cluster")
        return flags


def run_study(
    path: Path,
    folder: Path | None = None,
    *,
    jobs: int = 1,
    cluster: ClusterOptions | None = None,
    if_changed: str = "error",
    dry_run: bool = False,
    report_only: bool = False,
    trust_code: bool = False,
    scale: str = "",
) -> None:
    """Run all unfinished trials (runs) of a study and its analyses, and write its report.

    Args:
        path: study file, or the name of a study of the package (`published/NAME`).
        folder: folder of the study; by default runs/NAME.
        jobs: number of runs that are trained at the same time; not used if `cluster` is given.
        cluster: Ray cluster to train on; None: this machine. The resources of the cluster decide how many runs are
            trained at the same time.
        if_changed: what to do if existing runs have other settings than the study file. "error": raise UserError.
            "new": rename the folders of these runs and train new runs.
        dry_run: only print the trials and their states.
        report_only: only write the report.
        trust_code: execute plug-ins given in the study file even if the user has not used them before.
        scale: name of the table [scale.NAME] of the study file; empty: the full study.
    """
    study = read_study(path, trust_code, scale)
    study_folder = folder or Path("runs") / study.name
    _check_folder(study_folder)
    study = with_best(study, study_folder)
    trials = make_trials(study, study_folder)
    if dry_run:
        if study.search is not None:
            print_table(search_table(study, study_folder))
            if not trials:
                seeds = ", ".join(map(str, study.seeds))
                text = f"when all trials have ended, the best configuration is trained with these seeds: {seeds}"
                return stdout.print(text, markup=False)
        return print_trials(trials)
    if study.search is not None:
        check_installed(path)
    if report_only:
        if not study_folder.is_dir():
            raise UserError(f"{study_folder} does not exist; run the study first, without --report")
        _refuse_changed(study, changed_trials(trials))
        return write_study_report(study, trials, study_folder)
    with _lock_folder(study_folder):
        signum = None
        with _open_executor(study_folder, jobs, cluster) as executor:
            if study.search is not None:
                signum = run_search(study, study_folder, executor, if_changed)
                study = with_best(study, study_folder)
                trials = make_trials(study, study_folder)
            if signum is None:
                prepare_folder(study, trials, study_folder, if_changed)
                signum = run_trials(trials, executor)
        failed_analyses: dict[str, str] = {}
        if signum is None and study.analyses:
            with Interrupts() as interrupts:
                failed_analyses = run_analyses(
                    study.analyses, trials, study_folder, lambda: interrupts.received is not None
                )
            signum = interrupts.received
        write_study_report(study, trials, study_folder)
    if signum is not None:
        arguments = [str(path)]
        if scale:
            arguments += ["--scale", scale]
        if folder:
            arguments += ["--dir", str(folder)]
        if jobs > 1:
            arguments += ["--jobs", str(jobs)]
        if cluster:
            arguments += cluster.to_flags()
        note(f"the study was interrupted; to continue: bestiary study {shlex.join(arguments)}")
        raise Interrupted(signum)
    if study.search is not None and not trials:
        count = study.search.trials
        raise RunError(f"the search has no result: all {count} trials failed (see {study_folder / 'search' / 'logs'})")
    for name, reason in failed_analyses.items():
        warn(f"analysis {name}: {reason}")
    _raise_if_unfinished(trials)
    if failed_analyses:
        raise RunError(f"{len(failed_analyses)} of {len(study.analyses)} analyses failed")


def with_best(study: Study, folder: Path) -> Study:
    """Return the study with the best configuration of its search as its only variant.

    If the search has not ended or has no result, the returned study has no variants. A study without a search is
    returned unchanged.
    """
    if study.search is None:
        return study
    best = best_variant(study, folder)
    return replace(study, variants=[best] if best else [])


def print_trials(trials: list[Trial]) -> None:
    """Print a table of the trials with their states, and the number of steps that are not trained yet."""
    table = Table()
    for column in ("run", "environment", "steps", "parameters", "state"):
        table.add_column(column, justify="right" if column in ("steps", "parameters") else "left")
    states = {trial: trial.state() for trial in trials}
    for trial, state in states.items():
        env = ", ".join(Path(name).name if ".py:" in name else name for name in trial.config.envs)
        cells = (trial.name, env, format_count(trial.total_steps), f"{trial.variant.parameters:,}", state.text)
        table.add_row(*map(plain, cells))
    stdout.print(table, markup=False)
    kinds = [state.kind for state in states.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    remaining = sum(trial.total_steps - min(trial.run.steps, trial.total_steps) for trial in trials)
    stdout.print(f"{len(trials)} runs: {counts}; {format_count(remaining)} steps remaining", markup=False)


# --- preparation ---


def _check_folder(folder: Path) -> None:
    """Raise UserError if `folder` is a file, or a folder that has files but no study.toml.

    Also raise UserError if the folder contains a symbolic link, a hard link or a special file, for example a pipe. The
    folder may come from another person. Through a link, the study could change files outside the folder. If the study
    opened a pipe, it could wait for ever.
    """
    is_occupied = folder.is_dir() and any(folder.iterdir()) and not (folder / "study.toml").is_file()
    if is_occupied or folder.is_file():
        raise UserError(
            f"{folder} exists and is not the folder of a study; choose another folder with --dir, or rename the study"
        )
    # Run folders are not checked here: the commands that the study starts for the runs check them.
    inner_folders = [folder / name for name in ("", "configs", "logs", "search", "search/configs", "search/logs")]
    own_files = (path for inner in inner_folders for path in inner.glob("*"))
    for path in itertools.chain(own_files, safe_files.walk(folder / "analysis")):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1):
            raise UserError(
                f"{path} is a symbolic link, a file with hard links, or a special file; remove it, or choose another "
                "folder with --dir"
            )


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Return a context that holds the lock of a study's folder. Raise UserError if another process holds the lock.

    When a process ends for any reason, the operating system releases its lock.
    """
    lock = filelock.FileLock(folder / "lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "study.toml").exists():
            (folder / "study.toml").touch()
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{folder}: another process is running this study; use --dry-run to see its progress") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _open_executor(folder: Path, jobs: int, cluster: ClusterOptions | None) -> Iterator[Executor]:
    if cluster is None:
        yield LocalExecutor(jobs)
        return
    from bestiary.distributed.ray_connection import connect_to_ray

    with connect_to_ray(cluster.address, cluster.trust_open) as ray:
        yield RayExecutor(ray, folder, cluster.cpus_per_run, cluster.gpus_per_run)


def changed_trials(trials: list[Trial]) -> dict[Trial, list[str]]:
    """Return {trial: descriptions of the changed settings}, for trials whose run folder differs from the study file."""
    return {trial: changes for trial in trials if trial.exists and (changes := trial.changed_settings())}


def _refuse_changed(study: Study, changed: dict[Trial, list[str]]) -> None:
    """Raise UserError if `changed`, the result of `changed_trials`, is not empty.

    A run must not be continued with other settings, and two runs with different settings must not have the same name.
    """
    if changed:
        lines = [f"{trial.path} was run with other settings: {'; '.join(how)}" for trial, how in changed.items()]
        advice = "rename the study, or add --if-changed new to rename the folders of these runs and train new ones"
        raise UserError(*lines, f"{study.path}: {advice}")


def prepare_folder(study: Study, trials: list[Trial], folder: Path, if_changed: str) -> None:
    """Prepare the folder of a study for training.

    Rename the folders of changed runs, remove incomplete run folders, and write the study file and the config of each
    run. If there are changed runs and `if_changed` is "error", raise UserError.
    """
    changed = changed_trials(trials)
    if if_changed == "error":
        _refuse_changed(study, changed)
    locked = [str(trial.path) for trial in changed if trial.run.is_locked]
    if locked:
        raise UserError(f"{', '.join(locked)}: another process is writing this run; wait until it ends, or stop it")
    for trial in trials:
        trial.remove_incomplete_folder()
    for trial in changed:
        abandoned = unused_path(folder / f"{ABANDONED_PREFIX}{trial.name}")
        trial.path.rename(abandoned)
        if trial.log.exists():
            trial.log.rename(unused_path(trial.log.with_name(f"{abandoned.name}.log")))
        note(f"{trial.path} has other settings than the study file; the folder was renamed to {abandoned.name}")
    safe_files.write_text(folder / "study.toml", study.text)
    safe_files.make_folder(folder / "configs", folder)
    for trial in trials:
        safe_files.write_text(trial.config_path, trial.config.to_toml(), folder)
    names = {trial.name for trial in trials}
    existing = sorted(path.parent.name for path in folder.glob("*/config.toml") if not path.parent.is_symlink())
    ignored = [name for name in existing if name not in names and not name.startswith(ABANDONED_PREFIX)]
    if ignored:
        note(f"{folder} has runs that are not in the study file; they are ignored: {', '.join(ignored)}")


# --- running ---


@dataclass(frozen=True)
class Job:
    """A running command of a trial, and its process."""

    trial: Trial
    command: list[str]
    process: Process


def run_trials(trials: list[Trial], executor: Executor) -> int | None:
    """Run all commands of all unfinished trials.

    Return None, or the number of the signal if a signal interrupted the study.
    """
    waiting = [trial for trial in trials if trial.next_command() is not None]
    running: list[Job] = []
    retries: Counter[Trial] = Counter()
    if finished := len(trials) - len(waiting):
        note(f"{finished} of {len(trials)} runs are already done")
    with Interrupts() as interrupts, StudyProgress(trials, waiting) as progress:
        try:
            while running or waiting:
                if interrupts.received is not None:
                    waiting = []
                    for job in running:
                        job.process.stop()
                _drop_blocked(waiting, [job.trial for job in running], progress)
                while len(running) < executor.capacity() and (trial := _next_trial(waiting, progress)) is not None:
                    waiting.remove(trial)
                    running += _start_next_command(trial, executor, progress)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    stopping = interrupts.received is not None
                    if job.process.error and retries[job.trial] < MAX_RETRIES and not stopping:
                        retries[job.trial] += 1
                        close_log(job.trial.log, None, job.process.error)
                        progress.print(f"{job.trial.name}: {job.process.error}; retrying")
                        waiting.insert(0, job.trial)
                        continue
                    running += _finish_command(job, stopping, executor, progress)
                progress.update([job.trial for job in running])
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


def _next_trial(waiting: list[Trial], progress: StudyProgress) -> Trial | None:
    """Return the first waiting trial that can start now; None if there is none.

    A trial that starts from the checkpoint of another trial must wait until the other trial is trained. A trial must
    also wait while another process has locked its run folder. This happens if the study was killed and started again,
    and the old commands are still saving their runs.
    """
    for trial in waiting:
        if trial.is_blocked:
            continue
        if not trial.exists or not trial.run.is_locked:
            return trial
        progress.print_once(f"{trial.name}: waiting for another process that is writing this run")
    return None


def _drop_blocked(waiting: list[Trial], running: list[Trial], progress: StudyProgress) -> None:
    """Remove trials from `waiting` that can never start, because the trial from which they start has failed."""
    for trial in list(waiting):
        if trial.is_blocked and trial.predecessor not in (*waiting, *running):
            assert trial.predecessor is not None
            waiting.remove(trial)
            progress.trial_ended(trial, f"not started, because {trial.predecessor.name} is not trained")


def _start_next_command(trial: Trial, executor: Executor, progress: StudyProgress) -> list[Job]:
    """Start the next command of a trial and return [job]. If the trial is done, return an empty list."""
    command = trial.next_command()
    if command is None:
        progress.trial_ended(trial, "done")
        return []
    progress.trial_started(trial, command)
    return [Job(trial, command, executor.start(trial, command))]


def _finish_command(job: Job, stopping: bool, executor: Executor, progress: StudyProgress) -> list[Job]:
    """Log the end of a command. If it succeeded and the study is not stopping, start the next command of the trial.

    Return [job] of the next command, or an empty list.
    """
    trial, status = job.trial, job.process.poll()
    job.process.stop()
    if status == 0 and trial.next_command() == job.command:
        status = 1  # the command had no effect; without an error, it would be started again and again
    close_log(trial.log, None if stopping and status else status, job.process.error)
    if status == 0 and not stopping:
        return _start_next_command(trial, executor, progress)
    if not stopping:
        result = f"failed: {failure_reason(trial.log)}"
    elif trial.next_command() is None:
        result = "done"
    else:
        result = f"stopped at step {trial.run.steps}"
    progress.trial_ended(trial, result, stopping=stopping)
    return []


def _raise_if_unfinished(trials: list[Trial]) -> None:
    """If there are unfinished trials, print the reason and the end of the log of each failure, then raise RunError."""
    unfinished = [trial for trial in trials if trial.next_command() is not None]
    for trial in unfinished:
        if trial.is_blocked:
            warn(f"{trial.name} was not started, because it needs a run that failed")
            continue
        warn(f"{trial.name} failed: {failure_reason(trial.log)} ({trial.log})")
        for line in last_output(trial.log)[-LOG_TAIL_LINES:]:
            note(f"  {line}")
    if unfinished:
        raise RunError(f"{len(unfinished)} of {len(trials)} runs failed; run the same command again to retry them")
