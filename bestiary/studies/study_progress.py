"""Display the progress of a study: bars for the study and each running trial, or text lines if there is no terminal."""

import time

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bestiary.studies.run_log import last_output
from bestiary.studies.trial import Trial
from bestiary.utils.console import format_duration, is_interactive, note, printable, stderr


class StudyProgress:
    """Context manager that displays the progress of the trials (runs) of a study and estimates the remaining time."""

    def __init__(self, trials: list[Trial], waiting: list[Trial], seconds_between_lines: float = 10.0):
        self.trials = trials
        self.unfinished = list(waiting)  # trials that are neither done nor failed
        self.seconds_between_lines = seconds_between_lines
        self.start_time = time.monotonic()
        self.initial_steps = {trial: trial.run.steps for trial in trials}
        self.last_lines: dict[Trial, tuple[float, str]] = {}  # time and text of the last line printed for a trial
        self.printed_once: set[str] = set()
        self.bar: Progress | None = None
        self.bar_tasks: dict[Trial | None, TaskID] = {}  # trial -> its bar; None -> bar of the study

    def __enter__(self) -> "StudyProgress":
        if is_interactive():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(20),
                TextColumn("{task.fields[info]}", markup=False),
            )
            self.bar = Progress(*columns, console=stderr, transient=True)
            self.bar_tasks[None] = self.bar.add_task("study", total=len(self.trials), info="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def print(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        (self.bar.console if self.bar is not None else stderr).print(printable(text), markup=False, style="dim")

    def print_once(self, text: str) -> None:
        """Print a line unless it has been printed before."""
        if text not in self.printed_once:
            self.printed_once.add(text)
            self.print(text)

    def trial_started(self, trial: Trial, command: list[str]) -> None:
        """Print that a command of a trial was started, and add a bar for the trial if it has none."""
        action = {
            "train": "training",
            "resume": f"resuming at step {trial.run.steps}",
            "eval": "evaluating",
        }[command[0]]
        self.print(f"{self._number(trial)}: {action}")
        self.last_lines[trial] = (time.monotonic(), "")
        if self.bar is not None and trial not in self.bar_tasks:
            self.bar_tasks[trial] = self.bar.add_task(printable(trial.name), total=trial.total_steps, info="")

    def trial_ended(self, trial: Trial, result: str, *, stopping: bool = False) -> None:
        """Print the result of a trial and remove its bar. Print the remaining time unless the study is stopping."""
        self.unfinished.remove(trial)
        self.print(f"{self._number(trial)}: {result}{'' if stopping else self.time_left()}")
        if self.bar is not None and trial in self.bar_tasks:
            self.bar.remove_task(self.bar_tasks.pop(trial))

    def _number(self, trial: Trial) -> str:
        return f"run {self.trials.index(trial) + 1} of {len(self.trials)}  {trial.name}"

    def update(self, running: list[Trial]) -> None:
        """Display the last line of output of each running trial, and update the bars."""
        for trial in running:
            output = last_output(trial.log)[-1:] or ["starting"]
            latest = output[0].rpartition("  ")[2]  # remove the label of the run at the start of the line
            if self.bar is not None:
                self.bar.update(self.bar_tasks[trial], completed=trial.steps, info=latest)
                continue
            last_time, last_text = self.last_lines[trial]
            if latest != last_text and time.monotonic() - last_time > self.seconds_between_lines:
                self.last_lines[trial] = (time.monotonic(), latest)
                note(f"{trial.name}  {latest}{self.time_left()}")
        if self.bar is not None:
            finished = len(self.trials) - len(self.unfinished)
            info = f"{finished} of {len(self.trials)} runs{self.time_left()}"
            self.bar.update(self.bar_tasks[None], completed=finished, info=info)

    def time_left(self) -> str:
        """Return a text with the estimated remaining time of the study, or an empty string if it is unknown.

        The estimate uses the mean speed since the study was started.
        """
        new_steps = sum(trial.steps - self.initial_steps[trial] for trial in self.trials)
        remaining = sum(max(trial.total_steps - trial.steps, 0) for trial in self.unfinished)
        if new_steps <= 0 or not remaining:
            return ""
        seconds = time.monotonic() - self.start_time
        return f" · study: about {format_duration(remaining * seconds / new_steps)} left"
