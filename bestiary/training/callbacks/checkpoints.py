"""Callback that saves checkpoints: rolling ones, permanent ones, and those with the best training or true return."""

import time
from typing import TYPE_CHECKING, Any

import torch

from bestiary.runs import checkpoints
from bestiary.training.callbacks.base import Callback
from bestiary.utils.errors import RunError

if TYPE_CHECKING:  # the session imports this module
    from bestiary.training.session import Session

MIN_GAMES_FOR_BEST = 20  # a mean return is compared with the best one only if it is over at least this many games
MAX_FAILED_SAVES = 3  # the run stops after this number of consecutive failed saves
BEST_CHECKS_PER_RUN = 50  # number of times per run that the mean return of recent games is compared with the best one


class CheckpointManager(Callback):
    """Decides when a checkpoint is written, writes it, and removes old checkpoints."""

    name = "checkpoints"

    def __init__(self) -> None:
        self.saved_steps = 0  # step count of the newest checkpoint
        self.saved_time = 0.0  # time of the last attempt to save
        self.failed_saves = 0  # number of consecutive saves that failed
        self.best_returns: dict[str, float] = {}  # highest mean return so far; keys: "training", "true"
        self.last_best_check = 0  # result of `_best_check_index` at the last check

    def on_start(self, session: "Session") -> None:
        self.saved_steps = session.learner.steps
        self.saved_time = time.monotonic()
        if 0 in session.config.training.keep_at and not session.run.checkpoints:
            session.save_checkpoint()  # the initial weights

    def is_due(self, session: "Session") -> bool:
        """Return whether a checkpoint, or a comparison with the best return, is due.

        Neither is due directly after a skipped update.
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
        """Save the final state, unless it is already saved.

        Raises:
            RunError: the final state could not be saved.
        """
        if self.saved_steps != session.learner.steps or not session.run.checkpoints:
            session.save_checkpoint()
            if self.failed_saves:
                raise RunError(
                    f"the final state of {session.run.path} could not be saved; the previous checkpoint remains"
                )

    def save(self) -> dict[str, Any]:
        return {"best_returns": self.best_returns, "last_best_check": self.last_best_check}

    def load(self, state: dict[str, Any]) -> None:
        self.best_returns = state["best_returns"]
        self.last_best_check = state["last_best_check"]

    def write(self, session: "Session", links: tuple[str, ...] = ()) -> bool:
        """Write a checkpoint and remove older checkpoints that are not permanent. Return whether this succeeded.

        If writing fails, warn the user; the previous checkpoint then remains the newest one. `links` contains the names
        of links, for example `best`, that are set to the new checkpoint.

        Raises:
            RunError: the weights are not finite, or MAX_FAILED_SAVES consecutive saves have failed.
        """
        learner = session.learner
        if not all(bool(torch.isfinite(weights).all()) for weights in learner.parameters):
            raise RunError(
                f"the weights at step {learner.steps} are not finite; they are not saved. Try a smaller --lr"
            )
        folder = session.run.path / "checkpoints"
        training = session.config.training
        try:
            checkpoints.write_checkpoint(folder, learner.steps, learner.save(), session.save_actor(), session.save())
            checkpoints.remove_old(folder, training.save_every, training.keep_at)
            self.failed_saves = 0
            self.saved_steps = learner.steps
        except OSError as error:
            self.failed_saves += 1
            session.warn_once(f"the checkpoint at step {learner.steps} was not saved", error)
            if self.failed_saves >= MAX_FAILED_SAVES:
                raise RunError(
                    f"{self.failed_saves} consecutive saves failed ({error.strerror or error}); the run stops"
                ) from error
        finally:
            self.saved_time = time.monotonic()
        if self.saved_steps != learner.steps:
            return False
        for link in links:
            checkpoints.replace_link(folder / link, f"{learner.steps:012d}")
        return True

    def _save_is_due(self, session: "Session") -> bool:
        """Return whether a checkpoint is due because of --save-minutes, --save-every or --keep-at."""
        training = session.config.training
        if time.monotonic() - self.saved_time > 60 * training.save_minutes:
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
            self.best_returns |= {name: means[name] for name in improved}
            session.save_checkpoint(*(f"best-{name}" for name in improved))


def _best_check_index(session: "Session") -> int:
    """Return how many of the BEST_CHECKS_PER_RUN equal parts of the run are completed. A check is due after each."""
    return BEST_CHECKS_PER_RUN * session.learner.steps // session.total_steps
