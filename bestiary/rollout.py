"""The records that travel along the data's way: Step, Episode, Rollout, and the Inputs an agent sees.

One alignment, explained once. The decision at time t is made on entry t and leads to entry t+1:

    entry        0          1          2     ...     T
    observation  o0         o1         o2            oT      what the agent sees
    reward       r0         r1         r2            rT      what the decision before brought
    done         d0         d1         d2            dT      the decision before ended the episode: o is a new one's first
    last_action  a-1        a0         a1            aT-1    the decision before
    action       a0         a1         a2     ...            the decision made here (last_action, shifted by one)
    log_prob     of a0      of a1      of a2
    bootstrap    b0         b1         b2                    value of the observation that a truncated episode ended on

So a rollout of T decisions has T+1 entries, its last entry is the next rollout's first, and reward, done and truncated
at t+1 follow the decision at t. Nothing is zeroed in storage; the agent masks last reward and last action by `~done`.

Shapes, everywhere: T time, B batch, N environments, A actions, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one kind of observation, without the batch axis: images are uint8 [C,H,W], vectors float32 [D]."""

    shape: tuple[int, ...]
    dtype: str
    sets: tuple[
        tuple[str, tuple[int, ...]], ...
    ] = ()  # of a vector: names for some of its entries; the first is the d-set


ObservationSpec = dict[str, ArraySpec]


@dataclass(frozen=True)
class ActionSpec:
    """A set of discrete actions, by name."""

    names: tuple[str, ...]

    @property
    def n(self) -> int:
        return len(self.names)


@dataclass
class Step:
    """What one step of a pool brings; row i is always environment i."""

    observation: Arrays  # [N,...] what to act on now; opens the new episode where done
    reward: np.ndarray  # [N] float32
    done: np.ndarray  # [N] bool: learning's episode ended (a life, where a lost life ends one)
    truncated: np.ndarray  # [N] bool: and it was a time limit that ended it, not the game
    game_over: np.ndarray  # [N] bool: the whole game ended
    task: np.ndarray  # [N] int64
    measures: Arrays = field(default_factory=dict)  # [N] or [N,...] by name: score, ram, ...
    final: Arrays = field(default_factory=dict)  # last observations of the truncated rows, in row order


@dataclass
class Episode:
    """A finished episode of learning's; where a lost life ends one, `game_over` marks the game's last."""

    step: int  # when it ended: of the rollout it travels with; of the run, once that is learnt from
    task: str
    ret: float
    length: int
    game_return: float  # of the whole game so far; the game's where game_over
    game_length: int
    game_over: bool
    env: int
    measures: dict[str, float]  # sums over the episode
    game_measures: dict[str, float] = field(default_factory=dict)  # and over the whole game so far


@dataclass
class Inputs:
    """What an agent sees, [T,B] in front."""

    observation: Tensors
    reward: Tensor
    done: Tensor
    last_action: Tensor
    task: Tensor

    def __getitem__(self, entries: slice) -> "Inputs":
        """Some of the entries in time."""
        observation = {kind: x[entries] for kind, x in self.observation.items()}
        rest = (self.reward, self.done, self.last_action, self.task)
        return Inputs(observation, *(x[entries] for x in rest))

    def to(self, device: torch.device) -> "Inputs":
        if self.reward.device == device:
            return self
        observation = {kind: x.to(device, non_blocking=True) for kind, x in self.observation.items()}
        rest = (self.reward, self.done, self.last_action, self.task)
        return Inputs(observation, *(x.to(device, non_blocking=True) for x in rest))

    @classmethod
    def of(cls, step: Step, last_action: np.ndarray) -> "Inputs":
        """One step of a pool as inputs [1,N]."""
        return cls(
            {kind: torch.from_numpy(array)[None] for kind, array in step.observation.items()},
            torch.from_numpy(step.reward)[None],
            torch.from_numpy(step.done)[None],
            torch.from_numpy(last_action)[None],
            torch.from_numpy(step.task)[None],
        )


@dataclass
class Rollout:
    """T decisions of N environments, as the actor saw and made them."""

    observation: Tensors  # [T+1,N,...]
    reward: Tensor  # [T+1,N] float32, raw
    done: Tensor  # [T+1,N] bool
    truncated: Tensor  # [T+1,N] bool
    task: Tensor  # [T+1,N] int64
    last_action: Tensor  # [T+1,N] int64
    measures: Tensors  # [T+1,N,...]
    log_prob: Tensor  # [T,N] of the actor
    value: Tensor  # [T,N] of the actor
    bootstrap: Tensor  # [T,N]
    version: Tensor  # [T,N] int64: of the weights that decided
    state: tuple[Tensor, ...]  # [N,...] memory before entry 0
    extras: Tensors = field(default_factory=dict)  # [T,N] by name: what an algorithm adds to learn from
    episodes: list[Episode] = field(default_factory=list)

    @classmethod
    def empty(
        cls,
        length: int,
        num_envs: int,
        spec: ObservationSpec,
        measures: dict[str, ArraySpec],
        state: tuple[Tensor, ...],
        pinned: bool = False,
    ) -> "Rollout":
        """`pinned` memory is copied to a GPU while the CPU goes on."""
        t, n = length, num_envs

        def entries(spec: ArraySpec) -> Tensor:
            shape, dtype = spec.shape, getattr(torch, spec.dtype)
            if len(shape) != 3:
                return torch.empty((t + 1, n, *shape), dtype=dtype, pin_memory=pinned)
            channels_last = torch.empty((t + 1, n, *shape[1:], shape[0]), dtype=dtype, pin_memory=pinned)
            return channels_last.permute(0, 1, 4, 2, 3)  # images [C,H,W], in the memory order that convolutions like

        return cls(
            observation={name: entries(s) for name, s in spec.items()},
            reward=torch.zeros(t + 1, n),
            done=torch.zeros(t + 1, n, dtype=torch.bool),
            truncated=torch.zeros(t + 1, n, dtype=torch.bool),
            task=torch.zeros(t + 1, n, dtype=torch.int64),
            last_action=torch.zeros(t + 1, n, dtype=torch.int64),
            measures={name: entries(s) for name, s in measures.items()},
            log_prob=torch.zeros(t, n),
            value=torch.zeros(t, n),
            bootstrap=torch.zeros(t, n),
            version=torch.zeros(t, n, dtype=torch.int64),
            state=state,
        )

    @property
    def length(self) -> int:
        return self.log_prob.shape[0]

    @property
    def num_envs(self) -> int:
        return self.log_prob.shape[1]

    @property
    def decisions(self) -> int:
        return self.length * self.num_envs

    @property
    def action(self) -> Tensor:
        """[T,N]: the decision at t is what entry t+1 knows as its last action."""
        return self.last_action[1:]

    def inputs(self) -> Inputs:
        return Inputs(self.observation, self.reward, self.done, self.last_action, self.task)

    def set_entry(self, t: int, step: Step, last_action: np.ndarray) -> None:
        for name, array in step.observation.items():
            self.observation[name][t] = torch.from_numpy(array)
        for name, array in step.measures.items():
            self.measures[name][t] = torch.from_numpy(array)
        self.reward[t] = torch.from_numpy(step.reward)
        self.done[t] = torch.from_numpy(step.done)
        self.truncated[t] = torch.from_numpy(step.truncated)
        self.task[t] = torch.from_numpy(step.task)
        self.last_action[t] = torch.from_numpy(last_action)

    def to(self, device: torch.device) -> "Rollout":
        """The rollout on a device; itself where it is there already."""
        if self.reward.device == device:
            return self
        return self._map(*[lambda x: x.to(device, non_blocking=True)] * 2)

    def columns(self, start: int, stop: int) -> "Rollout":
        """Environments start..stop as a rollout of their own: views, no copies."""
        return self._map(lambda x: x[:, start:stop], lambda s: s[start:stop])

    def take(self, columns: Tensor) -> "Rollout":
        """Some of the trajectories, copied, in the order asked for."""
        return self._map(lambda x: x.index_select(1, columns.to(x.device)), lambda s: s[columns.to(s.device)])

    def with_extras(self, **extras: Tensor) -> "Rollout":
        return replace(self, extras={**self.extras, **extras})

    def groups(self, size: int) -> Iterator["Rollout"]:
        """The rollout in groups of at most `size` whole trajectories, always in the same order."""
        for start in range(0, self.num_envs, size):
            yield self.columns(start, min(start + size, self.num_envs))

    def _map(self, entries: Callable[[Tensor], Tensor], state: Callable[[Tensor], Tensor]) -> "Rollout":
        def convert(name: str, value: Any) -> Any:
            if name == "state":
                return tuple(state(s) for s in value)
            if name == "episodes":
                return value
            return {k: entries(v) for k, v in value.items()} if isinstance(value, dict) else entries(value)

        return Rollout(**{f.name: convert(f.name, getattr(self, f.name)) for f in fields(self)})


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Several rollouts of equal length side by side as one."""
    if len(rollouts) == 1:
        return rollouts[0]

    def join(name: str) -> Any:
        values = [getattr(r, name) for r in rollouts]
        if name == "state":
            return tuple(torch.cat(parts) for parts in zip(*values, strict=True))
        if name == "episodes":
            return [episode for value in values for episode in value]
        if isinstance(values[0], dict):
            return {key: torch.cat([v[key] for v in values], dim=1) for key in values[0]}
        return torch.cat(values, dim=1)

    return Rollout(**{f.name: join(f.name) for f in fields(Rollout)})


class Episodic(Protocol):
    """A rollout, or what is known of one that is elsewhere."""

    episodes: list[Episode]

    @property
    def decisions(self) -> int: ...


def episodes_of(rollouts: Sequence[Episodic]) -> list[Episode]:
    """The episodes of rollouts that were played one after the other, each with its step counted from the first's start."""
    found, before = [], 0
    for rollout in rollouts:
        for episode in rollout.episodes:
            episode.step += before
            found.append(episode)
        before += rollout.decisions
    return found
