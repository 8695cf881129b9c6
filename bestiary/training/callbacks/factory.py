"""The callbacks of a run, in the order in which the session calls them."""

from bestiary.config.config import Config
from bestiary.runs.loggers import Loggers
from bestiary.training.callbacks.base import Callback
from bestiary.training.callbacks.metrics import MetricsWriter
from bestiary.training.callbacks.progress import ProgressDisplay
from bestiary.training.callbacks.reward_monitor import RewardMonitor
from bestiary.training.callbacks.user_callback import make_user_callbacks
from bestiary.training.callbacks.validation import Validation
from bestiary.training.callbacks.video import VideoRecorder
from bestiary.training.validation import make_validator


def make_callbacks(config: Config) -> list[Callback]:
    """Return the callbacks of a run, except the checkpoint manager, which the session adds.

    Users' callbacks are called before the validation, because the validation may save a checkpoint. This checkpoint
    must contain the state of the users' callbacks after the current update.
    """
    loggers = Loggers()
    reward_monitor = RewardMonitor()
    validator = make_validator(config)
    return [
        reward_monitor,
        MetricsWriter(reward_monitor, loggers),
        *make_user_callbacks(config),
        ProgressDisplay(),
        *([VideoRecorder(loggers)] if config.training.video_every or config.training.video_at_end else []),
        *([Validation(validator, loggers)] if validator is not None else []),
    ]
