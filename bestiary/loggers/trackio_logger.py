"""Logger that writes the database of Trackio."""

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.loggers.base import DEFAULT_PROJECT, PROJECT_HELP, LogContext, Logger, persistent_id
from bestiary.utils.options import option


class TrackioLogger(Logger):
    """Trackio, on this machine or in a Hugging Face Space.

    Trackio reads the address of a Space or server from its own environment variables, for example `TRACKIO_SPACE_ID`.
    By default it writes a database in the home folder (`TRACKIO_DIR`).
    """

    package = "trackio"
    install = "see docs/runs.md#loggers"

    @dataclass(frozen=True)
    class Options:
        """Options of the logger."""

        project: str = option(DEFAULT_PROJECT, PROJECT_HELP)

    def __init__(self, context: LogContext, options: Options):
        with _quiet():
            import trackio

            self.trackio = trackio
            self.run = trackio.init(
                project=options.project,
                # Trackio continues the run with this name. Several run folders may have the same name.
                name=f"{context.name}-{persistent_id(context.folder / 'trackio_id.txt')}",
                group=context.group,
                config=context.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, row: dict[str, float]) -> None:
        known = {name: value for name, value in row.items() if name != "step" and not math.isnan(value)}
        self.run.log(known, step=int(row["step"]))

    def log_video(self, name: str, path: Path, step: int) -> None:
        self._log_media(name, self.trackio.Video(str(path)), step)

    def log_figure(self, name: str, path: Path, step: int) -> None:
        self._log_media(name, self.trackio.Image(str(path)), step)

    def close(self) -> None:
        with _quiet():
            self.trackio.finish()

    def _log_media(self, name: str, media: Any, step: int) -> None:
        self.run.log({name: media}, step=step)


@contextlib.contextmanager
def _quiet() -> Any:
    """Context in which the output of Trackio is discarded, because Trackio prints several lines per run."""
    with open(os.devnull, "w") as discarded, contextlib.redirect_stdout(discarded):
        yield
