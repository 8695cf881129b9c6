"""Failures on a cluster: exceptions, error messages, and the maximum number of restarts.

If a process is lost, Ray raises one of several exceptions (`RayActorError`, `OutOfMemoryError`, `NodeDiedError` and
others). This package therefore treats every `RayError` as a lost process, except for two types. A `RayTaskError`
contains an exception that was raised in a process that is still alive. An `ObjectLostError` means that an object in
Ray's object store was lost, because the node that stored the object was lost.
"""

import time
from collections import deque
from typing import Any

from bestiary.utils.console import warn
from bestiary.utils.errors import RunError, UserError

RESTART_WINDOW = 600.0  # the run stops after more than --max-restarts restarts within this time, in seconds
NODE_LOSS_WINDOW = 30.0  # all losses of processes on one node within this time (in seconds) count as one restart


class LearnersLostError(Exception):
    """A learner process was lost. All updates since the last checkpoint are therefore lost."""


class GroupSplitError(Exception):
    """A collective operation of the learners, for example an all-reduce, failed because a learner did not respond."""


class RestartCounter:
    """Counts the restarts of remote processes and stops the run if there are too many.

    All losses of processes on one node within `NODE_LOSS_WINDOW` count as one restart, because they often have the same
    cause: the node was lost. In this case, Ray reports the lost processes one by one. Until Ray notices that the node
    was lost, it may also place new processes on this node, and these are lost, too.
    """

    def __init__(self, max_restarts: int, previous_total: int = 0):
        self.max_restarts = max_restarts  # maximum number of restarts within RESTART_WINDOW
        self.total = previous_total  # all restarts of the run, including those before it was resumed
        self.recent: deque[float] = deque()  # times of the restarts within the last RESTART_WINDOW
        self.last_counted: dict[str, float] = {}  # node ID -> time of the last counted restart on it

    def record(self, reason: str, node_id: str = "") -> None:
        """Count a restart and warn the user.

        Args:
            reason: description of the failure, for the warning.
            node_id: ID of the Ray node of the lost process. If it is empty, the restart is always counted.

        Raises:
            RunError: there were more than `max_restarts` restarts within `RESTART_WINDOW`.
        """
        now = time.monotonic()
        if node_id and now - self.last_counted.get(node_id, -RESTART_WINDOW) < NODE_LOSS_WINDOW:
            warn(
                f"{reason}; a replacement is started (not counted as another restart, because a process on the same "
                f"node was lost less than {NODE_LOSS_WINDOW:.0f} s ago)"
            )
            return
        self.last_counted[node_id] = now
        self.total += 1
        self.recent.append(now)
        while now - self.recent[0] > RESTART_WINDOW:
            self.recent.popleft()
        if len(self.recent) > self.max_restarts:
            raise RunError(
                f"{reason}; this was restart {len(self.recent)} within {RESTART_WINDOW / 60:.0f} minutes, "
                f"the limit is --max-restarts {self.max_restarts}"
            )
        warn(f"{reason}; a replacement is started (restart {self.total})")


def error_summary(error: BaseException) -> str:
    """Return the first line of an error message, after the type of the error (no type for RunError and UserError)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, RunError | UserError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"


def unwrap_task_error(error: Any) -> Exception:
    """Return the `UserError` that caused a `RayTaskError`. For any other cause, return a one-line `RunError`."""
    cause = error.cause
    if isinstance(cause, UserError):
        return UserError(*cause.problems)
    return RunError(error_summary(cause))
