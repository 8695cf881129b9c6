"""A training session: everything around the loop that is not learning: rows, progress, checkpoints, stopping."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np
import torch

from bestiary.analysis.games import Stopped
from bestiary.config import Config
from bestiary.console import note, plain_number, warn
from bestiary.envs.pool import Pool
from bestiary.errors import RunError
from bestiary.rollout import Arrays, Episode
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.runs.loggers import make_loggers
from bestiary.runs.tables import Table
from bestiary.runtime.alarm import Alarm
from bestiary.runtime.episodes import Played, return_name, short_name
from bestiary.runtime.interrupts import Interrupts
from bestiary.runtime.learner import Learner
from bestiary.runtime.load import bound_by
from bestiary.runtime.progress import TrainingProgress
from bestiary.runtime.validation import Validator

ENOUGH_GAMES = 20  # whose mean return says how good a checkpoint is
FAILED_SAVES = 3  # in a row, before a run whose disk refuses to write stops


class Session:
    """Watches the learning of a run: logs what it reports, saves it, and says when to stop."""

    def __init__(
        self,
        run: Run,
        config: Config,
        learner: Learner,
        pool: Pool,
        save_actor: Callable[[], Arrays],
        past: dict[str, Any] | None = None,
        validator: Validator | None = None,
    ):
        """`save_actor` gives what of the actors a checkpoint keeps; `past` is the state.json of the one gone on from."""
        self.run, self.config, self.learner = run, config, learner
        self.frames_per_step, self.save_actor = pool.frames_per_step, save_actor
        past = past or {"rows": {}, "seconds": 0.0, "tasks": {}, "logged": 0, "best": None}
        self.metrics, self.episodes, self.validations = (
            Table(run.path / f"{name}.csv", past["rows"].get(name, 0)) for name in ("metrics", "episodes", "validation")
        )
        self.validator, self.best = validator, past.get("best")  # the best score so far
        self.validated_at = past.get("validated_at", learner.steps)
        self.channels = config.rewards.channels
        self.tasks = {name: Played(**past["tasks"].get(name, {}), channels=self.channels) for name in pool.tasks}
        self.alarms = self._make_alarms(past.get("alarms", {}))
        self.bests: dict[str, float] = past.get("bests", {})  # mean return of the best games so far, trained and true
        self.judged = past.get("judged", 0)  # fiftieths of the run after which that was asked
        self.logged, self.seconds_before = past["logged"], past["seconds"]
        self.interval: list[dict[str, float]] = past.get("interval", [])  # metrics of the updates since the last row
        self.loggers = make_loggers(config, run.path, learner.steps)
        self.interrupts = Interrupts()
        self.counts: dict[str, int] = past.get("counts", {})  # columns of the runtime's own, so far
        self.enough = False  # set by whoever wants the training to end early, such as the bench
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
        return self.enough or self.learner.steps >= self.total or self.interrupts.received is not None

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
        for episode in episodes:
            if episode.game_over:
                self.tasks[episode.task].add(episode)
                self._listen(episode)
        self.speed.append((time.monotonic(), self.learner.steps))
        try:
            self.episodes.write([_episode_row(e, self.channels) for e in episodes])
            if self.learner.steps // self.config.training.log_every > self.logged:
                self.logged = self.learner.steps // self.config.training.log_every
                self._write_row()
        except OSError as error:
            self._complain("rows of metrics.csv and episodes.csv are waiting", error)
        bound = "{}: {}".format(*bound_by(load, self.learner.algorithm.larger_batches)) if load else ""
        self.progress.show(self.learner.steps, self.sps, self.earned(), bound)

    def attend(self) -> None:
        """Validate and save, where it is time to. The learner must be up to date now."""
        if self._validation_due:
            self._validate()
        if self._judgement_due:
            self._keep_the_best()
        if self._save_due:
            self.save()

    @property
    def due(self) -> bool:
        """Whether `attend` would do anything."""
        return self._validation_due or self._judgement_due or self._save_due

    @property
    def sps(self) -> float:
        """Steps a second over the last updates."""
        (then, before), (now, after) = self.speed[0], self.speed[-1]
        return (after - before) / (now - then) if now > then else 0.0

    def earned(self) -> str:
        """The mean return of the last games, for each task: games of different scales have no common mean. Where it is not the
        environment's own reward that is trained on, the true one beside it."""
        games = sum(task.games for task in self.tasks.values())
        if games == 0:
            return "no game finished yet"
        if len(self.tasks) == 1:
            task = next(iter(self.tasks.values()))
            true = " true ".join(["", *(f"{mean:.2f}" for mean in task.true_returns().values())])
            return f"{'trained' if self.channels else 'return'} {task.mean_return:.2f}{true} ({games} games)"
        known = {
            name: [task.mean_return, *task.true_returns().values()] for name, task in self.tasks.items() if task.games
        }
        words = {name: " true ".join(plain_number(mean) for mean in means) for name, means in known.items()}
        return f"{games} games: " + ", ".join(f"{short_name(name)} {text}" for name, text in words.items())

    def _write_row(self) -> None:
        merge = {name: np.max if name.startswith("max_") else np.mean for name in self.interval[0]}
        if len(self.tasks) > 1:  # games of different scales have no common mean
            merge = {name: how for name, how in merge.items() if name not in ("value", "learnt_reward")}
        mean = {name: float(merge[name]([m[name] for m in self.interval])) for name in merge}
        self.interval = []
        row = {
            "step": self.learner.steps,
            "frames": self.learner.steps * self.frames_per_step,
            "seconds": round(self.seconds, 3),
            "sps": round(self.sps, 1),
            "games": sum(task.games for task in self.tasks.values()),
            **self._task_columns(),
            "updates": self.learner.version,
            **mean,
            "skipped": self.learner.skipped,
            **self.counts,
        }
        for logger in self.loggers:
            logger.log(row)
        self.metrics.write([row])

    def _task_columns(self) -> dict[str, float]:
        """return and game_length; of several tasks, TASK/return and so on; of a critic that normalises, TASK/mu, TASK/sigma."""
        columns: dict[str, float] = {}
        for name, task in self.tasks.items():
            if self.channels:
                place = "" if len(self.tasks) == 1 else f"{name}/"
                returns = {"trained_return": task.mean_return, **task.true_returns()}
                columns |= {place + column: value for column, value in returns.items()}
                alarms = [alarm for (task_, _), alarm in self.alarms.items() if task_ == name]
                columns |= {f"{place}alarms": sum(alarm.fired for alarm in alarms)} if alarms else {}
            if len(self.tasks) == 1:
                columns |= {"return": task.mean_return, "game_length": task.mean_length}
            else:
                columns[f"{name}/steps"] = self.learner.steps // len(self.tasks)  # each has as many environments
                columns[f"{name}/games"] = task.games
                columns |= {f"{name}/return": task.mean_return, f"{name}/game_length": task.mean_length}
        if (critic := self.learner.adaptive) is not None:
            for name, mu, sigma in zip(self.tasks, critic.mu.tolist(), critic.sigma.tolist(), strict=True):
                columns |= {f"{name}/mu": mu, f"{name}/sigma": sigma}
        return columns

    def _make_alarms(self, past: dict[str, Any]) -> dict[tuple[str, str], Alarm]:
        """One for each task and true reward."""
        training = self.config.training
        if not training.alarm_games:
            return {}
        pairs = [(task, channel) for task in self.tasks for channel in self.channels]
        state = {(task, channel): past.get(f"{task} {channel}", {}) for task, channel in pairs}
        return {pair: Alarm(training.alarm_games, training.alarm_windows, **state[pair]) for pair in pairs}

    def _listen(self, episode: Episode) -> None:
        """Let the alarms know of a game; the first time that one fires, say so."""
        for channel in self.channels if self.alarms else ():
            alarm, game = self.alarms[episode.task, channel], episode.game_measures
            if alarm.add(game["trained"], game[channel]) and alarm.fired == 1:
                warn(
                    f"alarm at step {episode.step}: over the last {len(alarm.recent)} games of {episode.task} the trained "
                    f"return rises while {return_name(channel)} falls (t {alarm.trends[0]:.1f} and {alarm.trends[1]:.1f}); "
                    "it reads the true reward, which nobody has who trains on a stand-in for it"
                )

    @property
    def _judgement_due(self) -> bool:
        """After each fiftieth of the run, where one task has a true reward beside the trained one."""
        judged = self.channels and len(self.tasks) == 1 and not self.learner.skipped_in_a_row
        return bool(judged) and self._fiftieth != self.judged

    @property
    def _fiftieth(self) -> int:
        return 50 * self.learner.steps // self.total

    def _keep_the_best(self) -> None:
        """Keep the checkpoint if its last games were the best so far, trained or true."""
        self.judged, played = self._fiftieth, next(iter(self.tasks.values()))
        if len(played.recent) < ENOUGH_GAMES:
            return
        means = {"trained": played.mean_return, "true": played.true_returns()["true_return"]}
        better = [name for name, mean in means.items() if name not in self.bests or mean > self.bests[name]]
        if better:
            self.bests |= {name: means[name] for name in better}
            self.save()
        for name in better:
            if self.saved_steps == self.learner.steps:
                checkpoints.link(self.run.path / "checkpoints" / f"best-{name}", f"{self.saved_steps:012d}")

    @property
    def _validation_due(self) -> bool:
        """At the first update at or after each multiple of --valid-every, and at the end."""
        if self.validator is None:
            return False
        now, before, every = self.learner.steps, self.validated_at, self.validator.every
        return now // every > before // every or before < self.total <= now

    def _validate(self) -> None:
        assert self.validator is not None
        validator, now = self.validator, self.learner.steps
        try:
            rows, score = validator.validate(self.learner.agent, now, lambda: self.interrupts.received is not None)
        except Stopped:
            later = (
                "the resumed run makes up for it"
                if now < self.total
                else "it was the last one: bestiary eval plays such games"
            )
            return note(f"validation cut off; {later}")
        finally:
            self.speed.clear()  # the time that it took was not training's
            self.speed.append((time.monotonic(), now))
        self.validated_at = now
        try:
            self.validations.write(rows)
        except OSError as error:
            self._complain("rows of validation.csv are waiting", error)
        note("validation: " + ", ".join(f"{short_name(row['task'])} {plain_number(row['return'])}" for row in rows))
        if score is not None and (self.best is None or score > self.best):
            before, self.best = self.best, score
            self.save()
            if self.saved_steps != now:
                self.best = before  # it was not kept
            else:
                checkpoints.link(self.run.path / "checkpoints" / "best", f"{now:012d}")

    @property
    def _save_due(self) -> bool:
        every, minutes = self.config.training.save_every, self.config.training.save_minutes
        rung = every and self.learner.steps // every > self.saved_steps // every
        rung = rung or any(self.saved_steps < mark <= self.learner.steps for mark in self.config.training.keep)
        return bool(rung or time.monotonic() - self.saved_at > 60 * minutes) and not self.learner.skipped_in_a_row

    def save(self) -> None:
        """Write a checkpoint; where the disk refuses, go on with the old one and try again later."""
        if not all(bool(torch.isfinite(weights).all()) for weights in self.learner.parameters):
            raise RunError(
                f"the weights at step {self.learner.steps} are not finite; they are not saved. Try a smaller --lr"
            )
        try:
            self.metrics.write([])
            self.episodes.write([])
            self.validations.write([])
            state = {
                **self.learner.counters(),
                "seconds": self.seconds,
                "rows": {
                    "metrics": self.metrics.rows,
                    "episodes": self.episodes.rows,
                    "validation": self.validations.rows,
                },
                "best": self.best,
                "bests": self.bests,
                "judged": self.judged,
                "alarms": {f"{task} {channel}": alarm.state() for (task, channel), alarm in self.alarms.items()},
                "validated_at": self.validated_at,
                "tasks": {
                    name: {"games": task.games, "recent": list(task.recent)} for name, task in self.tasks.items()
                },
                "logged": self.logged,
                "interval": self.interval,
                "counts": self.counts,
                "config": self.config.tables(),
            }
            folder = self.run.path / "checkpoints"
            checkpoints.write_checkpoint(folder, self.learner.steps, self.learner.save(), self.save_actor(), state)
            checkpoints.remove_old(folder, self.config.training.save_every, self.config.training.keep)
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
        if 0 in self.config.training.keep and not self.run.checkpoints:
            self.save()  # what it begins with
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave with a checkpoint of where the run is, unless something went wrong: then the last good one stands."""
        try:
            if error is None:
                if self.learner.steps >= self.total and self.interval:
                    self._write_row()  # what the last interval, cut short by the end, had to say
                self.progress.show(self.learner.steps, self.sps, self.earned(), force=True)
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


def _episode_row(episode: Episode, channels: Sequence[str] = ()) -> dict[str, Any]:
    row = asdict(episode)
    measures, game = row.pop("measures"), row.pop("game_measures")
    row = {"return" if key == "ret" else key: value for key, value in row.items()}
    row["game_over"] = int(row["game_over"])
    rewards = ("trained", *channels) if channels else ()
    row |= {return_name(name): measures.pop(name) for name in rewards}
    return {**row, **{f"game_{return_name(name)}": game[name] for name in rewards}, **measures}


def resume_note(run: Run) -> None:
    note(f"to go on: bestiary resume {run.path}")
