"""Callback that shows the progress of a run: a progress bar on a terminal, lines of text otherwise."""

import math
import time
from statistics import fmean

from rich.progress import BarColumn, Progress, TextColumn

from bestiary.envs.episode_stats import short_name
from bestiary.rollout import Episode
from bestiary.training.callbacks.base import Callback
from bestiary.training.session import Session
from bestiary.training.utilisation import find_bottleneck
from bestiary.utils.console import (
    SECONDS_BETWEEN_LINES,
    format_count,
    format_duration,
    format_number,
    is_interactive,
    note,
    plural,
    printable,
    stderr,
)


class ProgressDisplay(Callback):
    """Shows steps, speed, recent returns and remaining time on standard error. At the end, it names the bottleneck."""

    name = "progress"

    def __init__(self) -> None:
        self.last_line_time = -math.inf
        self.bar: Progress | None = None
        self.time_fractions: list[dict[str, float]] = []  # `Session.runtime_metrics` after each learn call

    def on_start(self, session: Session) -> None:
        if is_interactive():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[info]}", markup=False),
            )
            self.bar = Progress(*columns, console=stderr)
            self.bar_task = self.bar.add_task(printable(session.config.label()), total=session.total_steps, info="")
            self.bar.start()

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        if session.runtime_metrics:
            self.time_fractions.append(session.runtime_metrics)
        self._show(session)

    def on_end(self, session: Session) -> None:
        self.last_line_time = -math.inf  # so that the last line is printed in any case
        self._show(session)
        if self.time_fractions and session.learner.steps >= session.total_steps:
            names = self.time_fractions[0]
            means = {name: fmean(fractions[name] for fractions in self.time_fractions) for name in names}
            component, suggestion = find_bottleneck(means, session.learner.algorithm.batch_size_hint)
            note(f"bottleneck of the training speed: {component}; to train faster, {suggestion}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _show(self, session: Session) -> None:
        """Update the progress bar. Without a terminal, print a line every SECONDS_BETWEEN_LINES instead."""
        if self.bar is None and time.monotonic() - self.last_line_time <= SECONDS_BETWEEN_LINES:
            return
        steps, total_steps = session.learner.steps, session.total_steps
        remaining = session.clock.remaining_seconds(total_steps - steps)
        parts = [
            f"{format_count(steps)} of {format_count(total_steps)} steps",
            f"{session.clock.sps:,.0f} steps/s" if session.clock.sps else "measuring the speed",
            format_returns(session),
            f"{format_duration(remaining)} left" if remaining is not None else "time left: not known yet",
        ]
        text = " · ".join(parts)
        if self.bar is not None:
            self.bar.update(self.bar_task, completed=steps, info=text)
        else:
            self.last_line_time = time.monotonic()
            note(f"{session.config.label()}  {text}")


def format_returns(session: Session) -> str:
    """Return the mean returns of recent games as text.

    Tasks are listed separately, because their returns may have different scales. True returns are added if --reward or
    --true-reward is given.

    The text also contains the number of environments that are still in their first game. While this number is not 0,
    the mean return is biased, because short games end first.
    """
    games = sum(task.games for task in session.tasks.values())
    if games == 0:
        return "no game finished yet"
    num_waiting = sum(task.num_waiting for task in session.tasks.values())
    waiting = f"; {num_waiting} of {session.config.total_envs} environments in their first game" if num_waiting else ""
    if len(session.tasks) == 1:
        task = next(iter(session.tasks.values()))
        label = "training return" if session.channels else "return"
        true = "".join(f" true {mean:.2f}" for mean in task.true_returns().values())
        return f"{label} {task.mean_return:.2f}{true} ({plural(games, 'game')}{waiting})"
    texts = []
    for name, task in session.tasks.items():
        if task.games:
            means = [task.mean_return, *task.true_returns().values()]
            texts.append(f"{short_name(name)} " + " true ".join(format_number(mean) for mean in means))
    return f"{plural(games, 'game')}{waiting}: " + ", ".join(texts)
