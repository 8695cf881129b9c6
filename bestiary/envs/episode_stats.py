"""Statistics of episodes: sums over the current episode of an environment, and means over the last games of a task."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bestiary.step import Arrays, ArraySpec, Episode, Step


class EpisodeTracker:
    """Sums the rewards, steps and measures of N environments, and returns an Episode whenever an episode ends."""

    def __init__(self, num_envs: int, tasks: tuple[str, ...], measures: Mapping[str, ArraySpec], first_env: int = 0):
        """Create a tracker for the environments `first_env` to `first_env` + N - 1 of the run."""
        self.tasks = tasks
        self.first_env = first_env
        self.measures = [name for name, spec in measures.items() if spec.shape == ()]
        names = ["return", "length", "game_return", "game_length"]
        names += [f"{prefix}measure.{name}" for name in self.measures for prefix in ("", "game_")]
        self.sums: Arrays = {name: np.zeros(num_envs, np.float64) for name in names}

    def add(self, step: Step, at: int) -> list[Episode]:
        """Add one step of all environments. Return the episodes that ended in this step.

        The episodes are in the order of the environments. Their field `Episode.step` is set to `at`.
        """
        sums = self.sums
        for name, amount in (("return", step.reward), ("length", 1)):
            sums[name] += amount
            sums[f"game_{name}"] += amount
        for name in self.measures:
            sums[f"measure.{name}"] += step.measures[name]
            sums[f"game_measure.{name}"] += step.measures[name]
        if not step.done.any():
            return []
        episodes = [self._make_episode(row, step, at) for row in np.flatnonzero(step.done)]
        for name, array in sums.items():
            array[step.game_over if name.startswith("game_") else step.done] = 0
        return episodes

    def _make_episode(self, row: np.intp, step: Step, at: int) -> Episode:
        sums = {name: float(array[row]) for name, array in self.sums.items()}
        return Episode(
            step=at,
            task=self.tasks[int(step.task[row])],
            episode_return=sums["return"],
            length=int(sums["length"]),
            game_return=sums["game_return"],
            game_length=int(sums["game_length"]),
            game_over=bool(step.game_over[row]),
            env=self.first_env + int(row),
            measures={name: sums[f"measure.{name}"] for name in self.measures},
            game_measures={name: sums[f"game_measure.{name}"] for name in self.measures},
        )


class TaskStats:
    """Statistics of one task: the number of finished games, and the results of the last 100 games.

    The results of a game are its return, its length and its true returns (the sums of the true rewards).

    At the start of a run, short games finish first. The mean return is therefore biased until each environment has
    finished a game (see `num_waiting`).
    """

    def __init__(
        self,
        games: int = 0,
        recent: Iterable[Sequence[float]] = (),
        waiting: Iterable[int] = (),
        channels: Sequence[str] = (),
    ):
        self.games = games
        self.waiting = set(waiting)  # indices of the environments that have not finished a game yet
        self.channels = channels  # names of the true rewards in `Step.measures`: true, true_2, ...
        self.recent: deque[Sequence[float]] = deque(recent, maxlen=100)  # one (return, length, *true returns) per game

    def add(self, episode: Episode) -> None:
        """Add a finished game. `episode` is the last episode of the game; it contains sums over the whole game."""
        self.games += 1
        self.waiting.discard(episode.env)
        true_returns = [episode.game_measures[name] for name in self.channels]
        self.recent.append((episode.game_return, episode.game_length, *true_returns))

    @property
    def num_waiting(self) -> int:
        """The number of environments that have not finished a game yet."""
        return len(self.waiting)

    def save(self) -> dict[str, Any]:
        """Return the statistics for state.json. The keys are the arguments of the constructor except `channels`."""
        return {"games": self.games, "recent": list(self.recent), "waiting": sorted(self.waiting)}

    @property
    def mean_return(self) -> float:
        """The mean return of the last 100 games; NaN if no game has finished."""
        return self._mean(0)

    @property
    def mean_length(self) -> float:
        """The mean length of the last 100 games, in steps; NaN if no game has finished."""
        return self._mean(1)

    def true_returns(self) -> dict[str, float]:
        """Return the mean true returns of the last 100 games by name: `true_return`, `true_return_2`, ..."""
        return {return_name(name): self._mean(2 + k) for k, name in enumerate(self.channels)}

    def _mean(self, column: int) -> float:
        return float(np.mean([game[column] for game in self.recent])) if self.recent else float("nan")


def return_name(channel: str) -> str:
    """Return the name of the table column, for example of episodes.csv, that contains the return of a reward.

    `channel` is the name of the reward in `Step.measures`. The column of "training" is "training_return"; the column of
    "true_2" is "true_return_2".
    """
    name, _, number = channel.partition("_")
    return f"{name}_return{f'_{number}' if number else ''}"


def short_name(task: str) -> str:
    """Return the task name without its family: atari/Pong -> Pong."""
    return task.rsplit("/", 1)[-1]
