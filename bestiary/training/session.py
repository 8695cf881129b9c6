"""The training session: it passes the results of training to its callbacks and decides when training stops."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from bestiary.config.config import Config
from bestiary.envs.episode_stats import TaskStats
from bestiary.rollout import Arrays, Episode
from bestiary.runs.checkpoints import abandon_later
from bestiary.runs.config_changes import FILE_NAME, find_changes, record_changes
from bestiary.runs.run import Run, write_config
from bestiary.training.callbacks.base import Callback
from bestiary.training.callbacks.checkpoints import CheckpointManager
from bestiary.training.clock import TrainingClock
from bestiary.training.interrupts import Interrupts
from bestiary.training.learner import Learner
from bestiary.utils.console import note, warn
from bestiary.utils.errors import UserError


class Session:
    """One uninterrupted part of the training of a run, from its start (or resume) until it stops.

    The callbacks of a session log, validate and save the run. After each call of `Learner.learn`, the training loop
    calls `log` and `run_due_tasks`, until `done` is true. A session is a context manager that starts and ends its
    callbacks. The last callback is always the checkpoint manager.

    Args:
        run: the run and its folder.
        config: config of the run.
        learner: the learner. The session logs and saves its steps, counters and weights.
        save_actor: function that returns the state of the actor for a checkpoint. In runtimes that do not save actors,
            it returns an empty dict.
        callbacks: callbacks in the order in which they are called.
        saved_state: content of state.json if the run is resumed from a checkpoint, or None.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        learner: Learner,
        save_actor: Callable[[], Arrays],
        callbacks: Sequence[Callback],
        saved_state: dict[str, Any] | None = None,
    ):
        state = saved_state or {"seconds": 0.0, "tasks": {}, "runtime_counters": {}, "callbacks": {}}
        self.run = run
        self.config = config
        self.learner = learner
        # Options that have changed since the checkpoint was saved. For a new run, the list is empty.
        self.config_changes = find_changes(saved_state["config"], config.tables()) if saved_state else []
        self.frames_per_step = config.interface.frames_per_step
        self.save_actor = save_actor
        # Names of the true rewards, which are logged beside the training reward. With --reward alone, the true reward
        # is the own reward of the environment. The tuple is empty if neither --reward nor --true-reward is given.
        self.channels = config.rewards.channels
        self.tasks = {  # task name -> statistics of its recent games
            name: TaskStats(
                **state["tasks"].get(name, {"waiting": config.envs_of_task(k)}),
                channels=self.channels,
            )
            for k, name in enumerate(config.interface.tasks)
        }
        self.clock = TrainingClock(state["seconds"])
        self.logged_steps = learner.steps  # step count of the learner at the last call of `log`
        self.runtime_metrics: dict[str, float] = {}  # last `runtime_metrics` passed to `log`
        # On a cluster: numbers of restarts and of dropped rollouts. In other runtimes, the dict is empty.
        self.runtime_counters: dict[str, int] = state["runtime_counters"]
        self.interrupts = Interrupts()
        self.stop_requested = False
        self.warned: set[str] = set()  # warnings that `warn_once` has printed
        self.checkpoints = CheckpointManager()
        self.callbacks = [*callbacks, self.checkpoints]
        for callback in self.callbacks:
            if callback.name in state["callbacks"]:
                try:
                    callback.load(state["callbacks"][callback.name])
                except (KeyError, TypeError, AttributeError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    raise UserError(f"state.json: the state of {callback.name} is damaged: {problem}") from error
        self.exit_stack = ExitStack()

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the whole run."""
        assert self.config.training.steps is not None
        return self.config.training.steps

    @property
    def done(self) -> bool:
        """Return whether training must stop: it has reached the last step, or a stop or a signal has been received."""
        return self.stop_requested or self.learner.steps >= self.total_steps or self.interrupts.received is not None

    # --- called by the training loop ---

    def log(
        self,
        metrics: list[dict[str, float]],
        episodes: list[Episode],
        runtime_metrics: dict[str, float] | None = None,
    ) -> None:
        """Pass the results since the last call of `log` to the callbacks.

        Args:
            metrics: metrics of each update since the last call.
            episodes: episodes that ended since the last call. In this argument, `Episode.step` counts steps since the
                last call; this method changes it to the step of the run.
            runtime_metrics: metrics of the runtime, for example the fraction of time that the learner waited. The
                serial runtime passes None.
        """
        for episode in episodes:
            episode.step += self.logged_steps
            if episode.game_over:
                self.tasks[episode.task].add(episode)
        self.logged_steps = self.learner.steps
        self.runtime_metrics = runtime_metrics or {}
        self.clock.record(self.learner.steps)
        updates = [{**update, **self.runtime_metrics} for update in metrics]
        for callback in self.callbacks:
            callback.on_update(self, updates, episodes)

    @property
    def has_due_tasks(self) -> bool:
        """Return whether `is_due` of any callback returns true, for example because a checkpoint must be saved."""
        return any(callback.is_due(self) for callback in self.callbacks)

    def run_due_tasks(self) -> None:
        """Call `on_due` of each callback whose `is_due` returns true, for example to save a checkpoint.

        On a cluster, the driver must copy the state of the remote learners into `learner` before this call.
        """
        for callback in self.callbacks:
            if callback.is_due(self):
                callback.on_due(self)

    # --- called by callbacks ---

    def request_stop(self, reason: str) -> None:
        """Print the reason, and make training stop normally (with a final checkpoint) after the current learn call."""
        if not self.stop_requested:
            note(f"training stops at step {self.learner.steps}: {reason}")
        self.stop_requested = True

    def save_checkpoint(self, *links: str) -> bool:
        """Write a checkpoint, and make the links with these names, for example `best`, point to it.

        Return whether the checkpoint was written.
        """
        return self.checkpoints.write(self, links)

    def save(self) -> dict[str, Any]:
        """Return the content of state.json, for example the learner's counters and the state of each callback."""
        return {
            **self.learner.counters(),
            "run_id": self.run.id,
            "seconds": self.clock.seconds,
            "tasks": {name: task.save() for name, task in self.tasks.items()},
            "runtime_counters": self.runtime_counters,
            "callbacks": {callback.name: callback.save() for callback in self.callbacks},
            "config": self.config.tables(),
        }

    def warn_once(self, consequence: str, error: OSError) -> None:
        """Warn the user that writing a file failed, unless a warning with the same `consequence` was printed before."""
        if consequence not in self.warned:
            self.warned.add(consequence)
            warn(f"{error.strerror or error}: {consequence}; training continues")

    # --- start and end ---

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.close)
            stack.enter_context(self.interrupts)
            for callback in self.callbacks:
                callback.on_start(self)
            # Later checkpoints are renamed and changed options are written to config.toml only now: an error before
            # this line must not change the run.
            for old_name, new_name in abandon_later(self.run.path / "checkpoints", self.learner.steps):
                note(f"checkpoint {old_name} is renamed to {new_name}")
            write_config(self.run)
            # Record the changes now, because the process may be killed before the end of training. A later session
            # could not find the changes: it compares config.toml with a checkpoint that already contains the new
            # values.
            try:
                record_changes(self.run.path, self.learner.steps, self.config_changes)
            except OSError as error:
                self.warn_once(f"changed options are not recorded in {FILE_NAME}", error)
            self.exit_stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the callbacks. After an exception nothing is saved, because the current state may be invalid."""
        with self.exit_stack:
            if error is None:
                for callback in self.callbacks:
                    callback.on_end(self)
