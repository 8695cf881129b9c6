"""Keeping count of what every environment earns, life by life and game by game."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from bestiary.rollout import Arrays, ArraySpec, Episode, Step


class EpisodeCounter:
    """Sums rewards, lengths and measures of N environments; hands out an Episode whenever one ends."""

    def __init__(self, num_envs: int, tasks: tuple[str, ...], measures: dict[str, ArraySpec]):
        self.tasks = tasks
        self.measures = [name for name, spec in measures.items() if spec.shape == ()]
        names = ["return", "length", "game_return", "game_length"]
        names += [f"{game}measure.{name}" for name in self.measures for game in ("", "game_")]
        self.sums: Arrays = {name: np.zeros(num_envs, np.float64) for name in names}

    def add(self, step: Step, at: int) -> list[Episode]:
        """Count one step, the rollout being `at` steps old; returns the episodes it ended, in row order."""
        sums = self.sums
        for name, amount in (("return", step.reward), ("length", 1)):
            sums[name] += amount
            sums[f"game_{name}"] += amount
        for name in self.measures:
            sums[f"measure.{name}"] += step.measures[name]
            sums[f"game_measure.{name}"] += step.measures[name]
        if not step.done.any():
            return []
        episodes = [self._episode(row, step, at) for row in np.flatnonzero(step.done)]
        for name, array in sums.items():
            array[step.game_over if name.startswith("game_") else step.done] = 0
        return episodes

    def _episode(self, row: np.intp, step: Step, at: int) -> Episode:
        sums = {name: float(array[row]) for name, array in self.sums.items()}
        return Episode(
            step=at,
            task=self.tasks[int(step.task[row])],
            ret=sums["return"],
            length=int(sums["length"]),
            game_return=sums["game_return"],
            game_length=int(sums["game_length"]),
            game_over=bool(step.game_over[row]),
            env=int(row),
            measures={name: sums[f"measure.{name}"] for name in self.measures},
            game_measures={name: sums[f"game_measure.{name}"] for name in self.measures},
        )


class Played:
    """Games of one task so far, and of the last hundred their return, length, and what each true reward came to."""

    def __init__(self, games: int = 0, recent: Iterable[Sequence[float]] = (), channels: Sequence[str] = ()):
        self.games, self.channels = games, channels
        self.recent: deque[Sequence[float]] = deque(recent, maxlen=100)

    def add(self, episode: Episode) -> None:
        self.games += 1
        true = [episode.game_measures[name] for name in self.channels]
        self.recent.append((episode.game_return, episode.game_length, *true))

    @property
    def mean_return(self) -> float:
        return self._mean(0)

    @property
    def mean_length(self) -> float:
        return self._mean(1)

    def true_returns(self) -> dict[str, float]:
        """The mean of each true reward: `true_return`, `true_return_2`, ..."""
        return {return_name(name): self._mean(2 + k) for k, name in enumerate(self.channels)}

    def _mean(self, which: int) -> float:
        return float(np.mean([game[which] for game in self.recent])) if self.recent else float("nan")


def return_name(channel: str) -> str:
    """trained -> trained_return, true_2 -> true_return_2: how a reward's sum over an episode is called."""
    name, _, number = channel.partition("_")
    return f"{name}_return{f'_{number}' if number else ''}"


def short_name(task: str) -> str:
    """atari/Pong -> Pong"""
    return task.rsplit("/", 1)[-1]
