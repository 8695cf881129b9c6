"""What the page of a run shows: facts, charts, checkpoints and recorded games. Nothing is executed or written."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bestiary.evaluation.run_outputs import output_files
from bestiary.runs.checkpoints import BEST_LINKS, best_steps, list_checkpoints
from bestiary.runs.csv_tables import read_columns
from bestiary.runs.run import ORIGINS_FILE, Run
from bestiary.utils import safe_files
from bestiary.utils.errors import UserError
from bestiary.view.curves import Columns

# Charts of the page: title, columns of metrics.csv, and whether each task has its own column TASK/COLUMN.
CHARTS = (
    ("Losses", ("policy_loss", "value_loss", "loss"), False),
    ("Entropy of the policy", ("entropy",), False),
    ("Difference of old and new policy", ("kl", "abs_log_ratio", "clipped"), False),
    ("Value", ("value",), False),
    ("Gradient norm", ("grad_norm",), False),
    ("Throughput, in steps/s", ("sps",), False),
    ("Policy lag, in updates", ("policy_lag", "max_policy_lag"), False),
    ("Use of time", ("actor_environment", "actor_inference", "actor_wait", "learner_wait"), False),
    ("Game length, in steps", ("game_length",), True),
    ("PopArt: mean of the returns", ("mu",), True),
    ("PopArt: standard deviation of the returns", ("sigma",), True),
    ("Learning rate", ("lr",), False),
)
MAX_DOTS = 600  # maximum number of games that are drawn as dots
SAME_RETURN = 1e-3  # a recorded game and a row of episodes.csv can be the same game if their returns differ less


def task_columns(names: Iterable[str], column: str) -> list[str]:
    """Return the columns COLUMN and TASK/COLUMN that exist."""
    return [name for name in names if name == column or name.endswith(f"/{column}")]


def existing_charts(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the charts as pairs (title, columns). Charts without columns are left out."""
    charts = []
    for title, columns, by_task in CHARTS:
        found = [name for column in columns for name in (task_columns(names, column) if by_task else [column])]
        found = [name for name in found if name in names]
        if found:
            charts.append((title, found))
    return charts


def other_columns(names: Sequence[str]) -> list[str]:
    """Return the columns that no chart of the page shows."""
    shown = {name for _, columns in existing_charts(names) for name in columns}
    hidden = {"step", "frames", "seconds", "updates"}
    returns = {name for column in ("return", "training_return") for name in task_columns(names, column)}
    return [name for name in names if name not in shown | hidden | returns]


def true_return_columns(names: Sequence[str]) -> list[str]:
    """Return the columns of the training return and of the true returns, or an empty list without a true reward."""
    true = [name for name in names if name.rpartition("/")[2].startswith("true_return")]
    return [*task_columns(names, "training_return"), *true] if true else []


def alert_steps(metrics: Columns, names: Sequence[str]) -> list[float]:
    """Return the steps at which the reward-hacking monitor raised alerts."""
    steps: set[float] = set()
    for name in task_columns(names, "reward_hacking_alerts"):
        alerts = metrics[name]
        if alerts.dtype.kind == "f" and len(alerts):
            rises = np.flatnonzero(np.diff(np.nan_to_num(alerts), prepend=0) > 0)
            steps |= {float(metrics["step"][row]) for row in rises}
    return sorted(steps)


def game_dots(episodes: Columns, task: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps and returns of finished games, at most MAX_DOTS, and their rows in episodes.csv.

    `task` is the name of a task, or None for the games of all tasks.
    """
    empty = np.zeros(0)
    if any(name not in episodes for name in ("step", "game_return", "game_over", "task")):
        return empty, empty, np.zeros(0, int)
    step, returns, over = (episodes[name] for name in ("step", "game_return", "game_over"))
    if any(column.dtype.kind != "f" for column in (step, returns, over)):
        return empty, empty, np.zeros(0, int)
    rows = np.flatnonzero((over == 1) & np.isfinite(step) & np.isfinite(returns))
    if task is not None:
        rows = rows[episodes["task"][rows] == task]
    if len(rows) > MAX_DOTS:
        rows = rows[np.linspace(0, len(rows) - 1, MAX_DOTS).astype(int)]
    return step[rows], returns[rows], rows


def checkpoint_rows(run: Run) -> list[list[str]]:
    """Return one row [steps, names of the links to the checkpoint] per checkpoint, with the newest first."""
    folder = run.path / "checkpoints"
    links = {name: best_steps(folder, name) for name in BEST_LINKS}
    saved = list_checkpoints(folder)
    return [
        [
            f"{checkpoint.steps:,}",
            ", ".join(
                [*(name for name, steps in links.items() if steps == checkpoint.steps)]
                + (["newest"] if checkpoint is saved[-1] else [])
            ),
        ]
        for checkpoint in reversed(saved)
    ]


def nearest_checkpoint(run: Run, step: float) -> int | None:
    """Return the step count of the checkpoint that is nearest to a step, or None if the run has no checkpoint."""
    steps = [checkpoint.steps for checkpoint in run.checkpoints]
    return min(steps, key=lambda saved: abs(saved - step)) if steps else None


def read_origins(run: Run) -> dict[str, str]:
    """Return {option: where its value comes from}. The dict is empty for runs of older versions without this file."""
    try:
        origins = json.loads(safe_files.read_text(run.path / ORIGINS_FILE, run.path))
        return {str(key): str(value) for key, value in origins.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


@dataclass(frozen=True)
class GameFile:
    """A game of a recording in the run folder."""

    recording: str  # name of the JSON file in recordings/
    number: int  # row of the game in the CSV file of the recording
    env: int  # index of the environment that played the game
    first_step: int  # number of steps of this environment before the game
    length: int  # number of steps of the game
    game_return: float


def recorded_games(run: Run) -> list[GameFile]:
    """Return the games of all recordings of a run. Damaged recordings are left out."""
    games = []
    for path in output_files(run, "recordings"):
        if path.suffix != ".csv" or not path.with_suffix(".json").is_file():
            continue
        try:
            columns = read_columns(path)
            rows = zip(*(columns[name].tolist() for name in ("env", "first_step", "length", "return")), strict=True)
            name = path.with_suffix(".json").name
            games += [
                GameFile(name, k, int(env), int(first), int(length), float(value))
                for k, (env, first, length, value) in enumerate(rows)
            ]
        except (UserError, KeyError, ValueError, TypeError, OverflowError):
            continue
    return games


def find_recorded_game(games: Sequence[GameFile], length: float, game_return: float, share: float) -> GameFile | None:
    """Return the recorded game with this length and return, or None.

    `share` is the fraction of the training after which the game ended. If several games have this length and return,
    the game that ended nearest to `share` is returned.
    """
    same = [game for game in games if game.length == length and abs(game.game_return - game_return) < SAME_RETURN]
    if not same:
        return None
    last = max(game.first_step + game.length for game in games)
    return min(same, key=lambda game: abs((game.first_step + game.length) / last - share))


def media_files(run: Run, folders: Sequence[str], suffixes: Sequence[str], limit: int) -> list[tuple[str, Path]]:
    """Return the newest images and videos as pairs (folder, path)."""
    found = [(folder, path) for folder in folders for path in output_files(run, folder) if path.suffix in suffixes]
    return sorted(found, key=lambda pair: pair[1].stat().st_mtime, reverse=True)[:limit]
