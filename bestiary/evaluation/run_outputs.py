"""Files that other commands have written into a run folder: evaluations, videos and figures."""

import json
from collections.abc import Iterator
from pathlib import Path

from bestiary.evaluation.statistics import format_interval
from bestiary.runs.run import Run
from bestiary.utils import safe_files

EVALUATION_COLUMNS = ["task", "checkpoint", "policy", "games", "mean return", "95% interval", "method of the interval"]


def output_files(run: Run, folder: str) -> list[Path]:
    """Return the files in the subfolder `folder` of a run. Leave out links, which could point to private files.

    For a run in the zoo, the subfolder is in runs/zoo-NAME instead of the run folder.
    """
    root = Path("runs") / f"zoo-{run.name}" if run.in_zoo else run.path
    return safe_files.list_files(root / folder, root)


def evaluation_rows(run: Run) -> Iterator[list[str]]:
    """Yield one table row, with the columns EVALUATION_COLUMNS, for each evaluation result in the run folder."""
    for path in (path for path in output_files(run, "evaluations") if path.suffix == ".json"):
        try:
            evaluation = json.loads(safe_files.read_text(path))
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
        except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
            continue  # the file is not an evaluation, or it is incomplete
