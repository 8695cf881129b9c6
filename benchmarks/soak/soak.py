"""The loop of the soak test: start or resume a run, disturb it, end it, and check the invariants."""

import csv
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soak import checks
from benchmarks.soak.disk import SoakDisk
from benchmarks.soak.mixture import PACE_CALLBACK, PACE_FILE, Variant
from benchmarks.soak.process import TrainingProcess
from bestiary.runs.run import Run

COLUMNS = ("seconds", "segment", "run", "event", "step", "rss_mb", "descriptors", "threads", "problems")
ENDS = ("kill -9", "kill -9", "kill -9", "SIGTERM", "SIGTERM", "SIGINT", "SIGHUP", "none")
STATUS = {"kill -9": -9, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "none": 0}
SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP}
START_SECONDS = 300.0  # maximum time until the first update
END_SECONDS = 300.0  # time after which a process that does not end and prints nothing is killed
LEFTOVER_SECONDS = 60.0  # maximum time from the end of a process until its children and files are gone


@dataclass(frozen=True)
class Plan:
    """The faults of one training process. The seed of the soak test determines all plans."""

    variant: Variant
    slow_disk: bool
    # (kind, delay, duration) of each disturbance, in seconds. Kind: pause or full disk. Delay: time before its start.
    disturbances: tuple[tuple[str, float, float], ...]
    seconds: float  # time from the last disturbance (or the first update) to `end`
    end: str  # one of ENDS

    @classmethod
    def draw(cls, rng: random.Random, mixture: tuple[Variant, ...]) -> "Plan":
        """Draw a plan at random."""
        kinds = [kind for kind, chance in (("pause", 0.35), ("full disk", 0.35)) if rng.random() < chance]
        return cls(
            rng.choice(mixture),
            rng.random() < 0.2,
            tuple((kind, rng.uniform(0, 4), rng.uniform(1, 6)) for kind in kinds),
            rng.uniform(0, 8),
            rng.choice(ENDS),
        )


@dataclass
class Soak:
    """The state of a soak test.

    Args:
        folder: new folder for runs, logs and the table of events.
        mixture: the configurations.
        seed: seed of all random decisions.
        seconds_per_update: pause after each update.
    """

    folder: Path
    mixture: tuple[Variant, ...]
    seed: int
    seconds_per_update: float
    start: float = field(default_factory=time.monotonic)
    segment: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    max_growth: dict[str, float] = field(default_factory=lambda: {"rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0})

    def run(self, seconds: float) -> None:
        """Train runs with faults for `seconds`. Then train all unfinished runs to their end without faults."""
        rng = random.Random(self.seed)
        for name in ("logs", "references"):
            (self.folder / name).mkdir(parents=True)
        self.pace = self.folder / PACE_FILE
        self.pace.write_text(PACE_CALLBACK)
        with (
            (self.folder / "events.csv").open("w", newline="") as table,
            SoakDisk(self.folder / "disk") as self.disk,
            tempfile.TemporaryDirectory(prefix="") as temporary,  # short, because socket paths have a limited length
        ):
            self.temporary = Path(temporary)
            self.table = csv.writer(table)
            self.table.writerow(COLUMNS)
            while time.monotonic() - self.start < seconds:
                self._run_segment(Plan.draw(rng, self.mixture))
            for variant in self.mixture:
                if self._path(variant).exists():
                    self._run_segment(Plan(variant, False, (), 0.0, "none"))

    def _path(self, variant: Variant) -> Path:
        return self.disk.folder / variant.name

    def _command(self, variant: Variant) -> list[str]:
        """Return the command that starts a run or, if it exists, resumes it."""
        if (self._path(variant) / "config.toml").exists():
            return ["resume", str(self._path(variant))]
        return variant.train_command(self._path(variant), self.pace)

    def _run_segment(self, plan: Plan) -> None:
        """Start or resume a run, disturb it as planned, wait until its process ends, and check the invariants."""
        self.segment += 1
        variant = plan.variant
        command = self._command(variant)
        process = self._start(command, variant.name, plan.slow_disk)
        self._event(plan, f"{command[0]}{', slow disk' if plan.slow_disk else ''}", process)
        if self._wait_for_update(process, variant):
            for kind, wait, duration in plan.disturbances:
                self._watch(process, wait)
                self._disturb(plan, process, kind, duration)
            if plan.end != "none":
                self._watch(process, plan.seconds)
                process.signal(SIGNALS[plan.end])
        status = self._wait_for_end(process)
        problems = self._check_end(plan, process, status)
        finished = status == 0
        if finished and not problems:
            problems = checks.check_finished(self._path(variant), variant, self._reference(variant))
        self._event(plan, "finished" if finished else f"{plan.end}, status {status}", process, problems)
        if problems and self._path(variant).exists():
            shutil.copytree(self._path(variant), self.folder / f"problem-{self.segment}", symlinks=True)
        if finished or problems:
            shutil.rmtree(self._path(variant), ignore_errors=True)

    def _start(self, command: list[str], name: str, slow_disk: bool, pace: bool = True) -> TrainingProcess:
        log = self.folder / "logs" / f"{name}.txt"
        tag = f"{self.folder.name}-{self.segment}"
        return TrainingProcess(command, tag, self.temporary, log, slow_disk, self.seconds_per_update if pace else 0.0)

    def _reference(self, variant: Variant) -> Path | None:
        """Return the folder of an uninterrupted run with which a finished run is compared bit for bit.

        The first call for a variant trains this run. Return None if runs of the variant cannot be compared exactly.
        """
        if not variant.is_exact:
            return None
        path = self.folder / "references" / variant.name
        if not path.exists():
            process = self._start(variant.train_command(path, self.pace), "references", False, pace=False)
            process.wait(START_SECONDS)
        return path

    def _wait_for_update(self, process: TrainingProcess, variant: Variant) -> bool:
        """Wait until the process has started to train. Return False if it has ended or did not start in time."""
        deadline = time.monotonic() + START_SECONDS
        while process.running and time.monotonic() < deadline:
            if " steps · " in process.output():
                return True
            time.sleep(0.2)
        return False

    def _watch(self, process: TrainingProcess, seconds: float) -> None:
        """Measure the process once per second for some seconds."""
        deadline = time.monotonic() + seconds
        while process.running and time.monotonic() < deadline:
            process.measure()
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))

    def _disturb(self, plan: Plan, process: TrainingProcess, kind: str, duration: float) -> None:
        if not process.running:
            return
        self._event(plan, f"{kind} for {duration:.1f} s", process)
        if kind == "pause":
            process.signal(signal.SIGSTOP)
            time.sleep(duration)
            process.signal(signal.SIGCONT)
        else:
            self.disk.fill(process.pid)
            self._watch(process, duration)
            self.disk.free()

    def _wait_for_end(self, process: TrainingProcess) -> int | None:
        """Measure the process until it ends; kill it if it prints nothing for END_SECONDS. Return its exit status."""
        output = ""
        deadline = time.monotonic() + END_SECONDS
        while process.running and time.monotonic() < deadline:
            self._watch(process, 1.0)
            if process.output() != output:  # on a busy machine, a run may need minutes and still make progress
                output = process.output()
                deadline = time.monotonic() + END_SECONDS
        status = process.wait(0)
        if status is None:
            process.signal(signal.SIGKILL)
            process.wait(END_SECONDS)
        return status

    def _check_end(self, plan: Plan, process: TrainingProcess, status: int | None) -> list[str]:
        """Return all problems found after the end of a process, whether its run is finished or not."""
        problems = checks.check_output(process.output())
        if status not in (STATUS[plan.end], 0):  # 0: the run was already finished when the signal came
            problems.append(f"exit status {status} instead of {STATUS[plan.end]}")
        problems += checks.check_run(self._path(plan.variant), plan.variant)
        problems += checks.check_samples(process.samples)
        warm = [sample for sample in process.samples if sample.seconds >= checks.WARM_UP_SECONDS]
        if warm:
            for name in self.max_growth:
                growth = float(getattr(warm[-1], name) - getattr(warm[0], name))
                self.max_growth[name] = max(self.max_growth[name], growth)
        deadline = time.monotonic() + LEFTOVER_SECONDS
        while (left := process.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return [*problems, *(f"left: {name}" for name in left)]

    def _event(self, plan: Plan, text: str, process: TrainingProcess, problems: list[str] | None = None) -> None:
        """Print an event and write it to the table."""
        seconds = time.monotonic() - self.start
        run = Run(self._path(plan.variant))
        step = run.steps if run.path.exists() else 0
        process.measure()
        _, rss_mb, descriptors, threads = process.samples[-1] if process.samples else (0, 0.0, 0, 0)
        self.counts[text.partition(" for ")[0]] += 1
        found = problems or []
        self.problems += [f"segment {self.segment}, {plan.variant.name}: {problem}" for problem in found]
        cells = (round(seconds, 1), self.segment, plan.variant.name, text, step, round(rss_mb, 1), descriptors, threads)
        self.table.writerow((*cells, "; ".join(found)))
        verdict = f"  PROBLEM: {'; '.join(found)}" if found else ""
        print(
            f"{seconds:7.0f} s  {self.segment:4d}  {plan.variant.name:13s} step {step:6d}  {text}{verdict}", flush=True
        )

    def summary(self) -> list[str]:
        """Return the lines of the summary."""
        counted = ", ".join(f"{text}: {count}" for text, count in sorted(self.counts.items()))
        growth = self.max_growth
        return [
            f"seed {self.seed}: {self.segment} processes in {time.monotonic() - self.start:.0f} s; "
            f"full disk: {self.disk.kind}",
            f"events: {counted}",
            f"largest growth of one process after {checks.WARM_UP_SECONDS:.0f} s: {growth['rss_mb']:.1f} MB of memory, "
            f"{growth['descriptors']:.0f} open files, {growth['threads']:.0f} threads",
            f"problems: {len(self.problems)}",
            *self.problems,
        ]
