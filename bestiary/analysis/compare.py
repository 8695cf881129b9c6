"""Learning curves side by side: runs that differ only in their seed are one curve with a band.

A run's curve is the mean return of the whole games that ended within a window of steps. Over the seeds of a group the line is
their mean and the band reaches from the lowest to the highest seed. By task, there is a panel for each task, against steps of
that task: an agent of six tasks has made a sixth of its steps in each. Where runs watch a true reward, its return has columns
and a panel of its own: what is trained on does not say which of two runs is the better one.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.analysis.evaluation import summarise
from bestiary.analysis.figures import finish, panel_grid, pyplot
from bestiary.analysis.files import FIGURES
from bestiary.config import group_key
from bestiary.console import note, stdout, warn
from bestiary.envs.mixture import task_name
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.runtime.episodes import short_name

GAME, TRUE = "game_return", "game_true_return"


@dataclass
class Group:
    """Runs of one configuration, and their returns in a task at the same points."""

    label: str
    runs: list[Run]
    x: np.ndarray  # [P] steps or minutes
    curves: np.ndarray  # [R,P] one row a run, nan where it has no game
    task: str | None = None  # None: the runs' only one
    column: str = GAME  # of episodes.csv: which return
    true: "Group | None" = None  # the same runs, judged by their first true reward, where all have one

    @property
    def mean(self) -> np.ndarray:
        return _over_runs(np.nanmean, self.curves)

    @property
    def low(self) -> np.ndarray:
        return _over_runs(np.nanmin, self.curves)

    @property
    def high(self) -> np.ndarray:
        return _over_runs(np.nanmax, self.curves)

    def final(self) -> list[float]:
        return [final_return(run, self.task, self.column) for run in self.runs]


def final_return(run: Run, task: str | None = None, column: str = GAME) -> float:
    """Mean return over the games of the last tenth of a run's training, up to the end of the last of them."""
    steps, returns = games_of(run, task, column)
    return float(returns[steps >= 0.9 * steps.max()].mean())


def games_of(run: Run, task: str | None = None, column: str = GAME) -> tuple[np.ndarray, np.ndarray]:
    """Step and return of every whole game of a run, in one task or its only one."""
    episodes = run.episodes
    if task is None and len(run.settings["env"]) > 1:
        raise UserError(f"{run.path} has several tasks, whose returns have no common mean: --by task")
    over = episodes["game_over"] == 1 if episodes else np.zeros(0, bool)
    if task is not None and episodes:
        over &= episodes["task"] == task
    if not over.any():
        raise UserError(
            f"{run.path}: no game{f' of {task}' if task else ''} has been finished yet, so there is no curve"
        )
    return episodes["step"][over], episodes[column][over]


def tasks_of(run: Run) -> list[str]:
    """Those of which a game was finished, in the order of the config."""
    episodes = run.episodes
    played = list(dict.fromkeys(episodes["task"][episodes["game_over"] == 1].tolist())) if episodes else []
    given = list(map(task_name, run.settings["env"]))
    return sorted(played, key=lambda task: given.index(task) if task in given else len(given))


def compare(
    runs: list[Run],
    out: Path,
    *,
    axis: str = "steps",
    by_task: bool = False,
    zoom: tuple[float, float] | None = None,
    overwrite: bool = False,
) -> dict[str, list[Group]]:
    """Draw the curves to `out`, write them as CSV beside it, and print a table. Returns the groups of each panel."""
    if out.suffix not in FIGURES:
        raise UserError(f"--out {out}: figures are .png, .svg or .pdf")
    scales = out.with_stem(f"{out.stem}-popart") if any(_scales_of(run) for run in runs) else None
    table_path = out.with_suffix(".csv")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    taken = [str(p) for p in (out, table_path, scales) if p is not None and p.exists()]
    if taken and not overwrite:
        raise UserError(f"{' and '.join(taken)} exist; choose another --out or add --overwrite")
    by_task = by_task or any(len(run.settings["env"]) > 1 for run in runs)
    trained = dict.fromkeys(str(run.settings.get("reward", "their own")) for run in runs)
    if len(trained) > 1:
        warn(f"these runs were trained on different rewards ({' / '.join(trained)}): their returns are not of one kind")
    panels = panels_by_task(runs, axis=axis) if by_task else {"": group_runs(runs, axis=axis)}
    x = "steps (agent decisions) of the task" if by_task else "steps (agent decisions)"
    draw(panels, out, axis, zoom=zoom, x=x)
    _write_curves(panels, table_path, axis)
    if scales is not None:
        draw_scales(runs, scales)
    _show(panels)
    note(f"written: {' and '.join(str(p) for p in (out, scales, table_path) if p is not None)}")
    return panels


# --- grouping ---


def group_runs(runs: list[Run], *, axis: str = "steps", points: int = 200) -> list[Group]:
    """Group runs by config minus seed, and put each group's curves on common points."""
    return [
        make_group(label, members, axis=axis, points=points)
        for label, members in _grouped(runs, {run.path: run.settings for run in runs}).items()
    ]


def panels_by_task(runs: list[Run], *, axis: str = "steps", points: int = 200) -> dict[str, list[Group]]:
    """For each task, the groups of runs that played it: by config minus seed, tasks and total of steps."""
    settings = {}
    sets = {run.path: tuple(run.settings["env"]) for run in runs}
    for run in runs:
        rest = {key: value for key, value in run.settings.items() if key not in ("env", "steps")}
        settings[run.path] = {**rest, "env": [_tasks_in_words(sets[run.path], set(sets.values()))]}
    groups = _grouped(runs, settings, warn_of_seeds=False)
    panels: dict[str, list[Group]] = {}
    for run in runs:
        missing = [task for task in map(task_name, run.settings["env"]) if task not in tasks_of(run)]
        if missing:
            note(f"note: {run.name} has not finished a game of {', '.join(missing)} yet, and has no curve there")
    for task in dict.fromkeys(task for run in runs for task in tasks_of(run)):
        own = {label: [run for run in members if task in tasks_of(run)] for label, members in groups.items()}
        panels[task] = [
            make_group(label, members, axis=axis, points=points, task=task) for label, members in own.items() if members
        ]
    return panels


def _tasks_in_words(tasks: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    """How many; and which, where others have as many other ones."""
    if len(tasks) == 1:
        return "one task"
    alike = [each for each in others if len(each) == len(tasks)]
    return f"{len(tasks)} tasks" if len(alike) == 1 else " + ".join(map(short_name, tasks))


def _grouped(runs: list[Run], settings: dict[Path, dict[str, Any]], warn_of_seeds: bool = True) -> dict[str, list[Run]]:
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        by_config.setdefault(group_key(settings[run.path]), []).append(run)
    groups = dict(zip(labels(list(by_config)), by_config.values(), strict=True))
    for label, members in groups.items():
        seeds = [run.settings["seed"] for run in members]
        if warn_of_seeds and len(set(seeds)) < len(seeds):
            warn(f"{label}: seeds {seeds} occur more than once; the band is then narrower than it should be")
    return groups


def make_group(
    label: str, runs: list[Run], *, axis: str = "steps", points: int = 200, task: str | None = None
) -> Group:
    """The curves of runs that belong together, on common points."""

    def made(column: str, true: Group | None = None) -> Group:
        places, values = zip(*(_on_axis(run, axis, task, column) for run in runs), strict=True)
        grid = np.linspace(0, max(p.max() for p in places), points + 1)
        curves = np.stack([_binned(p, v, grid) for p, v in zip(places, values, strict=True)])
        return Group(label, runs, grid[1:], curves, task, column, true)

    return made(GAME, made(TRUE) if all(TRUE in run.episodes for run in runs) else None)


def _on_axis(run: Run, axis: str, task: str | None, column: str) -> tuple[np.ndarray, np.ndarray]:
    steps, returns = games_of(run, task, column)
    if axis == "steps":
        return steps / (len(run.settings["env"]) if task is not None else 1), returns
    metrics = run.metrics
    if "step" not in metrics:
        raise UserError(f"{run.path}: metrics.csv is empty, so there are no minutes to draw against")
    return np.interp(steps, metrics["step"], metrics["seconds"]) / 60, returns


def _binned(places: np.ndarray, values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Mean of the values between neighbouring grid points, over windows widened until each has about 20 games."""
    per_bin = len(values) / (len(grid) - 1)
    reach = 0 if per_bin >= 20 else (20 / max(per_bin, 1e-9)) / 2  # bins on either side
    width = (grid[1] - grid[0]) * reach
    order = np.argsort(places, kind="stable")
    places, totals = places[order], np.concatenate([[0.0], np.cumsum(values[order])])
    first = np.searchsorted(places, grid[:-1] - width)
    last = np.searchsorted(places, grid[1:] + width, side="right")
    count = last - first
    inside = (grid[1:] <= places[-1] + (grid[1] - grid[0])) & (count > 0)
    return np.where(inside, (totals[last] - totals[first]) / np.maximum(count, 1), np.nan)


def _over_runs(function: Any, curves: np.ndarray) -> np.ndarray:
    some = ~np.isnan(curves).all(axis=0)
    result = np.full(curves.shape[1], np.nan)
    result[some] = function(curves[:, some], axis=0)
    return result


def labels(groups: list[str]) -> list[str]:
    """Names for configurations: what they differ in, parts before their options, and no more of it than tells them apart."""
    settings = [json.loads(group) for group in groups]
    keys = {key for each in settings for key in each}
    differing = [key for key in keys if len({json.dumps(each.get(key)) for each in settings}) > 1]
    parts = [kind for kind in ("env", "algo", "agent", "torso", "memory", "critic") if kind in differing]
    options = sorted(key for key in differing if key not in parts)
    names = [_name(each, parts) for each in settings]
    while options and len(set(names)) < len(names):
        parts.append(options.pop(0))
        names = [_name(each, parts) for each in settings]
    return [name or " ".join(each["env"]) for name, each in zip(names, settings, strict=True)]


def _name(settings: dict[str, Any], keys: list[str]) -> str:
    """What is not set is none, among the options of the run (a part that is not there has no options)."""
    shown = {key: settings.get(key, "none") for key in keys if key in settings or "." not in key}
    words = {key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in shown.items()}
    return ", ".join(str(value) if key == "env" else f"{key} {value}" for key, value in words.items())


# --- figures and tables ---


def draw(
    panels: dict[str, list[Group]],
    out: Path,
    axis: str = "steps",
    flat: Sequence[str] = (),
    zoom: tuple[float, float] | None = None,
    x: str = "steps (agent decisions)",
) -> None:
    """In each panel a line and a band for each group; a panel more where groups have a true return.

    Groups whose labels are in `flat` are dashed lines at what they came to in the end. `zoom` adds a look at a part of the x
    axis to each panel, as high as what is there needs."""
    plt = pyplot()
    both = [(task, own) for task, groups in panels.items() for own in (groups, _true(groups)) if own]
    parts = [(task, groups, part) for task, groups in both for part in ([None, zoom] if zoom else [None])]
    figure, places = panel_grid(plt, parts)
    labels = dict.fromkeys(group.label for groups in panels.values() for group in groups)
    colors = {label: f"C{k}" for k, label in enumerate(labels)}
    lines: dict[str, Any] = {}
    for axes, (task, groups, part) in zip(places, parts, strict=True):
        for group in groups:
            seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
            color, label = colors[group.label], f"{group.label}{seeds}"
            if group.label in flat:
                line = axes.axhline(np.mean(group.final()), color=color, label=label, linewidth=1.4, linestyle="--")
                lines.setdefault(group.label, line)
                continue
            shown = np.isfinite(group.mean)  # where games ended: between those, a line
            if part is not None:
                shown &= (group.x >= part[0]) & (group.x <= part[1])
            (line,) = axes.plot(group.x[shown], group.mean[shown], color=color, label=label, linewidth=1.6)
            axes.fill_between(group.x[shown], group.low[shown], group.high[shown], color=color, alpha=0.2, linewidth=0)
            lines.setdefault(group.label, line)
        finish(axes, task, x if axis == "steps" else "minutes", axis == "steps")
        kind = "true return" if groups[0].column == TRUE else "trained return" if _true(groups) else "return"
        axes.set_ylabel(f"{kind} of a game")
    figure.legend(  # below, not over the curves
        handles=list(lines.values()), frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.02, 0.02)
    )
    figure.tight_layout()
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def _true(groups: Sequence[Group]) -> list[Group]:
    return [group.true for group in groups if group.true is not None]


def draw_scales(runs: list[Run], out: Path) -> None:
    """What PopArt took for the scale of each task's returns: mu as a line, mu plus and minus sigma as a band, a run each."""
    plt = pyplot()
    tasks = list(dict.fromkeys(task for run in runs for task in _scales_of(run)))
    figure, places = panel_grid(plt, tasks)
    lines: dict[str, Any] = {}
    for axes, task in zip(places, tasks, strict=True):
        for k, run in enumerate(runs):
            if task not in _scales_of(run):
                continue
            metrics = run.metrics
            mu, sigma = metrics[f"{task}/mu"], metrics[f"{task}/sigma"]
            x = metrics["step"] / len(run.settings["env"])
            (line,) = axes.plot(x, mu, f"C{k}{'o' if len(x) == 1 else '-'}", label=run.name, linewidth=1.4)
            lines.setdefault(run.name, line)
            axes.fill_between(x, mu - sigma, mu + sigma, color=f"C{k}", alpha=0.2, linewidth=0)
        finish(axes, task, "steps of the task", True)
        axes.set_ylabel("mu ± sigma")
    figure.legend(  # below, not over the curves
        handles=list(lines.values()), frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.02, 0.02)
    )
    figure.tight_layout()
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def _scales_of(run: Run) -> list[str]:
    """The tasks of which a run's metrics know mu."""
    return [name.removesuffix("/mu") for name in run.metrics if name.endswith("/mu")]


def _write_curves(panels: dict[str, list[Group]], path: Path, axis: str) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        by_task = list(panels) != [""]
        true = ["true_mean", "true_low", "true_high"] if any(map(_true, panels.values())) else []
        writer.writerow([*(["task"] if by_task else []), "group", axis, "mean", "low", "high", "runs", *true])
        for task, groups in panels.items():
            for group in groups:
                front = [task, group.label] if by_task else [group.label]
                for k, row in enumerate(zip(group.x, group.mean, group.low, group.high, strict=True)):
                    watched = group.true
                    more = [watched.mean[k], watched.low[k], watched.high[k]] if watched is not None else []
                    numbers = [f"{v:.6g}" for v in row], [f"{v:.6g}" for v in more] or [""] * len(true)
                    writer.writerow([*front, *numbers[0], len(group.runs), *numbers[1]])


def _show(panels: dict[str, list[Group]]) -> None:
    by_task = list(panels) != [""]
    table = Table(title="return of a game over the last tenth of training")
    names = [*(["task"] if by_task else []), "runs that differ in"]
    true = ["true return"] if any(map(_true, panels.values())) else []
    for column in (*names, "seeds", "mean", "95% interval", "lowest", "highest", *true):
        table.add_column(column, justify="left" if column in names else "right")
    for task, groups in panels.items():
        for group in groups:
            s = summarise(group.final())
            interval = f"{s['ci_low']:.2f} to {s['ci_high']:.2f}" if s["n"] > 1 else "one seed"
            numbers = (f"{s['n']:.0f}", f"{s['mean']:.2f}", interval, f"{s['min']:.2f}", f"{s['max']:.2f}")
            more = [f"{np.mean(group.true.final()):.2f}" if group.true is not None else ""] if true else []
            table.add_row(*([task] if by_task else []), group.label, *numbers, *more)
    stdout.print(table)
