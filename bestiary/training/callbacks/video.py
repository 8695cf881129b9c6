"""Callback that records videos of the agent during training (`--video-every`) and at its end (`--video-at-end`)."""

from typing import Any

from bestiary.envs.multitask import task_name
from bestiary.evaluation.video import record_agent
from bestiary.runs.loggers import Loggers
from bestiary.training.callbacks.base import Callback
from bestiary.training.session import Session
from bestiary.utils import plugins
from bestiary.utils.console import note, warn

SEED = 0  # the default seed of `bestiary video`, so that the command records the same games


class VideoRecorder(Callback):
    """Records one game of each task with a copy of the agent, in an environment of its own.

    The video therefore has no effect on the training. If a recording fails, a warning is printed.

    Args:
        loggers: loggers of the run, which get the videos.
    """

    name = "video"

    def __init__(self, loggers: Loggers):
        self.loggers = loggers
        # Step of the last video; before the first video, the step at which training started.
        self.last_step: int | None = None

    def on_start(self, session: Session) -> None:
        if self.last_step is None:
            self.last_step = session.learner.steps

    def is_due(self, session: Session) -> bool:
        """Return whether, since the last video, training has passed a multiple of --video-every or has ended."""
        assert self.last_step is not None
        now, before, interval = session.learner.steps, self.last_step, session.config.training.video_every
        return bool(interval and now // interval > before // interval) or before < session.total_steps <= now

    def on_due(self, session: Session) -> None:
        self.last_step = session.learner.steps
        for task, env in enumerate(session.config.envs):
            try:
                path = record_agent(
                    session.run,
                    session.learner.agent,
                    session.learner.steps,
                    task=task,
                    seed=SEED,
                    should_stop=lambda: session.interrupts.received is not None,
                )
            except Exception as error:  # a full disk, or an environment that cannot be drawn
                cause = plugins.describe_error(error) or plugins.error_line(error)
                warn(f"the video of {env} at step {session.learner.steps} was not recorded: {cause}")
                continue
            if path is None:
                note("the video was interrupted")
                break
            note(f"video: {session.run.shown_path / 'videos' / path.name}")
            self.loggers.log_video(f"video/{task_name(env)}", path, session.learner.steps)
        # The time of the recording must not lower the measured training speed.
        session.clock.restart_speed(session.learner.steps)

    def save(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def load(self, state: dict[str, Any]) -> None:
        self.last_step = state["last_step"]
