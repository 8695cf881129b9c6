"""Callback that writes metrics.csv and episodes.csv and passes the rows of metrics.csv to the loggers."""

import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bestiary.envs.episode_stats import return_name
from bestiary.evaluation.figure_helpers import import_pyplot
from bestiary.rollout import Episode
from bestiary.runs.csv_tables import CsvTable
from bestiary.runs.loggers import Loggers
from bestiary.training.callbacks.base import Callback
from bestiary.training.callbacks.checkpoints import FULL_DISK_ERRORS
from bestiary.training.callbacks.reward_monitor import RewardMonitor
from bestiary.training.session import Session
from bestiary.utils import safe_files
from bestiary.utils.console import plural, warn
from bestiary.utils.errors import UserError

FIGURE_FILE = "learning_curve.png"


class MetricsWriter(Callback):
    """Writes one row of episodes.csv per episode, and one row of metrics.csv per --log-every steps.

    Args:
        reward_monitor: callback that counts reward-hacking alerts; the counts are written to metrics.csv.
        loggers: loggers of the run. This callback opens and closes them; other callbacks may use them in between.
    """

    name = "metrics"

    def __init__(self, reward_monitor: RewardMonitor, loggers: Loggers):
        self.reward_monitor = reward_monitor
        self.loggers = loggers
        # Number of rows that each CSV file had when the loaded checkpoint was saved.
        self.saved_rows = {"metrics": 0, "episodes": 0}
        self.log_intervals = 0  # number of completed intervals of --log-every steps
        self.pending: list[dict[str, float]] = []  # metrics of each update since the last row of metrics.csv
        self.tables: list[CsvTable] = []  # metrics.csv and episodes.csv, after `on_start`

    def on_start(self, session: Session) -> None:
        folder = session.run.path
        self.metrics = CsvTable(folder / "metrics.csv", self.saved_rows["metrics"])
        self.episodes = CsvTable(folder / "episodes.csv", self.saved_rows["episodes"])
        self.tables = [self.metrics, self.episodes]
        self.episodes.write_header(list(make_episode_row(_empty_episode(session), session.channels)))
        self.loggers.open(session.config, folder, session.learner.steps)

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        self.pending += metrics
        self._write(session, self.episodes, [make_episode_row(episode, session.channels) for episode in episodes])
        intervals = session.learner.steps // session.config.training.log_every
        if intervals > self.log_intervals:
            self.log_intervals = intervals
            self._write_row(session)

    def on_end(self, session: Session) -> None:
        if session.learner.steps < session.total_steps:
            return
        if self.pending:
            self._write_row(session)  # the last log interval may be shorter than --log-every
        if self.loggers.active:
            self._log_learning_curve(session)

    def close(self) -> None:
        for table in self.tables:
            if table.pending:
                warn(f"{plural(len(table.pending), 'row')} of {table.path.name} could not be written")
        self.loggers.close()

    def save(self) -> dict[str, Any]:
        for table in self.tables:
            try:
                table.write([])  # try again to write rows that could not be written before
            except OSError as error:
                # If a table cannot be written for another reason, for example because it was replaced by a folder, the
                # agent must still be saved. `_write` has already warned the user.
                if error.errno in FULL_DISK_ERRORS:
                    raise
        return {
            "rows": {"metrics": self.metrics.num_rows, "episodes": self.episodes.num_rows},
            "log_intervals": self.log_intervals,
            "pending": self.pending,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.saved_rows = state["rows"]
        self.log_intervals = state["log_intervals"]
        self.pending = state["pending"]

    def _write_row(self, session: Session) -> None:
        """Write a row of metrics.csv.

        The row summarises the updates since the last row. It contains the maximum of each metric whose name starts with
        max_, and the mean of each other metric. If some updates do not report a metric, its mean is computed over the
        updates that report it.
        """
        names = list(dict.fromkeys(name for update in self.pending for name in update))
        # If tasks have rewards of different scales, a mean over the tasks has no meaning.
        if len(session.tasks) > 1:
            names = [name for name in names if name not in ("value", "transformed_reward")]
        averages = {}
        for name in names:
            reduce = np.max if name.startswith("max_") else np.mean
            averages[name] = float(reduce([update[name] for update in self.pending if name in update]))
        self.pending = []
        learner = session.learner
        row = {
            "step": learner.steps,
            "frames": learner.steps * session.frames_per_step,
            "seconds": round(session.clock.seconds, 3),
            "sps": round(session.clock.sps, 1),
            "games": sum(task.games for task in session.tasks.values()),
            "envs_in_first_game": sum(task.num_waiting for task in session.tasks.values()),
            **self._task_columns(session),
            "updates": learner.version,
            **averages,
            "skipped_updates": learner.skipped_updates,
            **session.runtime_counters,
        }
        self.loggers.log(row)
        self._write(session, self.metrics, [row])

    def _log_learning_curve(self, session: Session) -> None:
        """Draw the mean return over the steps into the run folder, and log this figure."""
        path = session.run.path / FIGURE_FILE
        image = io.BytesIO()
        try:
            import_pyplot()
            session.run.plot().savefig(image, format="png")
            safe_files.write_bytes(path, image.getvalue(), session.run.path)
        except (OSError, UserError) as error:  # a full disk, or a table without games
            return warn(f"{path.name} is not logged: {error}")
        self.loggers.log_figure("learning_curve", path, session.learner.steps)

    @staticmethod
    def _write(session: Session, table: CsvTable, rows: list[dict[str, Any]]) -> None:
        """Append rows to a table. If this fails, warn the user; the table keeps the rows in memory."""
        try:
            table.write(rows)
        except OSError as error:
            session.warn_once("rows of metrics.csv and episodes.csv are not written yet", error)

    def _task_columns(self, session: Session) -> dict[str, float]:
        """Return the columns of metrics.csv that describe the tasks.

        With one task, the columns are named return, game_length, and so on. With several tasks, they are named
        TASK/return, TASK/game_length, and so on. The columns of PopArt are always named TASK/mu and TASK/sigma.
        """
        columns: dict[str, float] = {}
        several = len(session.tasks) > 1
        total_envs = session.config.total_envs
        for index, (name, task) in enumerate(session.tasks.items()):
            prefix = f"{name}/" if several else ""
            if session.channels:
                columns[f"{prefix}training_return"] = task.mean_return
                columns |= {prefix + column: value for column, value in task.true_returns().items()}
                alerts = self.reward_monitor.count_alerts(name)
                if alerts is not None:
                    columns[f"{prefix}reward_hacking_alerts"] = alerts
            if several:
                # A user's vector environment with several tasks does not say which environment plays which task. The
                # tasks are then assumed to have equally many environments.
                share = len(session.config.envs_of_task(index)) or total_envs / len(session.tasks)
                columns[f"{name}/steps"] = int(session.learner.steps * share / total_envs)
                columns[f"{name}/games"] = task.games
            columns[f"{prefix}return"] = task.mean_return
            columns[f"{prefix}game_length"] = task.mean_length
        popart = session.learner.popart
        if popart is not None:
            for name, mu, sigma in zip(session.tasks, popart.mu.tolist(), popart.sigma.tolist(), strict=True):
                columns[f"{name}/mu"] = mu
                columns[f"{name}/sigma"] = sigma
        return columns


def _empty_episode(session: Session) -> Episode:
    """Return an episode with zeros, from which the header of episodes.csv is made.

    Columns that are not in this header are added when they first occur.
    """
    rewards = ("training", *session.channels) if session.channels else ()
    scalars = [name for name, spec in session.config.interface.measures_spec.items() if not spec.shape]
    measures = dict.fromkeys([*scalars, *rewards], 0.0)
    return Episode(0, "", 0.0, 0, 0.0, 0, False, 0, measures, measures)


def make_episode_row(episode: Episode, channels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the row of episodes.csv for an episode. `channels` contains the names of the true rewards."""
    row = asdict(episode)
    measures = row.pop("measures")
    game_measures = row.pop("game_measures")
    row = {"return" if name == "episode_return" else name: value for name, value in row.items()}
    row["game_over"] = int(row["game_over"])
    rewards = ("training", *channels) if channels else ()
    row |= {return_name(name): measures.pop(name) for name in rewards}
    row |= {f"game_{return_name(name)}": game_measures[name] for name in rewards}
    return {**row, **measures}
