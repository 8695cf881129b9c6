"""Action statistics (`bestiary look actions`): how often agents choose each action, as figure, table and CSV file.

Two policies with similar returns may use different actions, or never use some actions. The share of each action is
computed for each game, so that the standard deviation over games is known. In some environments, the names of some
actions end with FIRE, for example LEFTFIRE. The shares are then also computed for groups of actions, in two ways
("groupings"):

    movement        actions with the same movement form a group, for example LEFT and LEFTFIRE
    fire merged     all actions that fire form a group; not computed for Pong
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.config.config import make_vector_env
from bestiary.envs.atari_games import MOVEMENTS
from bestiary.envs.multitask import task_name
from bestiary.envs.vector_env import VectorEnv, VectorEnvWrapper
from bestiary.evaluation.figure_helpers import check_figure_path, import_pyplot
from bestiary.evaluation.game_runner import play_games
from bestiary.rollout import ArraySpec, Episode, Step
from bestiary.runs import checkpoints
from bestiary.runs.run import Run, run_labels
from bestiary.utils.console import note, plain, stdout

MEASURE_PREFIX = "action "  # the names of the measures that count actions begin with this prefix


@dataclass
class ActionShares:
    """How often a run's agent chose each of A actions in each of G games of one task."""

    run: str
    task: str
    checkpoint: int  # step count of the checkpoint
    names: tuple[str, ...]  # names of the actions
    shares: np.ndarray  # [G,A] how often each action was chosen, divided by the number of steps of the game

    def groupings(self) -> dict[str, dict[str, np.ndarray]]:
        """Return {grouping: {group of actions: array [G]}}.

        The array contains, for each of G games, the fraction of steps in which an action of the group was chosen.

        The grouping "actions" has one group for each action. See `group_actions` for the other groupings.
        """
        shares = {"actions": {name: self.shares[:, k] for k, name in enumerate(self.names)}}
        for grouping, groups in group_actions(self.names, self.task).items():
            shares[grouping] = {group: self.shares[:, members].sum(axis=1) for group, members in groups.items()}
        return shares


class ActionCountWrapper(VectorEnvWrapper):
    """Wrapper that counts the actions that are taken in a vector environment.

    For each action, it reports a measure in each step: 1 if the environment has just taken this action, otherwise 0.
    Evaluation sums each measure over an episode, so the sum is the count of the action. The environment's own measures
    are left out.
    """

    def __init__(self, pool: VectorEnv):
        super().__init__(pool)
        self.measures_spec = {name: ArraySpec((), "float32") for name in map(_measure_name, pool.action_spec.names)}
        self.last_actions = np.zeros((pool.num_envs, pool.action_spec.n), np.float32)  # [N,A] one-hot

    def send(self, actions: np.ndarray) -> None:
        self.last_actions = np.eye(self.pool.action_spec.n, dtype=np.float32)[actions]
        self.pool.send(actions)

    def recv(self) -> Step:
        step = self.pool.recv()
        step.measures = dict(zip(self.measures_spec, self.last_actions.T, strict=True))
        return step


def _measure_name(action: str) -> str:
    return MEASURE_PREFIX + action


def measure_actions(
    runs: Sequence[Run],
    *,
    out: str | Path | None = None,
    episodes: int = 50,
    checkpoint_steps: Sequence[int | None] = (),
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
    overwrite: bool = False,
) -> list[ActionShares]:
    """Play whole games with the agent of each run, and count the actions that it chooses.

    Write a figure and a CSV file, and print a table for each task.

    Args:
        out: path of the figure. The default is a new file in the folder of the first run.
        episodes: number of games that each agent plays in each of its tasks.
        checkpoint_steps: for each run, the step count of its checkpoint, or None for the newest checkpoint. If the
            sequence is empty, the newest checkpoint of each run is used.
    """
    path = check_figure_path(out, overwrite) if out is not None else None
    requested = checkpoint_steps or [None] * len(runs)
    chosen = [checkpoints.choose(run.path, steps) for run, steps in zip(runs, requested, strict=True)]
    results = []
    for run, label, checkpoint in zip(runs, run_labels(runs), chosen, strict=True):
        agent = run.agent(checkpoint)
        for task, name in enumerate(run.config.envs):
            streams = np.random.SeedSequence([run.config.training.seed, 1, seed]).spawn(2)
            pool = make_vector_env(
                [name], run.config.env_options, min(num_envs, episodes), streams[0], rewards=run.config.rewards
            )
            wrapped: Any = ActionCountWrapper(pool)
            played, _ = play_games(
                agent,
                wrapped,
                episodes,
                max_steps,
                greedy=greedy,
                seed=int(streams[1].generate_state(1)[0]),
                task=task,
                description=f"playing {label}",
            )
            shares = _shares_by_game(played, pool.action_spec.names)
            results.append(ActionShares(label, task_name(name), checkpoint.steps, pool.action_spec.names, shares))
    if path is None:
        path = runs[0].new_output_path("interpretability", f"actions-{chosen[0].steps:012d}", ".png")
    plt = import_pyplot()
    figure = _draw_figure(plt, results)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    _write_csv(results, path.with_suffix(".csv"), "greedy" if greedy else "sampled", seed)
    _print_tables(results)
    note(f"written: {path} and {path.with_suffix('.csv').name}")
    return results


def _shares_by_game(episodes: list[Episode], names: Sequence[str]) -> np.ndarray:
    """Return the share of each of A actions in each of G games, [G,A].

    A game may have several episodes, one for each life. The episodes of a game follow each other in `episodes`.
    """
    games, counts = [], np.zeros(len(names))
    for episode in episodes:
        counts += [episode.measures[_measure_name(name)] for name in names]
        if episode.game_over:
            games.append(counts / counts.sum())
            counts = np.zeros(len(names))
    return np.stack(games)


def group_actions(names: Sequence[str], task: str) -> dict[str, dict[str, list[int]]]:
    """Group actions by their names in one or two ways ("groupings"). Return {grouping: {group: action indices}}.

    The grouping "movement" puts actions with the same movement together. The grouping "fire merged" puts all actions
    that fire together; tasks in MOVEMENTS (Pong) do not have this grouping. If no action fires, the dict is empty.
    """
    if not any(name.endswith("FIRE") for name in names):
        return {}
    movement: dict[str, list[int]] = {}
    fire_merged: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        move = name.removesuffix("FIRE") or "NOOP"
        if task in MOVEMENTS:
            move = next((direction for key, direction in MOVEMENTS[task].items() if key in name), "NOOP")
        movement.setdefault(move, []).append(k)
        fire_merged.setdefault("FIRE" if name.endswith("FIRE") else name, []).append(k)
    if task in MOVEMENTS:
        return {"movement": movement}
    return {"movement": movement, "fire merged": fire_merged}


def _draw_figure(plt: Any, results: list[ActionShares]) -> Any:
    """Draw a grid of panels: one row per task, one column per grouping of the actions.

    A run has the same colour in all panels.
    """
    runs = list(dict.fromkeys(result.run for result in results))
    tasks = list(dict.fromkeys(result.task for result in results))
    groupings = list(dict.fromkeys(grouping for result in results for grouping in result.groupings()))
    size = (5 * len(groupings), 3 * len(tasks) + 0.4)
    figure, grid = plt.subplots(len(tasks), len(groupings), figsize=size, dpi=150, squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        own = [result for result in results if result.task == task]
        for axes, grouping in zip(row, groupings, strict=True):
            groups = list(dict.fromkeys(group for result in own for group in result.groupings().get(grouping, ())))
            if not groups:
                axes.set_axis_off()
                continue
            width = 0.8 / len(own)
            for k, result in enumerate(own):
                if not (shares := result.groupings().get(grouping)):
                    continue
                x = [groups.index(group) + (k - (len(own) - 1) / 2) * width for group in shares]
                axes.bar(
                    x,
                    [100 * np.mean(values) for values in shares.values()],
                    width,
                    yerr=[100 * np.std(values) for values in shares.values()],
                    label=f"{result.run} ({len(result.shares)} games)",
                    error_kw={"linewidth": 0.8},
                    color=f"C{runs.index(result.run)}",
                )
            axes.set_xticks(range(len(groups)), groups, rotation=90 if len(groups) > 6 else 0, fontsize="x-small")
            axes.set_title(f"{task}: {grouping}", fontsize="medium")
            axes.set_ylabel("% of steps")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    bars = {name: handle for handles, names in legends for handle, name in zip(handles, names, strict=True)}
    figure.legend(
        bars.values(), bars.keys(), frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(0.02, 0.02)
    )
    figure.tight_layout()
    return figure


def _write_csv(results: list[ActionShares], path: Path, policy: str, seed: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "checkpoint", "task", "grouping", "action", "mean", "sd", "games", "policy", "seed"])
        for result in results:
            for grouping, groups in result.groupings().items():
                for group, shares in groups.items():
                    numbers = [f"{shares.mean():.6g}", f"{shares.std():.6g}", len(shares)]
                    writer.writerow(
                        [result.run, result.checkpoint, result.task, grouping, group, *numbers, policy, seed]
                    )


def _print_tables(results: list[ActionShares]) -> None:
    """Print one table for each task, with one column for each run."""
    for task in dict.fromkeys(result.task for result in results):
        own = [result for result in results if result.task == task]
        table = Table(title=plain(f"{task}: % of steps, mean over games ± standard deviation"))
        table.add_column("action")
        for result in own:
            table.add_column(plain(result.run), justify="right")
        shares_by_run = [result.groupings()["actions"] for result in own]
        for name in dict.fromkeys(name for result in own for name in result.names):
            cells = [100 * shares[name] if name in shares else None for shares in shares_by_run]
            table.add_row(plain(name), *("" if x is None else f"{x.mean():.1f} ± {x.std():.1f}" for x in cells))
        stdout.print(table)
