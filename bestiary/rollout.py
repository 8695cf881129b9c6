"""The data classes that actors and learners exchange: Inputs and Rollout. For `Step` and `Episode` see `step.py`.

Alignment: the action at time t is chosen from the observation of entry t and leads to entry t+1.

    entry        0          1          2     ...     T
    observation  o0         o1         o2            oT      input of the agent
    reward       r0         r1         r2            rT      result of the previous action
    done         d0         d1         d2            dT      whether the previous action ended an episode; if so, the
                                                             observation is the first one of the next episode
    last_action  a-1        a0         a1            aT-1    the previous action
    action       a0         a1         a2     ...            the action chosen at this entry (last_action of entry t+1)
    log_prob     l0         l1         l2                    log-probability of this action
    bootstrap    b0         b1         b2                    if this action led to a time limit: value of the final
                                                             observation of the episode; else 0

A rollout of T steps therefore has T+1 entries, and its last entry is also the first entry of the next rollout. Reward,
done and truncated of entry t+1 are results of the action at t. A rollout stores rewards and actions unchanged. In
entries with `done`, agents by default replace the last reward and the last action in their inputs by zero.

Letters of shapes in the whole package: T time, B batch, N environments, A actions, K tasks, H hidden units.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bestiary.step import ActionSpec, Arrays, ArraySpec, Episode, ObservationSpec, Step

# Users' files, and modules that import torch anyway, may also import the data classes of `step.py` from here.
__all__ = [
    "ActionSpec",
    "ArraySpec",
    "Arrays",
    "Episode",
    "HasEpisodes",
    "Inputs",
    "ObservationSpec",
    "Rollout",
    "Step",
    "Tensors",
    "collect_episodes",
    "concatenate",
]

Tensors = dict[str, Tensor]


@dataclass
class Inputs:
    """The inputs of an agent. The first two axes of all tensors are [T,B]."""

    observation: Tensors
    reward: Tensor
    done: Tensor
    last_action: Tensor
    task: Tensor

    def __getitem__(self, entries: slice) -> "Inputs":
        """Return the inputs in a slice of the time axis."""
        observation = {kind: x[entries] for kind, x in self.observation.items()}
        others = (self.reward, self.done, self.last_action, self.task)
        return Inputs(observation, *(x[entries] for x in others))

    def to(self, device: torch.device) -> "Inputs":
        """Return the inputs on a device. If they are already there, return this object itself."""
        if self.reward.device == device:
            return self
        observation = {kind: x.to(device, non_blocking=True) for kind, x in self.observation.items()}
        others = (self.reward, self.done, self.last_action, self.task)
        return Inputs(observation, *(x.to(device, non_blocking=True) for x in others))

    @classmethod
    def from_step(cls, step: Step, last_action: np.ndarray) -> "Inputs":
        """Return one step of a vector environment as inputs [1,N]. The tensors share memory with the step."""
        return cls(
            {kind: torch.from_numpy(array)[None] for kind, array in step.observation.items()},
            torch.from_numpy(step.reward)[None],
            torch.from_numpy(step.done)[None],
            torch.from_numpy(last_action)[None],
            torch.from_numpy(step.task)[None],
        )


@dataclass
class Rollout:
    """T steps of N environments, collected by an actor. The docstring of this module explains the entries."""

    observation: Tensors  # [T+1,N,...]
    reward: Tensor  # [T+1,N] float32, before reward scaling and clipping
    done: Tensor  # [T+1,N] bool
    truncated: Tensor  # [T+1,N] bool: whether a time limit ended an episode
    task: Tensor  # [T+1,N] int64
    last_action: Tensor  # [T+1,N] int64
    measures: Tensors  # [T+1,N,...] by name: numbers that the environment reports besides the reward
    log_prob: Tensor  # [T,N] log-probability of the chosen action under the policy that chose it
    value: Tensor  # [T,N] value that the actor's agent estimated
    bootstrap: Tensor  # [T,N] if the action led to a time limit, value of the final observation; else 0
    version: Tensor  # [T,N] int64: version of the weights that chose the action
    state: tuple[Tensor, ...]  # [N,...] recurrent state before entry 0
    extras: Tensors = field(default_factory=dict)  # [T,N,...] by name: tensors that an algorithm adds, e.g. targets
    episodes: list[Episode] = field(default_factory=list)  # episodes that ended in this rollout

    @classmethod
    def empty(
        cls,
        length: int,
        num_envs: int,
        spec: ObservationSpec,
        measures: Mapping[str, ArraySpec],
        state: tuple[Tensor, ...],
        pinned: bool = False,
    ) -> "Rollout":
        """Return a new rollout of `length` steps without data.

        `spec` and `measures` give the shapes and types of the observations and measures by name. `state` is the
        recurrent state before entry 0. If `pinned` is True, the observations and measures are in pinned memory, from
        which they can be copied to a GPU asynchronously.
        """
        t, n = length, num_envs

        def allocate(spec: ArraySpec) -> Tensor:
            shape, dtype = spec.shape, getattr(torch, spec.dtype)
            if len(shape) != 3:
                return torch.empty((t + 1, n, *shape), dtype=dtype, pin_memory=pinned)
            # Images have the shape [C,H,W] but are stored in the order H,W,C, because convolutions are fastest then.
            channels_last = torch.empty((t + 1, n, *shape[1:], shape[0]), dtype=dtype, pin_memory=pinned)
            return channels_last.permute(0, 1, 4, 2, 3)

        return cls(
            observation={name: allocate(s) for name, s in spec.items()},
            reward=torch.zeros(t + 1, n),
            done=torch.zeros(t + 1, n, dtype=torch.bool),
            truncated=torch.zeros(t + 1, n, dtype=torch.bool),
            task=torch.zeros(t + 1, n, dtype=torch.int64),
            last_action=torch.zeros(t + 1, n, dtype=torch.int64),
            measures={name: allocate(s) for name, s in measures.items()},
            log_prob=torch.zeros(t, n),
            value=torch.zeros(t, n),
            bootstrap=torch.zeros(t, n),
            version=torch.zeros(t, n, dtype=torch.int64),
            state=state,
        )

    @property
    def length(self) -> int:
        """The number of steps per environment, T."""
        return self.log_prob.shape[0]

    @property
    def num_envs(self) -> int:
        """The number of environments, N."""
        return self.log_prob.shape[1]

    @property
    def num_steps(self) -> int:
        """The number of steps, summed over all environments: T * N."""
        return self.length * self.num_envs

    @property
    def action(self) -> Tensor:
        """The actions [T,N]. The action chosen at entry t is stored as the last action of entry t+1."""
        return self.last_action[1:]

    def inputs(self) -> Inputs:
        """Return the inputs of the agent, [T+1,N]."""
        return Inputs(self.observation, self.reward, self.done, self.last_action, self.task)

    def set_entry(self, t: int, step: Step, last_action: np.ndarray) -> None:
        """Copy a step, and the actions [N] that led to it, into entry t."""
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
        """Return the rollout on a device. If it is already there, return this object itself."""
        if self.reward.device == device:
            return self

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return self._map(move, move)

    def env_slice(self, start: int, stop: int) -> "Rollout":
        """Return a rollout with only the environments start to stop-1. It shares memory with this rollout."""
        return self._map(lambda x: x[:, start:stop], lambda s: s[start:stop])

    def select(self, envs: Tensor) -> "Rollout":
        """Return a new rollout with only the environments whose indices are in `envs`, in this order.

        The data is copied.
        """
        return self._map(lambda x: x.index_select(1, envs.to(x.device)), lambda s: s[envs.to(s.device)])

    def with_extras(self, **extras: Tensor) -> "Rollout":
        """Return a rollout with additional tensors [T,N,...] in `extras`.

        It shares all other tensors with this rollout.
        """
        return replace(self, extras={**self.extras, **extras})

    def split(self, size: int) -> Iterator["Rollout"]:
        """Split the rollout into rollouts of at most `size` environments, and yield them in order.

        The parts share memory with this rollout.
        """
        for start in range(0, self.num_envs, size):
            yield self.env_slice(start, min(start + size, self.num_envs))

    def _map(self, map_entries: Callable[[Tensor], Tensor], map_state: Callable[[Tensor], Tensor]) -> "Rollout":
        """Return a rollout with `map_entries` applied to all tensors [T,N,...] and `map_state` to the state [N,...]."""

        def convert(name: str, value: Any) -> Any:
            if name == "state":
                return tuple(map_state(s) for s in value)
            if name == "episodes":
                return value
            return {k: map_entries(v) for k, v in value.items()} if isinstance(value, dict) else map_entries(value)

        return Rollout(**{f.name: convert(f.name, getattr(self, f.name)) for f in fields(self)})


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts of equal length along the environment axis and return the result."""
    if len(rollouts) == 1:
        return rollouts[0]

    def join(name: str) -> Any:
        values = [getattr(r, name) for r in rollouts]
        if name == "state":
            return tuple(torch.cat(tensors) for tensors in zip(*values, strict=True))
        if name == "episodes":
            return [episode for value in values for episode in value]
        if isinstance(values[0], dict):
            return {key: torch.cat([v[key] for v in values], dim=1) for key in values[0]}
        return torch.cat(values, dim=1)

    return Rollout(**{f.name: join(f.name) for f in fields(Rollout)})


class HasEpisodes(Protocol):
    """Interface of objects that contain finished episodes: a rollout, or a summary of a rollout."""

    episodes: list[Episode]

    @property
    def num_steps(self) -> int: ...


def collect_episodes(rollouts: Sequence[HasEpisodes]) -> list[Episode]:
    """Return the episodes of consecutive rollouts in one list.

    `Episode.step` is changed in place: afterwards it is counted from the start of the first rollout.
    """
    episodes = []
    steps_before = 0
    for rollout in rollouts:
        for episode in rollout.episodes:
            episode.step += steps_before
            episodes.append(episode)
        steps_before += rollout.num_steps
    return episodes
