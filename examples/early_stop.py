"""Example of a user-defined callback.

bestiary train toy/catch --callback examples/early_stop.py:EarlyStop
"""

from typing import Any

from bestiary.rollout import Episode
from bestiary.training.callbacks.base import Callback
from bestiary.training.session import Session


class EarlyStop(Callback):
    """Stops the training when the mean return of the recent games has been high in several successive learn calls."""

    threshold = 0.8  # mean return of the last 100 games
    patience = 5  # number of successive learn calls

    def __init__(self) -> None:
        self.count = 0  # number of successive learn calls with a mean return of at least the threshold

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        mean_return = min(task.mean_return for task in session.tasks.values())  # NaN before the first game
        self.count = self.count + 1 if mean_return >= self.threshold else 0
        if self.count >= self.patience:
            session.request_stop(f"the mean return {mean_return:.2f} is at least {self.threshold}")

    def save(self) -> dict[str, Any]:
        return {"count": self.count}

    def load(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
