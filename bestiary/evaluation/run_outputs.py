"""Files that other commands have written into a run folder: evaluations, videos and figures."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bestiary.evaluation.statistics import format_interval
from bestiary.runs.run import Run
from bestiary.utils import safe_files

MAX_BYTES = 64 * 2**20  # maximum total size of the evaluations of a run that are read
EVALUATION_COLUMNS = ["task", "checkpoint", "policy", "games", "mean return", "95% interval", "method of the interval"]


def output_files(run: Run, folder: str) -> list[Path]:
    """Return the files in the subfolder `folder` of a run. Leave out links, which could point to private files.

    For a run in the zoo, the subfolder is in runs/zoo-NAME instead of the run folder.
    """
    root = Path("runs") / f"zoo-{run.name}" if run.in_zoo else run.path
    return safe_files.list_files(root / folder, root)


def read_evaluations(run: Run) -> Iterator[Any]:
    """Yield the content of each evaluation in the run folder. Its structure is not checked.

    Files that cannot be read are left out, and also files after the first MAX_BYTES bytes.
    """
    left = MAX_BYTES
    for path in (path for path in output_files(run, "evaluations") if path.suffix == ".json"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = safe_files.read_bytes(path, max_bytes=left)
            left -= len(content)
            yield json.loads(content)


def evaluation_rows(run: Run) -> Iterator[list[str]]:
    """Yield one table row, with the columns EVALUATION_COLUMNS, for each evaluation result in the run folder."""
    for evaluation in read_evaluations(run):
        try:
            protocol = evaluation["protocol"]
            for result in evaluation.get("results", [evaluation]):
                game = result["statistics"]["game_return"]
                checkpoint = result.get("checkpoint", protocol.get("checkpoint_steps", ""))
                yield [
                    " ".join(str(result[key]) for key in ("task", "levels", "role") if result.get(key)),
                    f"{checkpoint:,}",
                    str(protocol["policy"]),
                    f"{game['n']:.0f}",
                    f"{game['mean']:.2f}",
                    format_interval(game),
                    # Files of older versions name the method only in the protocol.
                    str(game.get("interval", protocol.get("interval", ""))),
                ]
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            continue  # the file is not an evaluation, or it is incomplete
