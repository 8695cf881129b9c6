"""Example of a user-defined logger.

bestiary train toy/catch --logger examples/jsonl_logger.py:JsonLines --logger.every 2
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bestiary.loggers import LogContext, Logger


class JsonLines(Logger):
    """Writes one JSON object per row into a file of the run folder."""

    def __init__(self, context: LogContext, *, file: str = "log.jsonl", every: int = 1):
        if every < 1:
            raise ValueError(f"every {every}: must be at least 1")
        self.file = (context.folder / file).open("a")
        self.every = every
        self.num_rows = 0

    def log(self, row: dict[str, float]) -> None:
        if self.num_rows % self.every == 0:
            self._write(row)
        self.num_rows += 1

    def log_video(self, name: str, path: Path, step: int) -> None:
        self._write({"step": step, name: str(path)})

    def close(self) -> None:
        self.file.close()

    def _write(self, entry: Mapping[str, object]) -> None:
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
