"""Logger that sends data to Weights & Biases (W&B)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.loggers.base import DEFAULT_PROJECT, PROJECT_HELP, LogContext, Logger, persistent_id
from bestiary.utils import local_config
from bestiary.utils.options import option


class WandbLogger(Logger):
    """Weights & Biases, online or offline.

    W&B reads the API key and the mode (for example `WANDB_MODE=offline`) from its own environment variables and files.
    """

    package = "wandb"
    install = "pip install 'bestiary[wandb]'"

    @dataclass(frozen=True)
    class Options:
        """Options of the logger."""

        project: str = option(DEFAULT_PROJECT, PROJECT_HELP)

    def __init__(self, context: LogContext, options: Options):
        import wandb

        with local_config.hidden(local_config.WANDB_FILE):
            wandb.setup()  # reads the settings files; `init` does not read them again
        self.wandb = wandb
        # By default, W&B runs git in the working directory. Files in this directory may come from another person.
        settings = wandb.Settings(
            console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, silent=True
        )
        self.run = wandb.init(
            project=options.project,
            name=context.name,
            id=persistent_id(context.folder / "wandb_id.txt"),
            group=context.group,
            config=context.config,
            dir=str(context.folder),
            resume="allow",
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row)

    def log_video(self, name: str, path: Path, step: int) -> None:
        self._log_media(name, self.wandb.Video(str(path), format="gif"), step)

    def log_figure(self, name: str, path: Path, step: int) -> None:
        self._log_media(name, self.wandb.Image(str(path)), step)

    def close(self) -> None:
        self.run.finish()

    def _log_media(self, name: str, media: Any, step: int) -> None:
        self.run.log({"step": step, name: media})
