"""Loggers that send the rows of metrics.csv to TensorBoard and Weights & Biases (W&B).

A logger never stops the training. If it fails, one warning is printed, and metrics.csv is still written completely.
"""

import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bestiary.config.config import Config
from bestiary.utils import local_config, safe_files
from bestiary.utils.console import warn
from bestiary.utils.errors import UserError


class Logger(Protocol):
    """An object that receives each row of metrics.csv."""

    def log(self, row: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Logger that writes TensorBoard event files."""

    def __init__(self, folder: Path, first_step: int):
        """Open the event files.

        A resumed run logs the steps after `first_step` again. Therefore events of earlier sessions are hidden if their
        step is at least `first_step`.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Logger that sends rows to W&B.

    W&B reads the API key and the mode (for example `WANDB_MODE=offline`) from its own environment variables and files.
    """

    def __init__(self, folder: Path, project: str, name: str, config: Config):
        import wandb

        with local_config.hidden(local_config.WANDB_FILE):
            wandb.setup()  # reads the settings files; `init` does not read them again
        # By default, W&B runs git in the working directory. Files in this directory may come from another person.
        settings = wandb.Settings(
            console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, silent=True
        )
        self.run = wandb.init(
            project=project,
            name=name,
            id=_persistent_id(folder / "wandb_id.txt"),
            group=f"{config.label()}-{hashlib.sha256(config.group_key().encode()).hexdigest()[:8]}",
            config=config.tables(),
            dir=str(folder.absolute()),
            resume="allow",
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row)

    def close(self) -> None:
        self.run.finish()


def _persistent_id(path: Path) -> str:
    """Return the W&B ID that is stored in a file. If the file does not exist, create it with a random ID.

    A resumed run reads its ID from the file. The name of the run folder is not used as ID, because several run folders
    may have the same name.
    """
    if not os.path.lexists(path):
        safe_files.write_text(path, uuid.uuid4().hex[:12])
    return safe_files.read_text(path, max_bytes=1000).strip()


class SafeLogger:
    """Wrapper that calls a logger. When the logger raises an exception, the wrapper warns once and stops logging."""

    def __init__(self, logger: Logger, name: str):
        self.logger: Logger | None = logger
        self.name = name

    def log(self, row: dict[str, float]) -> None:
        self._call("log", row)

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *args: Any) -> None:
        if self.logger is None:
            return
        try:
            getattr(self.logger, method)(*args)
        except Exception as error:
            warn(f"{self.name} stopped logging: {type(error).__name__}: {error}; metrics.csv is still written")
            self.logger = None


def check_loggers(config: Config) -> None:
    """Raise UserError if the package of a requested logger is not installed."""
    problems = []
    for module, requested in (("tensorboard", config.training.tensorboard), ("wandb", config.training.wandb)):
        if requested:
            try:
                __import__(module)
            except ImportError:
                problems.append(f"--{module}: {module} is not installed; run: pip install 'bestiary[{module}]'")
    if problems:
        raise UserError(*problems)


def make_loggers(config: Config, run_path: Path, first_step: int) -> list[SafeLogger]:
    """Create and return the requested loggers. Leave out, with a warning, a logger that cannot be created."""
    factories: dict[str, Callable[[], Logger]] = {}
    if config.training.tensorboard:
        factories["tensorboard"] = lambda: TensorBoardLogger(run_path / "tensorboard", first_step)
    if config.training.wandb:
        project = config.training.wandb
        title = run_path.resolve().name
        factories["wandb"] = lambda: WandbLogger(run_path, project, title, config)
    loggers = []
    for name, make_logger in factories.items():
        try:
            loggers.append(SafeLogger(make_logger(), name))
        except Exception as error:
            warn(f"{name} is not available: {type(error).__name__}: {error}; metrics.csv is still written")
    return loggers
