"""Measurement of how actors and learner spend their time, to find the bottleneck of a run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bestiary.utils.console import warn


class PhaseTimer:
    """Measures how long an actor spends in each phase.

    The phases are: starting; environment (wait for the result of a step); inference (compute actions); waiting (wait
    until the learner allows the next rollout).
    """

    def __init__(self, name: str):
        self.name = name
        self.phase = "starting"
        self.phase_start = time.monotonic()
        self.seconds = dict.fromkeys(("starting", "environment", "inference", "waiting"), 0.0)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure the duration of the `with` block and add it to the time of a phase."""
        self.phase = phase
        self.phase_start = time.monotonic()
        yield
        self.seconds[phase] += time.monotonic() - self.phase_start


class Utilisation:
    """Computes the fraction of time that actors spend in each phase, and that the learner waits for rollouts."""

    def __init__(self, timers: Sequence[PhaseTimer]):
        self.timers = timers
        self.learner_wait_seconds = 0.0
        self.last_totals = self._totals()

    def _totals(self) -> dict[str, float]:
        """Return the current time, the learner's total waiting time, and the mean time that actors spent in each phase.

        All values are in seconds.
        """
        phases = ("environment", "inference", "waiting")
        means = {phase: sum(timer.seconds[phase] for timer in self.timers) / len(self.timers) for phase in phases}
        return {"time": time.monotonic(), "learner": self.learner_wait_seconds, **means}

    @contextmanager
    def measure_learner_wait(self) -> Iterator[None]:
        """Measure the duration of the `with` block and add it to the learner's waiting time."""
        start = time.monotonic()
        yield
        self.learner_wait_seconds += time.monotonic() - start

    @property
    def seconds_since_last_call(self) -> float:
        """Return the seconds since the last call of `time_fractions`."""
        return time.monotonic() - self.last_totals["time"]

    def time_fractions(self) -> dict[str, float]:
        """Return how the time since the last call was spent, as fractions of that time.

            actor_environment   an actor waited for environments
            actor_inference     an actor computed actions
            actor_wait          an actor waited for the learner
            learner_wait        the learner waited for rollouts

        The first three fractions are means over the actors.
        """
        totals = self._totals()
        elapsed = {name: totals[name] - self.last_totals[name] for name in totals}
        self.last_totals = totals
        seconds = max(elapsed["time"], 1e-9)
        return {
            "actor_environment": elapsed["environment"] / seconds,
            "actor_inference": elapsed["inference"] / seconds,
            "actor_wait": elapsed["waiting"] / seconds,
            "learner_wait": elapsed["learner"] / seconds,
        }

    def warn_stalled(self, seconds: float) -> None:
        """Warn the user that no rollout has arrived for some seconds, and print the phase of each actor."""
        now = time.monotonic()
        for timer in self.timers:
            in_phase = now - timer.phase_start
            warn(
                f"no rollout has arrived for {seconds:.0f} s: {timer.name} has been in phase {timer.phase} for "
                f"{in_phase:.0f} s"
            )


def find_bottleneck(fractions: dict[str, float], batch_size_hint: str) -> tuple[str, str]:
    """Return the bottleneck of a run (learner, environment or inference) and a suggestion how to speed up the run.

    Args:
        fractions: result of `Utilisation.time_fractions`.
        batch_size_hint: what the user must change for larger batches, for example "--batch-size".
    """
    gpu = " or a GPU (--device cuda)" if torch.cuda.is_available() else ""
    if fractions["actor_wait"] > fractions["learner_wait"]:
        return "learner", f"try larger batches ({batch_size_hint}), a smaller network{gpu}"
    if fractions["actor_environment"] > fractions["actor_inference"]:
        return "environment", "try more vector environments per actor (--pools) or more CPU cores"
    return "inference", f"try more environments (--num-envs), a smaller network{gpu}"
