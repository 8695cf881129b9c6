"""Where the time goes: who waits for whom, what a run is bound by, and what stalls."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bestiary.console import warn


class Clock:
    """What somebody who plays is doing: the phase, since when, and the seconds in each phase so far."""

    def __init__(self, name: str):
        self.name = name
        self.phase, self.since = "starting", time.monotonic()
        self.seconds = dict.fromkeys(("starting", "environment", "inference", "waiting"), 0.0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase, self.since = phase, time.monotonic()
        yield
        self.seconds[phase] += time.monotonic() - self.since


class Load:
    """Who waits for whom: shares of the time since the last look, and what to tell the user when nothing moves."""

    def __init__(self, crew: Sequence[Clock]):
        self.crew = crew
        self.waited = 0.0
        self.last = self._seconds()

    def _seconds(self) -> dict[str, float]:
        phases = ("environment", "inference", "waiting")
        totals = {phase: sum(clock.seconds[phase] for clock in self.crew) / len(self.crew) for phase in phases}
        return {"clock": time.monotonic(), "learner": self.waited, **totals}

    @contextmanager
    def learner_waits(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.waited += time.monotonic() - start

    def shares(self) -> dict[str, float]:
        """actor_*: what the actor threads did; learner_wait: how long the learner had nothing to learn from."""
        now = self._seconds()
        span = {name: now[name] - self.last[name] for name in now}
        self.last = now
        clock = max(span["clock"], 1e-9)
        return {
            "actor_environment": span["environment"] / clock,
            "actor_inference": span["inference"] / clock,
            "actor_wait": span["waiting"] / clock,
            "learner_wait": span["learner"] / clock,
        }

    def stalled(self, seconds: float) -> None:
        now = time.monotonic()
        for clock in self.crew:
            warn(
                f"no rollout for {seconds:.0f} s: {clock.name} has been in {clock.phase} for {now - clock.since:.0f} s"
            )


def bound_by(shares: dict[str, float], larger_batches: str) -> tuple[str, str]:
    """What limits the run, and what would help; `larger_batches`: what makes an update's batches larger."""
    if shares["actor_wait"] > shares["learner_wait"]:
        return "learner", f"larger batches ({larger_batches}), a smaller net or a GPU (--device cuda) would help"
    if shares["actor_environment"] > shares["actor_inference"]:
        return "environment", "more pools to step in turn (--pools) or more cores would help"
    return "inference", "more environments at once (--num-envs), a smaller net or a GPU (--device cuda) would help"
