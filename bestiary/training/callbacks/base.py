"""Base class of callbacks: objects that a training session calls at its start, after each learn call and at its end."""

from typing import TYPE_CHECKING, Any

from bestiary.step import Episode

if TYPE_CHECKING:  # the session imports this module
    from bestiary.training.session import Session


class Callback:
    """An object that observes the training of a session. A subclass overrides only the methods that it needs.

    The order of calls is: `load` (only in a resumed run); `on_start`; during training, `on_update` after each learn
    call, and `on_due` each time `is_due` returns true; `on_end`; `close`. `save` is called for each checkpoint.

    `session` gives access to the training: `session.run`, `session.config`, `session.learner` (`steps`, `agent`),
    `session.tasks` (statistics of recent games), `session.request_stop(reason)` and, after `on_start`,
    `session.save_checkpoint()`.
    On a cluster, the weights of `session.learner` are up to date in `on_due` and `on_end`, but not in `on_update`.
    """

    name: str  # key of the callback's state in state.json

    def on_start(self, session: "Session") -> None:
        """Prepare for training. The learner is ready, and no update of this session has been computed yet."""

    def on_update(self, session: "Session", metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        """Process the results of a learn call.

        Args:
            session: the training session.
            metrics: metrics of each update of the learn call, by column name of metrics.csv.
            episodes: episodes that ended in the rollouts of the learn call.
        """

    def is_due(self, session: "Session") -> bool:
        """Return whether `on_due` must be called. This method is called often, so it must be fast."""
        return False

    def on_due(self, session: "Session") -> None:
        """Perform a task that needs the current weights, for example a validation."""

    def on_end(self, session: "Session") -> None:
        """Complete the output files. This method is not called if an exception ends the training."""

    def close(self) -> None:
        """Close files and release other resources. This method is always called at the end, even after an exception."""

    def save(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint. It must consist of values that JSON can represent."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `save` returned."""
