"""The data classes that environments produce: ArraySpec and ActionSpec, Step and Episode. They contain NumPy arrays.

`rollout.py` has the data classes with tensors. This module does not import torch, so commands that only list or check
environments start fast.
"""

from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of an observation or a measure, without the batch axis.

    Images are uint8 with the shape [C,H,W]. Vectors of D numbers are float32 with the shape [D].
    """

    shape: tuple[int, ...]
    dtype: str
    # Named subsets of the elements of a vector observation, as pairs (name, indices). The memory of the IAM agent
    # receives only the elements of one subset. By default, this is the first subset; --agent.dset selects another.
    sets: tuple[tuple[str, tuple[int, ...]], ...] = ()


ObservationSpec = dict[str, ArraySpec]


@dataclass(frozen=True)
class ActionSpec:
    """The names of the discrete actions."""

    names: tuple[str, ...]

    @property
    def n(self) -> int:
        """The number of actions."""
        return len(self.names)


@dataclass
class Step:
    """The result of one step of a vector environment. Row i always belongs to environment i."""

    # Arrays [N,...] by name. A row in which `done` is True contains the first observation of the new episode.
    observation: Arrays
    reward: np.ndarray  # [N] float32
    done: np.ndarray  # [N] bool: the episode ended (game over, time limit or, with --episodic-life, a lost life)
    truncated: np.ndarray  # [N] bool: a time limit ended the episode
    game_over: np.ndarray  # [N] bool: the whole game ended
    task: np.ndarray  # [N] int64: index of the task
    # [N] or [N,...] by name: numbers that the environment reports in addition to the reward, for example the score.
    measures: Arrays = field(default_factory=dict)
    # The final observations of the truncated episodes, by name as in `observation`. Each array has one row for each
    # True in `truncated`, in the same order. If no episode was truncated, the dict may be empty.
    final: Arrays = field(default_factory=dict)


@dataclass
class Episode:
    """A finished episode. With --episodic-life, a game has several episodes, and `game_over` marks the last episode."""

    # The step at which the episode ended. The actor counts it from the start of the rollout. `collect_episodes` and the
    # training session add the steps before the rollout, so that it finally counts from the start of the run.
    step: int
    task: str
    episode_return: float
    length: int
    game_return: float  # return from the start of the game to the end of this episode
    game_length: int  # number of steps from the start of the game to the end of this episode
    game_over: bool
    env: int  # index of the environment among all environments of the run
    measures: dict[str, float]  # sum of each measure over the episode
    game_measures: dict[str, float] = field(default_factory=dict)  # sums since the start of the game
