"""Loggers: objects that receive the metrics, videos and figures of a training run, for example TensorBoard."""

from bestiary.loggers.base import LogContext, Logger
from bestiary.loggers.mlflow_logger import MlflowLogger
from bestiary.loggers.tensorboard_logger import TensorBoardLogger
from bestiary.loggers.trackio_logger import TrackioLogger
from bestiary.loggers.wandb_logger import WandbLogger

__all__ = ["LOGGERS", "LogContext", "Logger"]

# The name `csv` is also accepted. It stands for the tables of the run folder, which are always written.
LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}
