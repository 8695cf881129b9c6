"""`bestiary look actions`: how often an agent does what, game by game: bars with their deviation over games, a table, CSV.

Policies that look alike in their returns may have dropped whole actions. Each is also counted in groups: by where it moves,
whether it fires or not; and with all that fires as one."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.analysis.figures import figure_path, pyplot
from bestiary.analysis.games import play_games
from bestiary.config import make_pool
from bestiary.console import note, stdout
from bestiary.envs.mixture import task_name
from bestiary.envs.pool import Pool
from bestiary.rollout import ArraySpec, Episode, Step
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run, labels

MEASURE = "did "  # before the name of an action
MOVES = {"atari/Pong": {"RIGHT": "UP", "LEFT": "DOWN"}}  # what moves the paddle, alone or in a diagonal, and where to


@dataclass
class Counted:
    """What the games of one run in one task consist of."""

    run: str
    task: str
    checkpoint: int
    names: tuple[str, ...]
    shares: np.ndarray  # [G,A]: of a game's decisions

    def groupings(self) -> dict[str, dict[str, np.ndarray]]:
        """For each way to group actions, the shares [G] of each group."""
        found = {"actions": {name: self.shares[:, k] for k, name in enumerate(self.names)}}
        for way, members in groups(self.names, self.task).items():
            found[way] = {group: self.shares[:, of].sum(axis=1) for group, of in members.items()}
        return found


class CountingPool:
    """A pool whose steps also say which action led to them, as measures that evaluation sums up."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.measures_spec = {name: ArraySpec((), "float32") for name in map(_measure, pool.action_spec.names)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def send(self, actions: np.ndarray) -> None:
        self.done = np.eye(self.pool.action_spec.n, dtype=np.float32)[actions]  # [N,A]
        self.pool.send(actions)

    def recv(self) -> Step:
        step = self.pool.recv()
        step.measures = dict(zip(self.measures_spec, self.done.T, strict=True))
        return step


def _measure(action: str) -> str:
    return MEASURE + action


def look_actions(
    runs: Sequence[Run],
    *,
    out: str | Path | None = None,
    episodes: int = 50,
    at: Sequence[int | None] = (),
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
    overwrite: bool = False,
) -> list[Counted]:
    """Play so many games of each task with each run's agent, and count. `at`: a checkpoint for each run, else the newest."""
    path = figure_path(out, overwrite) if out is not None else None
    chosen = [checkpoints.choose(run.path, steps) for run, steps in zip(runs, at or [None] * len(runs), strict=True)]
    counted = []
    for run, label, point in zip(runs, labels(runs), chosen, strict=True):
        agent = run.agent(point)
        for task, name in enumerate(run.config.envs):
            streams = np.random.SeedSequence([run.config.training.seed, 1, seed]).spawn(2)
            pool = make_pool(
                [name], run.config.env_options, min(num_envs, episodes), streams[0], rewards=run.config.rewards
            )
            counting: Any = CountingPool(pool)
            draws = int(streams[1].generate_state(1)[0])
            played, _ = play_games(
                agent, counting, episodes, max_steps, greedy=greedy, seed=draws, task=task, doing=f"playing {label}"
            )
            shares = _by_game(played, pool.action_spec.names)
            counted.append(Counted(label, task_name(name), point.steps, pool.action_spec.names, shares))
    if path is None:
        path = runs[0].new_path("looks", f"actions-{chosen[0].steps:012d}", ".png")
    plt = pyplot()
    figure = _figure(plt, counted)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    _write(counted, path.with_suffix(".csv"), "greedy" if greedy else "sampled", seed)
    _show(counted)
    note(f"written: {path} and .csv")
    return counted


def _by_game(episodes: list[Episode], names: Sequence[str]) -> np.ndarray:
    """Shares [G,A] of the decisions of whole games, whose lives follow each other."""
    games, running = [], np.zeros(len(names))
    for episode in episodes:
        running += [episode.measures[_measure(name)] for name in names]
        if episode.game_over:
            games.append(running / running.sum())
            running = np.zeros(len(names))
    return np.stack(games)


def groups(names: Sequence[str], task: str) -> dict[str, dict[str, list[int]]]:
    """Ways to put actions together, by their names: {way: {group: which actions}}. None where no name says FIRE."""
    if not any(name.endswith("FIRE") for name in names):
        return {}
    moves: dict[str, list[int]] = {}
    fires: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        move = name.removesuffix("FIRE") or "NOOP"
        if task in MOVES:
            move = next((where for part, where in MOVES[task].items() if part in name), "NOOP")
        moves.setdefault(move, []).append(k)
        fires.setdefault("FIRE" if name.endswith("FIRE") else name, []).append(k)
    return {"moves": moves} if task in MOVES else {"moves": moves, "fire as one": fires}


def _figure(plt: Any, counted: list[Counted]) -> Any:
    """A row for each task, a panel for each grouping, in it bars side by side for each run, which has one colour in all."""
    runs = list(dict.fromkeys(each.run for each in counted))
    tasks = list(dict.fromkeys(each.task for each in counted))
    ways = list(dict.fromkeys(way for each in counted for way in each.groupings()))
    size = (5 * len(ways), 3 * len(tasks) + 0.4)
    figure, grid = plt.subplots(len(tasks), len(ways), figsize=size, dpi=150, squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        own = [each for each in counted if each.task == task]
        for axes, way in zip(row, ways, strict=True):
            shown = list(dict.fromkeys(label for each in own for label in each.groupings().get(way, ())))
            if not shown:
                axes.set_axis_off()
                continue
            width = 0.8 / len(own)
            for k, each in enumerate(own):
                if not (found := each.groupings().get(way)):
                    continue
                places = [shown.index(label) + (k - (len(own) - 1) / 2) * width for label in found]
                means, deviations = ([100 * f(x) for x in found.values()] for f in (np.mean, np.std))
                name, color = f"{each.run} ({len(each.shares)} games)", f"C{runs.index(each.run)}"
                axes.bar(places, means, width, yerr=deviations, label=name, error_kw={"linewidth": 0.8}, color=color)
            axes.set_xticks(range(len(shown)), shown, rotation=90 if len(shown) > 6 else 0, fontsize="x-small")
            axes.set_title(f"{task}: {way}", fontsize="medium")
            axes.set_ylabel("% of decisions")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    bars = {name: handle for handles, names in legends for handle, name in zip(handles, names, strict=True)}
    figure.legend(
        bars.values(), bars.keys(), frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.02, 0.02)
    )
    figure.tight_layout()
    return figure


def _write(counted: list[Counted], path: Path, policy: str, seed: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "checkpoint", "task", "grouping", "action", "mean", "sd", "games", "policy", "seed"])
        for each in counted:
            for way, found in each.groupings().items():
                for label, shares in found.items():
                    numbers = [f"{shares.mean():.6g}", f"{shares.std():.6g}", len(shares)]
                    writer.writerow([each.run, each.checkpoint, each.task, way, label, *numbers, policy, seed])


def _show(counted: list[Counted]) -> None:
    for task in dict.fromkeys(each.task for each in counted):
        own = [each for each in counted if each.task == task]
        table = Table(title=f"{task}: % of decisions, mean over games ± deviation")
        table.add_column("action")
        for each in own:
            table.add_column(each.run, justify="right")
        found = [each.groupings()["actions"] for each in own]
        for name in dict.fromkeys(name for each in own for name in each.names):
            cells = [100 * shares[name] if name in shares else None for shares in found]
            table.add_row(name, *("" if x is None else f"{x.mean():.1f} ± {x.std():.1f}" for x in cells))
        stdout.print(table)
