"""Running a study: what is missing is trained, what was cut off is resumed, what is done is left alone.

Each run is a process of its own, so that one that crashes takes nothing with it; what it prints goes to its log. The run
folders are the only memory: a study that was stopped, however, goes on from what they hold.

    runs/STUDY/study.toml              the file, as it was when the study was last run
    runs/STUDY/VARIANT-sSEED/          a run folder each
    runs/STUDY/configs/, logs/         what each was started with, what it printed
    runs/STUDY/results.csv, runs.csv, curves.png, index.html
"""

import shlex
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
from rich.table import Table

from bestiary.console import note, short, stdout, warn
from bestiary.errors import RunError, UserError
from bestiary.runs.checkpoints import unused
from bestiary.runtime.interrupts import Interrupted, Interrupts
from bestiary.studies.attempts import close_log, failure, last_attempt
from bestiary.studies.places import Here, OnCluster, Place, Process
from bestiary.studies.progress import StudyProgress
from bestiary.studies.report import report
from bestiary.studies.study import Study, read_study
from bestiary.studies.trial import Trial, make_trials

POLL_SECONDS = 0.2
TRIES = 3  # of a command whose machine is lost, before its run counts as failed
TAIL = 5  # lines of the log of a failed run that are shown


@dataclass(frozen=True)
class Cluster:
    """Which Ray makes a study's runs, and what of it each gets."""

    address: str
    cpus_per_run: float = 1
    gpus_per_run: float = 0
    trust_open: bool = False

    def words(self) -> list[str]:
        """As the command line has it."""
        words = ["--cluster", self.address, "--cpus-per-run", f"{self.cpus_per_run:g}"]
        words += ["--gpus-per-run", f"{self.gpus_per_run:g}"] if self.gpus_per_run else []
        return words + (["--trust-open-cluster"] if self.trust_open else [])


def run_study(
    path: Path,
    folder: Path | None = None,
    *,
    jobs: int = 1,
    cluster: Cluster | None = None,
    if_changed: str = "error",
    dry_run: bool = False,
    report_only: bool = False,
) -> None:
    """Run what is missing of a study, `jobs` runs at a time or as many as a cluster has room for, and report on it."""
    study = read_study(path)
    place = folder or Path("runs") / study.name
    trials = make_trials(study, place)
    _check_folder(place)
    if dry_run:
        return show_trials(trials)
    if report_only:
        if not place.is_dir():
            raise UserError(f"{place}: there is nothing to report yet; bestiary study {path} runs the study")
        _refuse(study, changed_trials(trials))
        return report(study, trials, place)
    with _alone(place):
        with _workplace(place, jobs, cluster) as where:
            prepare(study, trials, place, if_changed)
            stopped = run_trials(trials, where)
        report(study, trials, place)
    if stopped is not None:
        again = [*(["--dir", str(folder)] if folder else []), *(["--jobs", str(jobs)] if jobs > 1 else [])]
        again += cluster.words() if cluster else []
        note(f"to go on: bestiary study {shlex.join([str(path), *again])}")
        raise Interrupted(stopped)
    _complain(trials)


def show_trials(trials: list[Trial]) -> None:
    """The runs of a study and how far each is."""
    table = Table()
    for column in ("run", "environment", "steps", "parameters", "state"):
        table.add_column(column, justify="right" if column in ("steps", "parameters") else "left")
    states = {trial: trial.state() for trial in trials}
    for trial, state in states.items():
        env = ", ".join(Path(name).name if ".py:" in name else name for name in trial.config.envs)
        table.add_row(trial.name, env, short(trial.total), f"{trial.variant.parameters:,}", state.text)
    stdout.print(table, markup=False)
    kinds = [state.kind for state in states.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    to_go = sum(trial.total - min(trial.run.steps, trial.total) for trial in trials)
    stdout.print(f"{len(trials)} runs: {counts}; {short(to_go)} steps to go", markup=False)


# --- before ---


def _check_folder(folder: Path) -> None:
    """Refuse to write into what somebody keeps other things in."""
    taken = folder.is_dir() and any(folder.iterdir()) and not (folder / "study.toml").is_file()
    if taken or folder.is_file():
        raise UserError(f"{folder} exists and is not a study's folder; give the study another name, or --dir")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process runs a study at a time; the lock ends with it, however it ends."""
    lock = filelock.FileLock(folder / "lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "study.toml").exists():
            (folder / "study.toml").touch()
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{folder}: another process runs this study; --dry-run and --report only look") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _workplace(folder: Path, jobs: int, cluster: Cluster | None) -> Iterator[Place]:
    if cluster is None:
        yield Here(jobs)
        return
    from bestiary.runtime.ray import connected

    with connected(cluster.address, cluster.trust_open) as ray:
        yield OnCluster(ray, folder, cluster.cpus_per_run, cluster.gpus_per_run)


def changed_trials(trials: list[Trial]) -> dict[Trial, list[str]]:
    """Those whose run folder has other settings than the file, and which: the file was changed since."""
    return {trial: changes for trial in trials if trial.exists and (changes := trial.changes())}


def _refuse(study: Study, changed: dict[Trial, list[str]]) -> None:
    """Runs of different settings are never mixed under one name."""
    if changed:
        lines = [f"{trial.path} was run with other settings: {'; '.join(how)}" for trial, how in changed.items()]
        offer = "give the study another name, or add --if-changed new: those start anew, and the old runs are set aside"
        raise UserError(*lines, f"{study.path}: {offer}")


def prepare(study: Study, trials: list[Trial], folder: Path, if_changed: str) -> None:
    """Make the folder fit for running: nothing in the way, the file and a config for each run in their places."""
    changed = changed_trials(trials)
    if if_changed == "error":
        _refuse(study, changed)
    busy = [str(trial.path) for trial in changed if trial.run.being_written]
    if busy:
        raise UserError(f"{', '.join(busy)}: still being written by another process; wait, or stop that one")
    for trial in trials:
        trial.tidy()
    for trial in changed:
        aside = unused(folder / f"abandoned-{trial.name}")
        trial.path.rename(aside)
        if trial.log.exists():
            trial.log.rename(unused(trial.log.with_name(f"{aside.name}.log")))
        note(f"note: {trial.path} is set aside as {aside.name}")
    (folder / "study.toml").write_text(study.text)
    (folder / "configs").mkdir(exist_ok=True)
    for trial in trials:
        trial.config_path.write_text(trial.config.to_toml())
    names = {trial.name for trial in trials}
    others = sorted(path.parent.name for path in folder.glob("*/config.toml") if not path.parent.is_symlink())
    left_out = [name for name in others if name not in names and not name.startswith("abandoned-")]
    if left_out:
        note(f"note: {', '.join(left_out)}: in {folder}, but not in the file any more; left out")


# --- the runs ---


@dataclass(frozen=True)
class Attempt:
    """A command at work for a trial."""

    trial: Trial
    command: list[str]
    process: Process


def run_trials(trials: list[Trial], place: Place) -> int | None:
    """Take every trial to its end, or as far as it gets; returns the signal that stopped us, if one did."""
    waiting = [trial for trial in trials if trial.command() is not None]
    running: list[Attempt] = []
    lost: Counter[Trial] = Counter()  # how often a trial was cut off
    if done := len(trials) - len(waiting):
        note(f"{done} of {len(trials)} runs are done already")
    with Interrupts() as interrupts, StudyProgress(trials, waiting) as progress:
        try:
            while running or waiting:
                if interrupts.received is not None:
                    waiting = []
                    for attempt in running:
                        attempt.process.stop()
                while len(running) < place.room() and (trial := _next(waiting, progress)) is not None:
                    waiting.remove(trial)
                    running += _further(trial, place, progress)
                for attempt in [attempt for attempt in running if attempt.process.poll() is not None]:
                    running.remove(attempt)
                    stopping = interrupts.received is not None
                    if attempt.process.lost and lost[attempt.trial] < TRIES and not stopping:
                        lost[attempt.trial] += 1
                        close_log(attempt.trial.log, None, attempt.process.lost)
                        progress.say(f"{attempt.trial.name}: {attempt.process.lost}; once more")
                        waiting.insert(0, attempt.trial)
                        continue
                    running += _end(attempt, stopping, place, progress)
                progress.show([attempt.trial for attempt in running])
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:  # asked a second time: at once
            for attempt in running:
                attempt.process.kill()
            raise
        finally:
            for attempt in running:
                attempt.process.stop()
            for attempt in running:
                attempt.process.wait()
    return interrupts.received


def _next(waiting: list[Trial], progress: StudyProgress) -> Trial | None:
    """The first that no other process writes. (One that a killed study left behind may still be saving itself.)"""
    for trial in waiting:
        if not trial.exists or not trial.run.being_written:
            return trial
        progress.say_once(f"{trial.name}: another process is writing it; waiting until that ends")
    return None


def _further(trial: Trial, place: Place, progress: StudyProgress) -> list[Attempt]:
    """Start what the trial needs next."""
    command = trial.command()
    if command is None:
        progress.ended(trial, "done")
        return []
    progress.started(trial, command)
    return [Attempt(trial, command, place.start(trial, command))]


def _end(attempt: Attempt, stopping: bool, place: Place, progress: StudyProgress) -> list[Attempt]:
    """Note how a command ended, and start the trial's next one where it ended well."""
    trial, status = attempt.trial, attempt.process.poll()
    attempt.process.stop()
    if status == 0 and trial.command() == attempt.command:
        status = 1  # it thinks that all is well, but would be started for ever
    close_log(trial.log, None if stopping and status else status, attempt.process.lost)
    if status == 0 and not stopping:
        return _further(trial, place, progress)
    stopped = "done" if trial.command() is None else f"stopped at step {trial.run.steps}"
    progress.ended(trial, stopped if stopping else f"failed: {failure(trial.log)}", stopping=stopping)
    return []


# --- after ---


def _complain(trials: list[Trial]) -> None:
    """List the runs that did not get to their end, each with its reason, and end with status 1 where there are any."""
    unfinished = [trial for trial in trials if trial.command() is not None]
    for trial in unfinished:
        warn(f"{trial.name} failed: {failure(trial.log)} ({trial.log})")
        for line in last_attempt(trial.log)[-TAIL:]:
            note(f"  {line}")
    if unfinished:
        raise RunError(f"{len(unfinished)} of {len(trials)} runs failed; the same command tries them again")
