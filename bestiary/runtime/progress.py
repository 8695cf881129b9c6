"""How far a training is: a bar where a person watches, plain lines where the output goes to a file."""

import time

from rich.progress import BarColumn, Progress, TextColumn

from bestiary.console import duration, interactive, note, short, stderr


class TrainingProgress:
    def __init__(self, total: int, label: str, seconds_between_lines: float = 10.0):
        self.total, self.label, self.seconds_between_lines = total, label, seconds_between_lines
        self.shown = True  # False where nobody follows it
        self.last_line = 0.0
        self.bar: Progress | None = None

    def __enter__(self) -> "TrainingProgress":
        if self.shown and interactive():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[info]}"))
            self.bar = Progress(*columns, console=stderr)
            self.task = self.bar.add_task(self.label, total=self.total, info="")
            self.bar.start()
        return self

    def show(self, steps: int, sps: float, earned: str, bound: str = "", *, force: bool = False) -> None:
        if not self.shown:
            return
        left = duration((self.total - steps) / sps) if sps > 0 else "?"
        limit = f" · bound by {bound}" if bound else ""
        text = f"{short(steps)} of {short(self.total)} steps · {sps:,.0f} steps/s · {earned}{limit} · {left} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=steps, info=text)
        elif force or time.monotonic() - self.last_line > self.seconds_between_lines:
            self.last_line = time.monotonic()
            note(f"{self.label}  {text}")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
