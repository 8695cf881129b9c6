"""Learning curves side by side: runs that differ only in their seed are one curve with a band.

A run's curve is the mean return of the whole games that ended within a window of steps. Over the seeds of a group the
line is their mean and the band reaches from the lowest to the highest seed.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.analysis.evaluate import summarise
from bestiary.config import group_key
from bestiary.console import note, stdout, warn
from bestiary.errors import UserError
from bestiary.runs.folder import Run


@dataclass
class Group:
    """Runs of one configuration, and their returns at the same points."""

    label: str
    runs: list[Run]
    x: np.ndarray  # [P] steps or minutes
    curves: np.ndarray  # [R,P] one row a run, nan where it has no game

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
        return [final_return(run) for run in self.runs]


def final_return(run: Run) -> float:
    """Mean return over the games of the last tenth of a run's training."""
    steps, returns = games_of(run)
    return float(returns[steps >= 0.9 * steps.max()].mean())


def games_of(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Step and return of every whole game of a run."""
    episodes = run.episodes
    over = episodes["game_over"] == 1 if episodes else np.zeros(0, bool)
    if not over.any():
        raise UserError(f"{run.path}: no game has been finished yet, so there is no curve")
    return episodes["step"][over], episodes["game_return"][over]


def group_runs(runs: list[Run], *, axis: str = "steps", points: int = 200) -> list[Group]:
    """Group runs by config minus seed, and put each group's curves on common points."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        by_config.setdefault(group_key(run.settings), []).append(run)
    labels = _labels(list(by_config))
    groups = []
    for label, members in zip(labels, by_config.values(), strict=True):
        seeds = [run.settings["seed"] for run in members]
        if len(set(seeds)) < len(seeds):
            warn(f"{label}: seeds {seeds} occur more than once; the band is then narrower than it should be")
        groups.append(make_group(label, members, axis=axis, points=points))
    return groups


def make_group(label: str, runs: list[Run], *, axis: str = "steps", points: int = 200) -> Group:
    """The curves of runs that belong together, on common points."""
    places, values = zip(*(_on_axis(run, axis) for run in runs), strict=True)
    grid = np.linspace(0, max(p.max() for p in places), points + 1)
    curves = np.stack([_binned(p, v, grid) for p, v in zip(places, values, strict=True)])
    return Group(label, runs, grid[1:], curves)


def compare(runs: list[Run], out: Path, *, axis: str = "steps", overwrite: bool = False) -> list[Group]:
    """Draw the curves to `out`, write them as CSV beside it, and print a table."""
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: figures are .png, .svg or .pdf")
    table_path = out.with_suffix(".csv")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    taken = [str(p) for p in (out, table_path) if p.exists()]
    if taken and not overwrite:
        raise UserError(f"{' and '.join(taken)} exist; choose another --out or add --overwrite")
    groups = group_runs(runs, axis=axis)
    draw(groups, out, axis)
    with table_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["group", axis, "mean", "low", "high", "runs"])
        for group in groups:
            rows = zip(group.x, group.mean, group.low, group.high, strict=True)
            writer.writerows([group.label, *(f"{v:.6g}" for v in row), len(group.runs)] for row in rows)
    _show(groups)
    note(f"written: {out} and {table_path}")
    return groups


def _on_axis(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray]:
    steps, returns = games_of(run)
    if axis == "steps":
        return steps, returns
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


def _over_runs(function, curves: np.ndarray) -> np.ndarray:
    some = ~np.isnan(curves).all(axis=0)
    result = np.full(curves.shape[1], np.nan)
    result[some] = function(curves[:, some], axis=0)
    return result


def _labels(groups: list[str]) -> list[str]:
    """Names for configurations: what they differ in, parts before their options, and no more of it than tells them apart."""
    settings = [json.loads(group) for group in groups]
    keys = {key for each in settings for key in each}
    differing = [key for key in keys if len({json.dumps(each.get(key)) for each in settings}) > 1]
    parts = [kind for kind in ("env", "algo", "agent", "torso", "memory") if kind in differing]
    options = sorted(key for key in differing if key not in parts)
    names = [_name(each, parts) for each in settings]
    while options and len(set(names)) < len(names):
        parts.append(options.pop(0))
        names = [_name(each, parts) for each in settings]
    return names if all(names) else [" ".join(each["env"]) for each in settings]


def _name(settings: dict[str, Any], keys: list[str]) -> str:
    shown = {key: settings[key] for key in keys if key in settings}
    words = {key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in shown.items()}
    return ", ".join(str(value) if key == "env" else f"{key} {value}" for key, value in words.items())


def draw(groups: list[Group], out: Path, axis: str = "steps") -> None:
    """A line and a band for each group, as a figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    for group in groups:
        seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
        (line,) = axes.plot(group.x, group.mean, label=f"{group.label}{seeds}", linewidth=1.6)
        axes.fill_between(group.x, group.low, group.high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("steps (agent decisions)" if axis == "steps" else "minutes")
    axes.set_ylabel("return of a game")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0, -0.14)
    )  # below, not over the curves
    if axis == "steps":
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    figure.tight_layout()
    figure.savefig(out, bbox_inches="tight")
    plt.close(figure)


def _show(groups: list[Group]) -> None:
    table = Table(title="return of a game over the last tenth of training")
    for column in ("runs that differ in", "seeds", "mean", "95% interval", "lowest", "highest"):
        table.add_column(column, justify="left" if column.startswith("runs") else "right")
    for group in groups:
        s = summarise(group.final())
        interval = f"{s['ci_low']:.2f} to {s['ci_high']:.2f}" if s["n"] > 1 else "one seed"
        table.add_row(
            group.label,
            f"{s['n']:.0f}",
            *(f"{v}" for v in (f"{s['mean']:.2f}", interval, f"{s['min']:.2f}", f"{s['max']:.2f}")),
        )
    stdout.print(table)
