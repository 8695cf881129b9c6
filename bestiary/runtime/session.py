"""A training session: everything around the loop that is not learning: rows, progress, checkpoints, stopping."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np
import torch

from bestiary.config import Config
from bestiary.console import note, warn
from bestiary.errors import RunError
from bestiary.rollout import Arrays, Episode
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.runs.loggers import make_loggers
from bestiary.runs.tables import Table
from bestiary.runtime.interrupts import Interrupts
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import bound_by
from bestiary.runtime.progress import TrainingProgress

FAILED_SAVES = 3  # in a row, before a run whose disk refuses to write stops


class Session:
    """Watches the learning of a run: logs what it reports, saves it, and says when to stop."""

    def __init__(
        self,
        run: Run,
        config: Config,
        learner: Learner,
        frames_per_step: int,
        save_actor: Callable[[], Arrays],
        past: dict[str, Any] | None = None,
    ):
        """`save_actor` gives what of the actors a checkpoint keeps; `past` is the state.json of the one gone on from."""
        self.run, self.config, self.learner = run, config, learner
        self.frames_per_step, self.save_actor = frames_per_step, save_actor
        past = past or {"rows": {"metrics": 0, "episodes": 0}, "seconds": 0.0, "recent": [], "games": 0, "logged": 0}
        self.metrics = Table(run.path / "metrics.csv", past["rows"]["metrics"])
        self.episodes = Table(run.path / "episodes.csv", past["rows"]["episodes"])
        self.recent: deque[tuple[float, int]] = deque(map(tuple, past["recent"]), maxlen=100)  # return, length of games
        self.games, self.logged, self.seconds_before = past["games"], past["logged"], past["seconds"]
        self.interval: list[dict[str, float]] = past.get("interval", [])  # metrics of the updates since the last row
        self.loggers = make_loggers(config, run.path, learner.steps)
        self.interrupts = Interrupts()
        self.progress = TrainingProgress(self.total, config.label())
        self.started = self.saved_at = time.monotonic()
        self.speed = deque([(self.started, learner.steps)], maxlen=50)
        self.saved_steps = self.recorded = learner.steps
        self.failed_saves = 0
        self.complaints: set[str] = set()  # already made

    @property
    def total(self) -> int:
        assert self.config.training.steps is not None
        return self.config.training.steps

    @property
    def done(self) -> bool:
        return self.learner.steps >= self.total or self.interrupts.received is not None

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def record(
        self, metrics: list[dict[str, float]], episodes: list[Episode], load: dict[str, float] | None = None
    ) -> None:
        """Take in what the updates since the last call reported, the episodes that ended meanwhile, and who waited for whom."""
        metrics = [{**m, **(load or {})} for m in metrics]
        for episode in episodes:
            episode.step += self.recorded
        self.recorded, self.interval = self.learner.steps, self.interval + metrics
        games = [e for e in episodes if e.game_over]
        self.recent.extend((e.game_return, e.game_length) for e in games)
        self.games += len(games)
        self.speed.append((time.monotonic(), self.learner.steps))
        try:
            self.episodes.write([_episode_row(e) for e in episodes])
            if self.learner.steps // self.config.training.log_every > self.logged:
                self.logged = self.learner.steps // self.config.training.log_every
                self._write_row()
        except OSError as error:
            self._complain("rows of metrics.csv and episodes.csv are waiting", error)
        bound = "{}: {}".format(*bound_by(load)) if load else ""
        self.progress.show(self.learner.steps, self.sps, self.mean_return, self.games, bound)
        self._save_if_due()

    @property
    def sps(self) -> float:
        """Steps a second over the last updates."""
        (then, before), (now, after) = self.speed[0], self.speed[-1]
        return (after - before) / (now - then) if now > then else 0.0

    @property
    def mean_return(self) -> float:
        return float(np.mean([r for r, _ in self.recent])) if self.recent else float("nan")

    def _write_row(self) -> None:
        merge = {name: np.max if name.startswith("max_") else np.mean for name in self.interval[0]}
        mean = {name: float(merge[name]([m[name] for m in self.interval])) for name in merge}
        self.interval = []
        lengths = [length for _, length in self.recent]
        row = {
            "step": self.learner.steps,
            "frames": self.learner.steps * self.frames_per_step,
            "seconds": round(self.seconds, 3),
            "sps": round(self.sps, 1),
            "games": self.games,
            "return": self.mean_return,
            "game_length": float(np.mean(lengths)) if lengths else float("nan"),
            "updates": self.learner.version,
            **mean,
            "skipped": self.learner.skipped,
        }
        for logger in self.loggers:
            logger.log(row)
        self.metrics.write([row])

    def _save_if_due(self) -> None:
        every, minutes = self.config.training.save_every, self.config.training.save_minutes
        rung = every and self.learner.steps // every > self.saved_steps // every
        if (rung or time.monotonic() - self.saved_at > 60 * minutes) and not self.learner.skipped_in_a_row:
            self.save()

    def save(self) -> None:
        """Write a checkpoint; where the disk refuses, go on with the old one and try again later."""
        if not all(bool(torch.isfinite(weights).all()) for weights in self.learner.parameters):
            raise RunError(
                f"the weights at step {self.learner.steps} are not finite; they are not saved. Try a smaller --lr"
            )
        try:
            self.metrics.write([])
            self.episodes.write([])
            state = {
                **self.learner.counters(),
                "seconds": self.seconds,
                "rows": {"metrics": self.metrics.rows, "episodes": self.episodes.rows},
                "recent": list(self.recent),
                "games": self.games,
                "logged": self.logged,
                "interval": self.interval,
                "config": self.config.tables(),
            }
            folder = self.run.path / "checkpoints"
            checkpoints.write_checkpoint(folder, self.learner.steps, self.learner.save(), self.save_actor(), state)
            checkpoints.remove_old(folder, self.config.training.save_every)
            self.failed_saves = 0
            self.saved_steps = self.learner.steps
        except OSError as error:
            self.failed_saves += 1
            self._complain(f"the checkpoint at step {self.learner.steps} was not saved", error)
            if self.failed_saves >= FAILED_SAVES:
                raise RunError(
                    f"{self.failed_saves} saves in a row failed ({error.strerror or error}); stopping"
                ) from error
        finally:
            self.saved_at = time.monotonic()

    def _complain(self, what: str, error: OSError) -> None:
        if what not in self.complaints:
            self.complaints.add(what)
            warn(f"{error.strerror or error}: {what}; training goes on")

    def __enter__(self) -> "Session":
        self.interrupts.__enter__()
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave with a checkpoint of where the run is, unless something went wrong: then the last good one stands."""
        try:
            if error is None:
                if self.learner.steps >= self.total and self.interval:
                    self._write_row()  # what the last interval, cut short by the end, had to say
                self.progress.show(self.learner.steps, self.sps, self.mean_return, self.games, force=True)
                if self.saved_steps != self.learner.steps or not self.run.checkpoints:
                    self.save()
                    if self.failed_saves:
                        raise RunError(
                            f"the last state of {self.run.path} could not be saved; the checkpoint before it stands"
                        )
        finally:
            self.progress.__exit__()
            self.interrupts.__exit__()
            for logger in self.loggers:
                logger.close()


def _episode_row(episode: Episode) -> dict[str, Any]:
    row = asdict(episode)
    measures = row.pop("measures")
    row = {"return" if key == "ret" else key: value for key, value in row.items()}
    row["game_over"] = int(row["game_over"])
    return {**row, **measures}


def resume_note(run: Run) -> None:
    note(f"to go on: bestiary resume {run.path}")
