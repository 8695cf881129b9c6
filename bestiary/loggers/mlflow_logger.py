"""Logger that sends data to MLflow."""

import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary.loggers.base import DEFAULT_PROJECT, PROJECT_HELP, LogContext, Logger
from bestiary.utils import safe_files
from bestiary.utils.options import option

MAX_TEXT = 500  # maximum length of the value of a parameter, in characters; MLflow refuses longer values
# Characters that are replaced in names of metrics. MLflow allows slashes, but it may store the metric `grad_norm` in a
# file of this name. It then cannot store `grad_norm/torso`, which needs a folder of this name.
FORBIDDEN = re.compile(r"[^\w\-. :]")


class MlflowLogger(Logger):
    """MLflow, on this machine or on a server.

    MLflow reads the address of the server or database from the environment variable `MLFLOW_TRACKING_URI`. By default
    it writes `mlflow.db` and `mlruns/` in the working directory.
    """

    package = "mlflow"
    install = "pip install 'bestiary[mlflow]'"

    @dataclass(frozen=True)
    class Options:
        """Options of the logger."""

        project: str = option(DEFAULT_PROJECT, PROJECT_HELP)

    def __init__(self, context: LogContext, options: Options):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # The functions of the module `mlflow`, such as `mlflow.start_run`, would run git in the working directory,
        # which may come from another person. The client runs no programs.
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self.make_metric = Metric
        self.client = MlflowClient()
        found = self.client.get_experiment_by_name(options.project)
        experiment = found.experiment_id if found is not None else self.client.create_experiment(options.project)
        self.run_id = self._open_run(context, experiment)

    def _open_run(self, context: LogContext, experiment: str) -> str:
        """Return the ID of the MLflow run. A resumed run continues the MLflow run of its earlier sessions."""
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        path = context.folder / "mlflow_id.txt"
        if os.path.lexists(path):
            run_id = safe_files.read_text(path, max_bytes=1000).strip()
            try:
                self.client.update_run(run_id, status="RUNNING")
                return run_id
            except MlflowException:
                pass  # this session uses another database or server than the earlier session
        run = self.client.create_run(experiment, run_name=context.name, tags={"group": context.group})
        params = [Param(name, value[:MAX_TEXT]) for name, value in _flatten(context.config).items()]
        for first in range(0, len(params), 100):  # MLflow accepts at most 100 parameters at once
            self.client.log_batch(run.info.run_id, params=params[first : first + 100])
        safe_files.write_text(path, run.info.run_id)
        return run.info.run_id

    def log(self, row: dict[str, float]) -> None:
        now, step = int(1000 * time.time()), int(row["step"])
        metrics = [
            self.make_metric(FORBIDDEN.sub("_", name.replace("/", ".")), float(value), now, step)
            for name, value in row.items()
            if not math.isnan(value)
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def log_video(self, name: str, path: Path, step: int) -> None:
        self.client.log_artifact(self.run_id, str(path), "videos")

    def log_figure(self, name: str, path: Path, step: int) -> None:
        self.client.log_artifact(self.run_id, str(path), "figures")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


def _flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a configuration as texts: {"memory.hidden": "128"}."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": text for name, text in _flatten(value).items()}
        else:
            flat[key] = str(value)
    return flat
