"""Play a fixed number of whole games, without a bias towards short games.

The games that end first are mostly short. If N games are wanted, the first N games to end would be a biased sample.
Therefore the number of games that each environment has to play is fixed in advance: all environments play equally many
games, or some of them play one more. The result contains exactly these games.

If the games have levels (ProcGen), the number of games of each level is fixed instead. All levels are played equally
often, or some of them are played once more. An environment that starts a game gets a level that has not been played
often enough. If there are more levels than games, each level is played at most once.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import Progress

from bestiary.agents.agent import Agent
from bestiary.agents.policy_runner import run_policy
from bestiary.envs.episode_stats import EpisodeTracker
from bestiary.envs.vector_env import VectorEnv
from bestiary.rollout import Episode, Step
from bestiary.utils.console import is_interactive, note, printable, stderr, warn
from bestiary.utils.errors import RunError


class EvaluationInterrupted(Exception):
    """The caller's `should_stop` returned True before all games were played."""


def play_games(
    agent: Agent,
    pool: VectorEnv,
    episodes: int,
    max_steps: int,
    *,
    greedy: bool,
    seed: int,
    task: int = 0,
    reset_state_every: int | None = None,
    description: str = "evaluating",
    should_stop: Callable[[], bool] = lambda: False,
    balance_levels: bool = True,
) -> tuple[list[Episode], int]:
    """Play `episodes` whole games of one task with an agent. See `collect_games` for the result and other arguments.

    `task` is the index of the task among the tasks that the agent was trained on. If `reset_state_every` is given, the
    recurrent state is reset every `reset_state_every` steps, even in the middle of a game.
    """
    records = run_policy(agent, pool, greedy=greedy, seed=seed, task=task, reset_state_every=reset_state_every)
    steps = (record.step for record, _ in records)
    return collect_games(steps, pool, episodes, max_steps, description, should_stop, balance_levels)


def collect_games(
    steps: Iterator[Step],
    pool: VectorEnv,
    episodes: int,
    max_steps: int,
    description: str = "evaluating",
    should_stop: Callable[[], bool] = lambda: False,
    balance_levels: bool = True,
) -> tuple[list[Episode], int]:
    """Collect `episodes` whole games from the steps of the vector environment `pool`, and then close `pool`.

    Return the episodes of these games, sorted by environment, and the number of missing games. A game is missing if it
    has not ended after `max_steps` steps, or if it was not started because another game occupied its environment for
    too long. If the games have levels, each level is played equally often; with `balance_levels` False, levels are
    chosen at random instead. Raise EvaluationInterrupted if `should_stop` returns True, and RunError if no game ends.
    """
    n = pool.num_envs
    level_pool: Any = pool.unwrapped if pool.unwrapped.has_levels else None
    by_level = level_pool is not None and balance_levels
    if by_level:
        level_pool.set_level_quota(episodes)
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)  # [N] games that each environment has to play
    tracker = EpisodeTracker(n, pool.tasks, pool.measures_spec)
    played = np.zeros(n, np.int64)  # [N] number of games that each environment has finished
    unfinished = 0  # number of games that were discarded because they reached `max_steps`
    game_episodes: list[list[Episode]] = [[] for _ in range(n)]  # finished episodes of each running game
    result: list[Episode] = []
    try:
        next(steps)
        with Progress(console=stderr, disable=not is_interactive(), transient=True) as progress:
            bar = progress.add_task(escape(printable(description)), total=episodes)
            age = np.zeros(n, np.int64)  # [N] number of steps of each running game
            last_printed = time.monotonic()
            while True:
                counting = level_pool.in_quota.copy() if by_level else played < quota
                needs_more = np.full(n, bool(level_pool.quota_left)) if by_level else counting
                # A game that has reached `max_steps` is not included in the results. If its environment has to play
                # more games, wait until the game ends, but at most until it has 2 x `max_steps` steps.
                waiting = needs_more & (age >= max_steps) & (age < 2 * max_steps)
                counting &= age < max_steps
                if not (counting | waiting).any():
                    break
                if should_stop():
                    raise EvaluationInterrupted
                level = level_pool.level.copy() if level_pool is not None else None
                step = next(steps)
                age = np.where(step.game_over, 0, age + 1)
                for episode in tracker.add(step, 0):
                    if counting[episode.env]:
                        if level is not None:
                            episode.measures["level"] = float(level[episode.env])
                        game_episodes[episode.env].append(episode)
                        if episode.game_over:
                            result += game_episodes[episode.env]
                            game_episodes[episode.env] = []
                            played[episode.env] += 1
                too_long = counting & (age >= max_steps)
                unfinished += int(too_long.sum())
                quota[too_long] -= 1
                for row in np.flatnonzero(too_long):
                    game_episodes[row] = []
                progress.update(bar, completed=int(played.sum()))
                if not is_interactive() and time.monotonic() - last_printed > 10:
                    last_printed = time.monotonic()
                    note(f"{description}: {played.sum()} of {episodes} games have ended")
    finally:
        pool.close()
    missing = episodes - int(played.sum())
    if missing:
        not_started = f"; {missing - unfinished} more games were not started" if missing > unfinished else ""
        warn(
            f"{unfinished} of {episodes} games had not ended after {max_steps} steps and are not included{not_started}"
        )
    if missing == episodes:
        raise RunError(f"no game ended within {max_steps} steps; choose a larger --max-steps")
    return sorted(result, key=lambda e: e.env), missing
