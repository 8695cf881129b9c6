"""Interface of loggers."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.utils import safe_files

DEFAULT_PROJECT = "bestiary"
PROJECT_HELP = "project (MLflow: experiment) to which the run belongs"


@dataclass(frozen=True)
class LogContext:
    """The run that a logger logs."""

    folder: Path  # absolute path of the run folder
    name: str  # name of the run folder
    group: str  # name of the group of runs that differ only in the seed and in options without effect on learning
    config: dict[str, Any]  # the configuration, as in config.toml: options and tables of options
    first_step: int  # step at which this session starts; a resumed run logs the steps after it again


class Logger:
    """Base class of loggers. A subclass must have `log`; the other methods do nothing by default.

    The constructor is called once per session with a `LogContext` and the options of the logger. If the logger has a
    class `Options`, the options are one object of this class; otherwise they are keyword arguments.

    All methods are called in the main thread. If a method or the constructor raises an exception, the user gets one
    warning, the logger is not used any more, and training continues.
    """

    package: str = ""  # Python package that must be installed; empty: none
    install: str = ""  # command that installs this package

    def log(self, row: dict[str, float]) -> None:
        """Log numbers by name. Each row has the key `step`.

        Rows of metrics.csv have the names of its columns. Rows of validations have names that start with `validation/`.
        """
        raise NotImplementedError

    def log_video(self, name: str, path: Path, step: int) -> None:
        """Log a video, a GIF file. `name` is the same for all videos of one task, for example `video/atari/Pong`."""

    def log_figure(self, name: str, path: Path, step: int) -> None:
        """Log a figure, a PNG file."""

    def close(self) -> None:
        """Write buffered data and end the session. It is always called at the end, even after an exception."""


def persistent_id(path: Path) -> str:
    """Return the ID that is stored in a file. If the file does not exist, create it with a random ID.

    A resumed run reads its ID from the file. The name of the run folder is not used as ID, because several run folders
    may have the same name.
    """
    if not os.path.lexists(path):
        safe_files.write_text(path, uuid.uuid4().hex[:12])
    return safe_files.read_text(path, max_bytes=1000).strip()
