"""Whole games, counted fairly, whoever plays them.

Every environment plays the same number of games (or one more), and exactly those count: taking the first games to finish
instead would favour short ones. Where games have levels, those are dealt out as environments ask for them, each equally often
(none twice, where there are more levels than games), and every game that was dealt counts.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.progress import Progress

from bestiary.agents.agent import Agent
from bestiary.analysis.play import play
from bestiary.console import interactive, note, stderr, warn
from bestiary.envs.pool import Pool
from bestiary.envs.rewards import bare
from bestiary.errors import RunError
from bestiary.rollout import Episode, Step
from bestiary.runtime.episodes import EpisodeCounter


class Stopped(Exception):
    """Games were cut off because somebody asked for it."""


def play_games(
    agent: Agent,
    pool: Pool,
    episodes: int,
    max_steps: int,
    *,
    greedy: bool,
    seed: int,
    task: int = 0,
    carry: int | None = None,
    doing: str = "evaluating",
    stop: Callable[[], bool] = lambda: False,
    dealt: bool = True,
) -> tuple[list[Episode], int]:
    """The episodes of so many whole games of a pool of one task, the agent's how-manyeth `task` says; and how many games
    are missing. Levels are `dealt` out equally often, else by chance. Closes the pool. Raises Stopped where `stop` says so."""
    moments = play(agent, pool, greedy=greedy, seed=seed, task=task, carry=carry)
    return count_games((step for step, _ in moments), pool, episodes, max_steps, doing, stop, dealt)


def count_games(
    steps: Iterator[Step],
    pool: Pool,
    episodes: int,
    max_steps: int,
    doing: str = "evaluating",
    stop: Callable[[], bool] = lambda: False,
    dealt: bool = True,
) -> tuple[list[Episode], int]:
    """The episodes of so many whole games among the steps of a pool, whoever plays; and how many games are missing."""
    n = pool.num_envs
    levels: Any = found if hasattr(found := bare(pool), "owe") else None  # ProcGen's
    by_level = levels is not None and dealt
    if by_level:
        levels.owe(episodes)
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)  # games that environment i owes
    counter = EpisodeCounter(n, pool.tasks, pool.measures_spec)
    played, given_up = np.zeros(n, np.int64), 0
    lives: list[list[Episode]] = [[] for _ in range(n)]  # of the running games: they count once the game does
    result: list[Episode] = []
    try:
        next(steps)
        with Progress(console=stderr, disable=not interactive(), transient=True) as progress:
            bar, age, said = progress.add_task(doing, total=episodes), np.zeros(n, np.int64), time.monotonic()
            while True:
                owing = levels.counts.copy() if levels and by_level else played < quota
                more = np.full(n, bool(levels.owed)) if levels and by_level else owing
                waiting = more & (age >= max_steps) & (age < 2 * max_steps)  # for the end of a game that was given up
                owing &= age < max_steps  # else whatever comes of the game does not count
                if not (owing | waiting).any():
                    break
                if stop():
                    raise Stopped
                level = levels.level.copy() if levels else None
                step = next(steps)
                age = np.where(step.game_over, 0, age + 1)  # of the running game
                for episode in counter.add(step, 0):
                    if owing[episode.env]:
                        if level is not None:
                            episode.measures["level"] = float(level[episode.env])
                        lives[episode.env].append(episode)
                        if episode.game_over:
                            result += lives[episode.env]
                            lives[episode.env] = []
                            played[episode.env] += 1
                endless = owing & (age >= max_steps)
                given_up += int(endless.sum())
                quota[endless] -= 1
                for row in np.flatnonzero(endless):
                    lives[row] = []
                progress.update(bar, completed=int(played.sum()))
                if not interactive() and time.monotonic() - said > 10:
                    said = time.monotonic()
                    note(f"{doing}: {played.sum()} of {episodes} games")
    finally:
        pool.close()
    missing = episodes - int(played.sum())
    if missing:
        others = f"; {missing - given_up} more were not begun, behind one of those" if missing > given_up else ""
        warn(f"{given_up} of {episodes} games had not ended after {max_steps} steps and do not count{others}")
    if missing == episodes:
        raise RunError(f"no game ended within {max_steps} steps (--max-steps)")
    return sorted(result, key=lambda e: e.env), missing
