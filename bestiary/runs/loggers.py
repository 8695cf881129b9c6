"""TensorBoard and Weights & Biases: the rows of metrics.csv once more, for those who asked.

Neither may ever stop a training: what goes wrong there is one warning, and metrics.csv is complete without them.
"""

import hashlib
import uuid
from pathlib import Path
from typing import Any, Protocol

from bestiary.config import Config
from bestiary.console import warn
from bestiary.errors import UserError


class Logger(Protocol):
    def log(self, row: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, int(row["step"]))

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """Keys and mode (`WANDB_MODE=offline`) come from W&B's own environment variables and files, never from flags."""

    def __init__(self, folder: Path, project: str, name: str, config: Config):
        import wandb

        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True)
        self.run = wandb.init(
            project=project,
            name=name,
            id=_kept_id(folder / "wandb-id.txt"),
            group=f"{config.label()}-{hashlib.sha256(config.group().encode()).hexdigest()[:8]}",
            config=config.tables(),
            dir=str(folder),
            resume="allow",
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row)

    def close(self) -> None:
        self.run.finish()


def _kept_id(path: Path) -> str:
    """W&B's id of a run, the same when it is resumed; a folder's name would not do, for others have such folders too."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()


class Guarded:
    """A logger that gives up with one warning instead of raising."""

    def __init__(self, logger: Logger, name: str):
        self.logger: Logger | None = logger
        self.name = name

    def log(self, row: dict[str, float]) -> None:
        self._try("log", row)

    def close(self) -> None:
        self._try("close")

    def _try(self, method: str, *args: Any) -> None:
        if self.logger is None:
            return
        try:
            getattr(self.logger, method)(*args)
        except Exception as error:
            warn(f"{self.name} stopped logging: {type(error).__name__}: {error}; metrics.csv goes on")
            self.logger = None


def check_loggers(config: Config) -> None:
    """Refuse, before any work, a logger that is not installed."""
    problems = []
    for module, asked in (("tensorboard", config.training.tensorboard), ("wandb", config.training.wandb)):
        if asked:
            try:
                __import__(module)
            except ImportError:
                problems.append(f"--{module}: {module} is not installed; run: pip install 'bestiary[{module}]'")
    if problems:
        raise UserError(*problems)


def make_loggers(config: Config, run_path: Path, first_step: int) -> list[Guarded]:
    wanted: list[tuple[str, Any]] = []
    if config.training.tensorboard:
        wanted.append(("tensorboard", lambda: TensorBoardLogger(run_path / "tensorboard", first_step)))
    if config.training.wandb:
        project, title = config.training.wandb, run_path.resolve().name
        wanted.append(("wandb", lambda: WandbLogger(run_path, project, title, config)))
    loggers = []
    for name, make in wanted:
        try:
            loggers.append(Guarded(make(), name))
        except Exception as error:
            warn(f"{name} is not available: {type(error).__name__}: {error}; metrics.csv has everything")
    return loggers
