"""Callback that saves three kinds of checkpoints: the newest, the permanent, and the best so far."""

import errno
import time
from typing import TYPE_CHECKING, Any

import torch

from bestiary.runs import checkpoints
from bestiary.training.callbacks.base import Callback
from bestiary.utils.console import format_duration, note, warn
from bestiary.utils.errors import RunError

if TYPE_CHECKING:  # the session imports this module
    from bestiary.training.session import Session

MIN_GAMES_FOR_BEST = 20  # a mean return over fewer games is not compared with the best mean return
FIRST_RETRY_SECONDS = 15.0  # time between a failed save and the next attempt; it doubles with each failure
MAX_RETRY_SECONDS = 600.0  # maximum time between two attempts
FINAL_SAVE_SECONDS = 1800.0  # at the end of the training, saving is tried again for at most this time
# Used instead of FINAL_SAVE_SECONDS if a signal has ended the training, because schedulers often kill a process 30 s
# after they send SIGTERM.
SIGNAL_SAVE_SECONDS = 20.0
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the quota of the user is used up
BEST_CHECKS_PER_RUN = 50  # number of times per run that the mean return of recent games is compared with the best one


class CheckpointManager(Callback):
    """Decides when a checkpoint is written, writes it, and removes old checkpoints."""

    name = "checkpoints"

    def __init__(self) -> None:
        self.saved_steps = 0  # step count of the newest checkpoint
        self.saved_time = 0.0  # time of the last attempt to save
        self.failed_saves = 0  # number of consecutive saves that failed
        self.save_error = ""  # message of the last failed save
        self.best_returns: dict[str, float] = {}  # highest mean return so far; keys: "training", "true"
        self.last_best_check = 0  # result of `_best_check_index` when `_keep_best` was last called

    def on_start(self, session: "Session") -> None:
        self.saved_steps = session.learner.steps
        self.saved_time = time.monotonic()
        if 0 in session.config.training.keep_at and not session.run.checkpoints:
            session.save_checkpoint()  # the initial weights

    def is_due(self, session: "Session") -> bool:
        """Return whether a checkpoint must be written, or recent returns must be compared with the best returns.

        Return False if the most recent update was skipped.
        """
        if session.learner.consecutive_skips:
            return False
        return self._best_check_is_due(session) or self._save_is_due(session)

    def on_due(self, session: "Session") -> None:
        if self._best_check_is_due(session):
            self._keep_best(session)
        if self._save_is_due(session):
            session.save_checkpoint()

    def on_end(self, session: "Session") -> None:
        """Save the final state, unless it is already saved. If this fails, wait and try again.

        Raises:
            RunError: the final state could not be saved within FINAL_SAVE_SECONDS (SIGNAL_SAVE_SECONDS after a signal),
                or a signal arrived while waiting.
        """
        if self.saved_steps == session.learner.steps and session.run.checkpoints:
            return
        signal_before = session.interrupts.received
        limit = FINAL_SAVE_SECONDS if signal_before is None else SIGNAL_SAVE_SECONDS
        deadline = time.monotonic() + limit
        while not session.save_checkpoint():
            retry_time = time.monotonic() + min(self.retry_seconds, limit / 4)
            if retry_time < deadline:
                note(
                    f"the final state of {session.run.shown_path} is not saved yet ({self.save_error}); solve this "
                    "problem, for example free space on the disk"
                )
            while time.monotonic() < retry_time < deadline and session.interrupts.received == signal_before:
                time.sleep(0.2)
            if retry_time >= deadline or session.interrupts.received != signal_before:
                raise RunError(
                    f"the final state of {session.run.shown_path} could not be saved ({self.save_error}); "
                    "the previous checkpoint remains"
                )

    def save(self) -> dict[str, Any]:
        return {"best_returns": self.best_returns, "last_best_check": self.last_best_check}

    def load(self, state: dict[str, Any]) -> None:
        self.best_returns = state["best_returns"]
        self.last_best_check = state["last_best_check"]

    def write(self, session: "Session", links: tuple[str, ...] = ()) -> bool:
        """Write a checkpoint and remove older checkpoints that are not permanent. Return whether this succeeded.

        If writing fails, warn the user; the previous checkpoint then remains the newest checkpoint. `links` contains
        the names of links, for example `best`, that are set to the new checkpoint.

        Raises:
            RunError: the weights are not finite, or --max-failed-saves consecutive saves have failed.
        """
        learner = session.learner
        if not all(bool(torch.isfinite(weights).all()) for weights in learner.parameters):
            raise RunError(
                f"the weights at step {learner.steps} are not finite; they are not saved. Try a smaller --lr"
            )
        try:
            self._write_files(session)
        except OSError as error:
            self._count_failure(session, error)
            return False
        finally:
            self.saved_time = time.monotonic()
        if self.failed_saves:
            note(f"the checkpoint at step {learner.steps} is saved; saving works again")
        self.failed_saves = 0
        self.saved_steps = learner.steps
        for link in links:
            path = session.run.path / "checkpoints" / link
            checkpoints.replace_link(path, f"{learner.steps:012d}", session.run.path)
        return True

    @property
    def retry_seconds(self) -> float:
        """The time between the last failed save and the next attempt, in seconds."""
        return min(FIRST_RETRY_SECONDS * 2.0 ** (self.failed_saves - 1), MAX_RETRY_SECONDS)

    def _write_files(self, session: "Session") -> None:
        """Write a checkpoint, then remove old checkpoints.

        If the disk is full, remove old checkpoints of this run first, and try again. The newest checkpoint and all
        permanent checkpoints remain. If the newest checkpoint is damaged, remove nothing.
        """
        learner, training = session.learner, session.config.training
        folder = session.run.path / "checkpoints"

        def write() -> None:
            # `session.save` also tries again to write table rows that could not be written before.
            contents = (learner.save(), session.save_actor(), session.save())
            checkpoints.write_checkpoint(folder, learner.steps, *contents)

        try:
            write()
        except OSError as error:
            newest = session.run.checkpoints[-1:]
            if error.errno not in FULL_DISK_ERRORS or not newest or newest[0].find_damage() is not None:
                raise
            removed = checkpoints.remove_old(folder, training.save_every, training.keep_at, keep_newest=1)
            if not removed:
                raise
            warn(f"{error.strerror}: removed the old checkpoints {', '.join(removed)} of this run to free space")
            write()
        try:
            checkpoints.remove_old(folder, training.save_every, training.keep_at)
        except OSError as error:
            session.warn_once("an old checkpoint was not removed", error)

    def _count_failure(self, session: "Session", error: OSError) -> None:
        """Warn about a failed save. Raise RunError if --max-failed-saves is reached."""
        self.failed_saves += 1
        self.save_error = error.strerror or str(error)
        limit = session.config.training.max_failed_saves
        warn(
            f"{self.save_error}: the checkpoint at step {session.learner.steps} was not saved; "
            f"{'' if session.done else 'training continues, and '}"
            f"saving is tried again in {format_duration(self.retry_seconds)}"
        )
        if limit and self.failed_saves >= limit:
            raise RunError(
                f"{self.failed_saves} consecutive saves failed ({self.save_error}); the run stops because of "
                f"--max-failed-saves {limit}"
            ) from error

    def _save_is_due(self, session: "Session") -> bool:
        """Return whether a checkpoint is due because of --save-minutes, --save-every or --keep-at.

        After a failed save, the next attempt is due after `retry_seconds`.
        """
        training = session.config.training
        seconds = time.monotonic() - self.saved_time
        if self.failed_saves:
            return seconds > self.retry_seconds
        if seconds > 60 * training.save_minutes:
            return True
        now, before, interval = session.learner.steps, self.saved_steps, training.save_every
        if interval and now // interval > before // interval:
            return True
        return any(before < steps <= now for steps in training.keep_at)

    def _best_check_is_due(self, session: "Session") -> bool:
        """Return whether the recent returns must be compared with the best returns now.

        This is done only in runs that have one task and use --reward or --true-reward.
        """
        if not session.channels or len(session.tasks) > 1:
            return False
        return _best_check_index(session) != self.last_best_check

    def _keep_best(self, session: "Session") -> None:
        """Save a checkpoint if the mean return of recent games is the highest so far.

        This is done separately for the training return (link `best-training`) and the first true return (link
        `best-true`).
        """
        self.last_best_check = _best_check_index(session)
        task = next(iter(session.tasks.values()))
        if len(task.recent) < MIN_GAMES_FOR_BEST:
            return
        means = {"training": task.mean_return, "true": task.true_returns()["true_return"]}
        improved = [
            name for name, mean in means.items() if name not in self.best_returns or mean > self.best_returns[name]
        ]
        if improved:
            previous = dict(self.best_returns)
            self.best_returns |= {name: means[name] for name in improved}
            if not session.save_checkpoint(*(f"best-{name}" for name in improved)):
                self.best_returns = previous


def _best_check_index(session: "Session") -> int:
    """Divide the run into BEST_CHECKS_PER_RUN equal parts, and return the number of completed parts."""
    return BEST_CHECKS_PER_RUN * session.learner.steps // session.total_steps
