"""The loggers of a run: their construction, and protection of the training against their failures.

A logger never stops the training. If it fails, one warning is printed, and metrics.csv is still written completely.
"""

import hashlib
import importlib.util
from copy import deepcopy
from pathlib import Path
from typing import Any

from bestiary.config.config import Config
from bestiary.config.logger_options import options_of
from bestiary.loggers import LogContext, Logger
from bestiary.utils import plugins
from bestiary.utils.console import warn
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct
from bestiary.utils.plugin_names import PluginRef


class Loggers:
    """All loggers of a session. A logger that raises an exception causes one warning and is not called again.

    `open` must be called before the other methods.
    """

    def __init__(self) -> None:
        self.active: dict[str, Logger] = {}  # loggers that have not failed, by name

    def open(self, config: Config, run_path: Path, first_step: int) -> None:
        """Create the loggers of a config. Leave out, with a warning, a logger that cannot be created."""
        if not config.loggers:
            return
        digest = hashlib.sha256(config.group_key().encode()).hexdigest()[:8]
        context = LogContext(
            folder=run_path.absolute(),
            name=run_path.resolve().name,
            group=f"{config.label()}-{digest}",
            config=config.tables(),
            first_step=first_step,
        )
        for name, component in config.loggers.items():
            try:
                self.active[name] = construct(component, context, options=options_of(component, config.logger_options))
            except (Exception, SystemExit) as error:
                warn(f"logger {name} is not available: {_describe(error)}; metrics.csv is still written")

    def log(self, row: dict[str, float]) -> None:
        """Log numbers by name. The row must have the key `step`."""
        self._call("log", row)

    def log_video(self, name: str, path: Path, step: int) -> None:
        self._call("log_video", name, path, step)

    def log_figure(self, name: str, path: Path, step: int) -> None:
        self._call("log_figure", name, path, step)

    def close(self) -> None:
        self._call("close")
        self.active = {}

    def _call(self, method: str, *args: Any) -> None:
        for name, logger in list(self.active.items()):
            try:
                getattr(logger, method)(*deepcopy(args))  # a logger may change its arguments
            except (Exception, SystemExit) as error:
                warn(f"logger {name} stopped logging: {_describe(error)}; metrics.csv is still written")
                del self.active[name]


def _describe(error: BaseException) -> str:
    """Return the type and message of an error, with the file and line if the error was raised in a plug-in."""
    return plugins.describe_error(error) or plugins.error_line(error)


def check_loggers(config: Config) -> None:
    """Raise UserError if the package of a requested logger is not installed."""
    problems = []
    for name, logger in config.loggers.items():
        if logger.package and not _is_installed(logger.package):
            shown = name.attribute if isinstance(name, PluginRef) else name
            install = f"; run: {logger.install}" if logger.install.startswith("pip ") else f"; {logger.install}"
            problems.append(f"--logger {shown}: {logger.package} is not installed{install if logger.install else ''}")
    if problems:
        raise UserError(*problems)


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. Do not import it, because the import of some packages takes seconds."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    # A folder without code has no origin, for example the folder wandb/ with the logs of W&B.
    return spec is not None and spec.origin is not None
