"""Learning curves of runs. Runs that differ only in their seed form a group, which is drawn as one curve with a band.

At each point of the x axis, the curve of a run is the mean return of the games that ended most recently before this
point (`trailing_means`). The curve of a group is the mean over its runs, and its band reaches from the lowest to the
highest run. If there is one panel per task, the x axis of a panel counts only the steps in this task. For example, an
agent with six tasks takes a sixth of its steps in each task. If runs have a true reward (`--true-reward`), the true
return has its own curve. Runs with different training rewards can be compared only by their true return.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bestiary.envs.episode_stats import short_name
from bestiary.envs.multitask import task_name
from bestiary.evaluation.run_groups import group_by_config, list_names, short_label
from bestiary.runs.run import Run
from bestiary.utils.console import note, plural
from bestiary.utils.errors import UserError

# Names of columns in episodes.csv.
GAME_RETURN = "game_return"
GAME_TRUE_RETURN = "game_true_return"

MAX_TASKS = 120  # maximum number of tasks whose curves are drawn
# A point of a curve is the mean of at least this number of games. If fewer games have ended, it is the mean of all
# these games.
DEFAULT_SMOOTH = 20


@dataclass
class CurveGroup:
    """The learning curves of R runs that differ only in their seed, in one task, at the same P points of the x axis."""

    label: str
    runs: list[Run]
    x: np.ndarray  # [P] steps or minutes
    curves: np.ndarray  # [R,P] mean returns, one row per run; nan before the first and after the last game of the run
    games: list[tuple[np.ndarray, np.ndarray]]  # for each run: x at which each game ended, and return of each game
    task: str | None = None  # None if the runs have only one task
    column: str = GAME_RETURN  # the column of episodes.csv that contains the returns
    true_group: "CurveGroup | None" = None  # curves of the true returns; None if a run has no true reward
    smooth: int = DEFAULT_SMOOTH  # minimum number of games of a mean, see `trailing_means`
    is_named: bool = False  # True: the user chose the label, and legends do not show names of runs

    @property
    def mean(self) -> np.ndarray:
        return _reduce_runs(np.nanmean, self.curves)

    @property
    def lowest(self) -> np.ndarray:
        return _reduce_runs(np.nanmin, self.curves)

    @property
    def highest(self) -> np.ndarray:
        return _reduce_runs(np.nanmax, self.curves)

    @property
    def seeds(self) -> np.ndarray:
        """The number of runs that have a value at each point [P]."""
        return (~np.isnan(self.curves)).sum(axis=0)

    @property
    def legend(self) -> str:
        """A short text for legends: the label, the number of seeds and the names of the runs."""
        seeds = "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"
        if self.is_named:
            return f"{self.label} ({seeds})"
        return f"{short_label(self.label)} ({seeds}: {list_names(self.runs)})"

    def final_returns(self) -> list[float]:
        """Return the final return of each run. See `final_return`."""
        return [final_return(run, self.task, self.column) for run in self.runs]


def final_return(run: Run, task: str | None = None, column: str = GAME_RETURN) -> float:
    """Return the mean return of the games that ended in the last tenth of the training so far."""
    steps, returns = load_game_returns(run, task, column)
    return float(returns[steps >= 0.9 * steps.max()].mean())


def load_game_returns(run: Run, task: str | None = None, column: str = GAME_RETURN) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which the games of a task ended, and the returns of these games.

    `task` may be None if the run has only one task.
    """
    episodes = run.episodes
    if task is None and len(run.raw_config["env"]) > 1:
        raise UserError(f"{run.path} has several tasks, whose returns cannot be averaged; add --by task")
    over = episodes["game_over"] == 1 if episodes else np.zeros(0, bool)
    if task is not None and episodes:
        over &= episodes["task"] == task
    if not over.any():
        raise UserError(f"{run.path} has no curve, because no game{f' of {task}' if task else ''} has ended yet")
    return episodes["step"][over], episodes[column][over]


def run_tasks(run: Run) -> list[str]:
    """Return the task names of a run, which are also used in episodes.csv, in the order of the config."""
    # For a plug-in, `raw_config` has the name followed by @ and a hash of the file. The task name has no hash.
    return [task_name(env).split("@")[0] for env in run.raw_config["env"]]


def envs_in_first_game(run: Run) -> int:
    """Return the number of environments that had not finished a game when the last row of metrics.csv was written.

    The first games of these environments are long and not yet included, so returns are biased towards short games.
    """
    counts = run.metrics.get("envs_in_first_game", np.zeros(0))
    return int(counts[-1]) if len(counts) else 0


def note_first_games(run: Run) -> None:
    """Print a note if some environments have not finished a game yet."""
    if waiting := envs_in_first_game(run):
        note(
            f"note: {run.name}: {plural(waiting, 'environment')} had not finished a game yet, so the returns are "
            "biased towards short games"
        )


def finished_tasks(run: Run) -> list[str]:
    """Return the tasks in which at least one game has ended, in the order of the config."""
    episodes = run.episodes
    played = list(dict.fromkeys(episodes["task"][episodes["game_over"] == 1].tolist())) if episodes else []
    order = run_tasks(run)
    return sorted(played, key=lambda task: order.index(task) if task in order else len(order))


def group_runs(
    runs: Sequence[Run], *, axis: str = "steps", smooth: int = DEFAULT_SMOOTH, names: Sequence[str] = ()
) -> list[CurveGroup]:
    """Group runs whose configs differ only in the seed, and return the curves of each group.

    `names` are the labels of the groups; by default, labels are the differences between the configs.
    """
    groups = group_by_config(runs, {run.path: run.raw_config for run in runs}, names)
    return [
        make_curve_group(label, members, axis=axis, smooth=smooth, is_named=bool(names))
        for label, members in groups.items()
    ]


def panels_by_task(
    runs: Sequence[Run], *, axis: str = "steps", smooth: int = DEFAULT_SMOOTH, names: Sequence[str] = ()
) -> dict[str, list[CurveGroup]]:
    """Return {task: groups of runs}. Runs in which no game of the task has ended are left out.

    Runs belong to the same group if their configs differ only in the seed or the total steps. For runs with only one
    task, the tasks may also differ. Raise UserError if no game of any run has ended.
    """
    tasks_by_run = {run.path: tuple(run.raw_config["env"]) for run in runs}
    configs = {}
    for run in runs:
        others = {key: value for key, value in run.raw_config.items() if key not in ("env", "steps")}
        configs[run.path] = {**others, "env": [_describe_tasks(tasks_by_run[run.path], set(tasks_by_run.values()))]}
    groups = group_by_config(runs, configs, names, warn_of_seeds=False)
    finished = {run.path: finished_tasks(run) for run in runs}
    if not any(finished.values()):
        raise UserError(f"there is no curve, because no game has ended yet in {', '.join(str(r.path) for r in runs)}")
    for run in runs:
        missing = [task for task in run_tasks(run) if task not in finished[run.path]]
        if missing:
            note(f"note: {run.name}: no game of {', '.join(missing)} has ended yet, so no curve is drawn")
    panels: dict[str, list[CurveGroup]] = {}
    tasks = dict.fromkeys(task for run in runs for task in finished[run.path])
    if len(tasks) > MAX_TASKS:
        raise UserError(f"the runs have {len(tasks)} tasks, the maximum is {MAX_TASKS}; choose runs with fewer tasks")
    for task in tasks:
        members = {label: [run for run in own if task in finished[run.path]] for label, own in groups.items()}
        panels[task] = [
            make_curve_group(label, own, axis=axis, smooth=smooth, task=task, is_named=bool(names))
            for label, own in members.items()
            if own
        ]
    return panels


def _describe_tasks(tasks: tuple[str, ...], task_sets: set[tuple[str, ...]]) -> str:
    """Return a text that describes the tasks of a run: "one task", "6 tasks", or the names of all tasks.

    The names are used if another run has equally many, but different tasks. `task_sets` has the tasks of all runs.
    """
    if len(tasks) == 1:
        return "one task"
    same_size = [other for other in task_sets if len(other) == len(tasks)]
    return f"{len(tasks)} tasks" if len(same_size) == 1 else " + ".join(map(short_name, tasks))


def make_curve_group(
    label: str,
    runs: list[Run],
    *,
    axis: str = "steps",
    points: int = 200,
    smooth: int = DEFAULT_SMOOTH,
    task: str | None = None,
    is_named: bool = False,
) -> CurveGroup:
    """Compute the curves of a group of runs at the same `points` points of the x axis.

    `axis` is "steps" or "minutes". `smooth` is the minimum number of games of a mean, see `trailing_means`.
    """

    def make(column: str, true_group: CurveGroup | None = None) -> CurveGroup:
        games = [_positions_and_returns(run, axis, task, column) for run in runs]
        grid = np.linspace(0, max(positions.max() for positions, _ in games), points + 1)
        curves = np.stack([trailing_means(positions, returns, grid, smooth) for positions, returns in games])
        return CurveGroup(label, runs, grid[1:], curves, games, task, column, true_group, smooth, is_named)

    have_true_reward = all(GAME_TRUE_RETURN in run.episodes for run in runs)
    return make(GAME_RETURN, make(GAME_TRUE_RETURN) if have_true_reward else None)


def _positions_and_returns(run: Run, axis: str, task: str | None, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions on the x axis at which games ended, in ascending order, and the returns of these games."""
    steps, returns = load_game_returns(run, task, column)
    if axis == "steps":
        positions = steps / (len(run.raw_config["env"]) if task is not None else 1)
    else:
        metrics = run.metrics
        if "step" not in metrics:
            raise UserError(f"{run.path}: metrics.csv is empty, so the training time is unknown; use --axis steps")
        positions = np.interp(steps, metrics["step"], metrics["seconds"]) / 60
    order = np.argsort(positions, kind="stable")
    return positions[order], returns[order]


def trailing_means(positions: np.ndarray, values: np.ndarray, grid: np.ndarray, smooth: int) -> np.ndarray:
    """Return, for each point of `grid` except the first, the mean value of the most recent games.

    Game i ended at `positions[i]` (in ascending order) and has the value `values[i]`. The mean at a point includes all
    games that ended after the previous point and not after this point. If these are fewer than `smooth` games, the mean
    includes the last `smooth` games that ended before or at this point. Early in the run, when fewer than `smooth`
    games have ended, the mean includes all games so far.

    The result is nan at points before the end of the first game. The last point with a mean is the first point at or
    after the end of the last game. The result is nan at later points.
    """
    totals = np.concatenate([[0.0], np.cumsum(values)])
    last = np.searchsorted(positions, grid[1:], side="right")
    previous = np.searchsorted(positions, grid[:-1], side="right")
    first = np.maximum(np.minimum(previous, last - max(smooth, 1)), 0)
    has_value = (last > 0) & (grid[:-1] < positions[-1])
    return np.where(has_value, (totals[last] - totals[first]) / np.maximum(last - first, 1), np.nan)


def _reduce_runs(function: Callable[..., np.ndarray], curves: np.ndarray) -> np.ndarray:
    """Reduce curves [R,P] over the runs to [P], for example with np.nanmean. Points without any value remain nan."""
    has_value = ~np.isnan(curves).all(axis=0)
    result = np.full(curves.shape[1], np.nan)
    result[has_value] = function(curves[:, has_value], axis=0)
    return result
