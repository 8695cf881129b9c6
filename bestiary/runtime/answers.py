"""What Ray is to answer, and what is then to be done; and its errors in a line of ours.

Ray says in many ways that a process is no more (`RayActorError`, `OutOfMemoryError`, `NodeDiedError` ...). So every `RayError`
says so, but for two: `RayTaskError`, by which a process tells what went wrong in it, and `ObjectLostError`, which is about
what one process left and another was to have.
"""

import time
from collections.abc import Callable
from typing import Any

from bestiary.errors import RunError, UserError


class Answers:
    """References that are waited for, each with what is to be done when it has come."""

    def __init__(self, ray: Any):
        self.ray = ray
        self.awaited: dict[Any, Callable[[Any], None]] = {}

    def expect(self, reference: Any, then: Callable[[Any], None]) -> None:
        self.awaited[reference] = then

    def hear(self, patience: float = 0.5) -> None:
        """Wait until something has come, or for so many seconds, and see to all that has."""
        if not (waiting := list(self.awaited)):
            return time.sleep(0.01)
        some, _ = self.ray.wait(waiting, num_returns=1, timeout=patience)
        if some:
            some, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in some:
            self.awaited.pop(reference)(reference)


def first_line(error: BaseException) -> str:
    """An error of Ray's, or a cause of one, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if isinstance(error, RunError | UserError) or lines == [] else f"{type(error).__name__}: {lines[0]}"


def plain(error: Any) -> Exception:
    """A mistake or a failure of ours, out of Ray's wrapping."""
    cause = error.cause
    if isinstance(cause, UserError):
        return UserError(*cause.problems)
    return RunError(first_line(cause))
