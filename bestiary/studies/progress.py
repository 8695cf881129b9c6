"""How far a study is: a bar for the whole and one for each run at work where a person watches, else plain lines."""

import time

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from bestiary.console import duration, interactive, note, stderr
from bestiary.studies.attempts import last_attempt
from bestiary.studies.trial import Trial


class StudyProgress:
    def __init__(self, trials: list[Trial], to_do: list[Trial], seconds_between_lines: float = 10.0):
        self.trials, self.open = trials, list(to_do)  # open: neither done nor failed
        self.seconds_between_lines = seconds_between_lines
        self.began, self.steps_before = time.monotonic(), {trial: trial.run.steps for trial in trials}
        self.shown: dict[Trial, tuple[float, str]] = {}  # the last plain line of each, and when
        self.said: set[str] = set()
        self.bar: Progress | None = None
        self.rows: dict[Trial | None, TaskID] = {}  # None: the study's own

    def __enter__(self) -> "StudyProgress":
        if interactive():
            columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[info]}"))
            self.bar = Progress(*columns, console=stderr, transient=True)
            self.rows[None] = self.bar.add_task("study", total=len(self.trials), info="")
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        (self.bar.console if self.bar is not None else stderr).print(text, markup=False, style="dim")

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.say(text)

    def started(self, trial: Trial, command: list[str]) -> None:
        doing = {"train": "training", "resume": f"going on at step {trial.run.steps}", "eval": "evaluating"}[command[0]]
        self.say(f"run {self.trials.index(trial) + 1} of {len(self.trials)}  {trial.name}: {doing}")
        self.shown[trial] = (time.monotonic(), "")
        if self.bar is not None and trial not in self.rows:
            self.rows[trial] = self.bar.add_task(trial.name, total=trial.total, info="")

    def ended(self, trial: Trial, outcome: str, *, stopping: bool = False) -> None:
        self.open.remove(trial)
        left = "" if stopping else self.left()
        self.say(f"run {self.trials.index(trial) + 1} of {len(self.trials)}  {trial.name}: {outcome}{left}")
        if self.bar is not None and trial in self.rows:
            self.bar.remove_task(self.rows.pop(trial))

    def show(self, running: list[Trial]) -> None:
        for trial in running:
            said = last_attempt(trial.log)[-1:] or ["starting"]
            latest = said[0].rpartition("  ")[2]  # without the label, which the run's own name is better than
            if self.bar is not None:
                self.bar.update(self.rows[trial], completed=trial.steps, info=latest)
                continue
            when, before = self.shown[trial]
            if latest != before and time.monotonic() - when > self.seconds_between_lines:
                self.shown[trial] = (time.monotonic(), latest)
                note(f"{trial.name}  {latest}{self.left()}")
        if self.bar is not None:
            done = len(self.trials) - len(self.open)
            text = f"{done} of {len(self.trials)} runs{self.left()}"
            self.bar.update(self.rows[None], completed=done, info=text)

    def left(self) -> str:
        """About how long the study still takes, if its steps go on as fast as since it began."""
        gained = sum(trial.steps - self.steps_before[trial] for trial in self.trials)
        to_go = sum(max(trial.total - trial.steps, 0) for trial in self.open)
        seconds = time.monotonic() - self.began
        return f" · study: about {duration(to_go * seconds / gained)} left" if gained > 0 and to_go else ""
