"""A bounded buffer of trajectories that is a uniform random sample of all trajectories seen (reservoir sampling).

Algorithm R (Vitter 1985): the first `capacity` trajectories of the run are stored. Later, the n-th trajectory of the
run replaces a random stored trajectory with probability capacity / n; otherwise the n-th trajectory is dropped. At any
time, all trajectories of the run so far are equally likely to be in the buffer.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bestiary.rollout import Rollout, Tensors, concatenate

MAX_SEEN = 2**62  # a larger number of trajectories in a checkpoint is refused
TENSOR_FIELDS = tuple(f.name for f in fields(Rollout) if f.name != "episodes")  # fields with tensors


class ReservoirBuffer:
    """A buffer of at most `capacity` trajectories. Each trajectory is stored as a Rollout of one environment."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_seen = 0  # number of trajectories passed to `add`, including dropped ones
        self.trajectories: list[Rollout] = []

    def __len__(self) -> int:
        return len(self.trajectories)

    def add(self, rollout: Rollout, generator: torch.Generator) -> None:
        """Add the trajectories of a rollout by reservoir sampling. A trajectory may be dropped."""
        for column in range(rollout.num_envs):
            self.num_seen += 1
            if len(self) < self.capacity:
                self.trajectories.append(_copy(rollout, column))
                continue
            index = int(torch.randint(self.num_seen, (), generator=generator))
            if index < self.capacity:
                self.trajectories[index] = _copy(rollout, column)

    def sample(self, count: int, generator: torch.Generator) -> Rollout:
        """Return `count` random trajectories, drawn with replacement, as one rollout."""
        indices = torch.randint(len(self), (count,), generator=generator).tolist()
        return concatenate([self.trajectories[index] for index in indices])

    def shrink(self) -> None:
        """Drop trajectories from the end of the list until there are at most `capacity`."""
        del self.trajectories[self.capacity :]

    def save(self) -> Tensors:
        """Return the trajectories and `num_seen` as tensors by name, for a checkpoint."""
        stored = pack_trajectories(concatenate(self.trajectories)) if self.trajectories else {}
        return {"num_seen": torch.tensor(self.num_seen), **stored}

    def load(self, tensors: Tensors) -> None:
        """Restore the trajectories and `num_seen` from the result of `save`.

        Raise ValueError if `num_seen` is not valid. The trajectories must have been checked before.
        """
        self.num_seen = int(tensors["num_seen"])
        if not 0 <= self.num_seen < MAX_SEEN:
            raise ValueError(f"num_seen is {self.num_seen}; expected a whole number from 0 to {MAX_SEEN - 1}")
        self.trajectories = []
        if "reward" in tensors:
            everything = unpack_trajectories(tensors)
            if everything.num_envs > self.num_seen:
                raise ValueError(f"num_seen is {self.num_seen}, but there are {everything.num_envs} trajectories")
            self.trajectories = [_copy(everything, column) for column in range(everything.num_envs)]


def pack_trajectories(rollout: Rollout) -> Tensors:
    """Return the tensors of a rollout by name, for a checkpoint. Leave out the list of finished episodes."""
    tensors: Tensors = {}
    for name in TENSOR_FIELDS:
        value = getattr(rollout, name)
        if isinstance(value, dict):
            tensors |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, tuple):
            tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(value)}
        else:
            tensors[name] = value
    return tensors


def unpack_trajectories(tensors: Tensors) -> Rollout:
    """Return a rollout, given the tensors returned by `pack_trajectories`. Ignore further tensors."""

    def group(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    values: dict[str, Any] = {name: group(f"{name}.") for name in ("observation", "measures", "extras")}
    values |= {name: tensors[name] for name in TENSOR_FIELDS if name in tensors}
    state = group("state.")
    return Rollout(**values, state=tuple(state[str(index)] for index in range(len(state))))


def _copy(rollout: Rollout, column: int) -> Rollout:
    """Return a copy of one trajectory (environment `column`) of a rollout, without the list of finished episodes."""
    trajectory = rollout.select(torch.tensor([column]))
    trajectory.episodes = []
    return trajectory
