"""Callback that validates the agent every --valid-every steps and keeps the checkpoint with the best score."""

from typing import Any

from bestiary.envs.episode_stats import short_name
from bestiary.evaluation.game_runner import EvaluationInterrupted
from bestiary.runs.csv_tables import CsvTable
from bestiary.runs.loggers import Loggers
from bestiary.training.callbacks.base import Callback
from bestiary.training.callbacks.checkpoints import FULL_DISK_ERRORS
from bestiary.training.session import Session
from bestiary.training.validation import Validator
from bestiary.utils.console import format_number, note


class Validation(Callback):
    """Writes validation.csv and sets the link `best` to the checkpoint with the best score.

    Args:
        validator: object that plays the validation games.
        loggers: loggers of the run, which get the returns.
    """

    name = "validation"

    def __init__(self, validator: Validator, loggers: Loggers):
        self.validator = validator
        self.loggers = loggers
        self.saved_rows = 0  # number of rows that validation.csv had when the loaded checkpoint was saved
        self.best_score: float | None = None
        # Step of the last validation; before the first validation, the step at which training started.
        self.last_step: int | None = None

    def on_start(self, session: Session) -> None:
        self.table = CsvTable(session.run.path / "validation.csv", self.saved_rows)
        if self.last_step is None:
            self.last_step = session.learner.steps

    def is_due(self, session: Session) -> bool:
        """Return whether, since the last validation, training has passed a multiple of --valid-every or has ended."""
        assert self.last_step is not None
        now, before, interval = session.learner.steps, self.last_step, self.validator.interval
        return now // interval > before // interval or before < session.total_steps <= now

    def on_due(self, session: Session) -> None:
        """Validate the agent and write the rows of validation.csv. Save a checkpoint if the score is a new best."""
        now = session.learner.steps
        try:
            rows, score = self.validator.validate(
                session.learner.agent, now, should_stop=lambda: session.interrupts.received is not None
            )
        except EvaluationInterrupted:
            if now < session.total_steps:
                return note("the validation was interrupted; the resumed run will repeat it")
            return note("the final validation was interrupted; to evaluate the agent, use bestiary eval")
        finally:
            # The time of the validation must not lower the measured training speed.
            session.clock.restart_speed(now)
        self.last_step = now
        try:
            self.table.write(rows)
        except OSError as error:
            session.warn_once("rows of validation.csv are not written yet", error)
        self.loggers.log({"step": now, **{f"validation/{row['task']}": row["return"] for row in rows}})
        note("validation: " + ", ".join(f"{short_name(row['task'])} {format_number(row['return'])}" for row in rows))
        if score is not None and (self.best_score is None or score > self.best_score):
            previous_score = self.best_score
            self.best_score = score
            if not session.save_checkpoint("best"):
                self.best_score = previous_score

    def save(self) -> dict[str, Any]:
        try:
            self.table.write([])  # try again to write rows that could not be written before
        except OSError as error:  # see MetricsWriter.save
            if error.errno in FULL_DISK_ERRORS:
                raise
        return {"rows": self.table.num_rows, "best_score": self.best_score, "last_step": self.last_step}

    def load(self, state: dict[str, Any]) -> None:
        self.saved_rows = state["rows"]
        self.best_score = state["best_score"]
        self.last_step = state["last_step"]
