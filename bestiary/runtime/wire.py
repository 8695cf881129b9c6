"""How rollouts and weights travel between processes: as plain arrays, which Ray puts into shared memory as they are.

Pictures that show the last frames side by side travel as single frames, a quarter of their size for the usual four; they are
stacked again where they are learnt from. What arrives is read-only memory that others may be reading, too.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestiary.envs.observations import FrameStack
from bestiary.rollout import Rollout, Tensors

Parcel = dict[
    str, Any
]  # the fields of a rollout as arrays; of a stacked picture, (the first stacks, the newest frames)


def share_of(rollout: Rollout, rank: int, learners: int, batch_size: int) -> Rollout:
    """The trajectories of a rollout that one of several learners learns from: its even share of every batch."""
    if learners == 1:
        return rollout
    together = min(batch_size, rollout.num_envs)  # trajectories of this rollout that are in one batch
    column = torch.arange(rollout.num_envs)
    return rollout.take(column[column % together // (together // learners) == rank])


def pack(rollout: Rollout, stacked: Mapping[str, int]) -> Parcel:
    """`stacked`: how many frames the pictures show side by side, by their kind."""

    def packed(name: str, value: Any) -> Any:
        if name == "state":
            return [_array(s) for s in value]
        if name == "observation":
            return {kind: _pack_pictures(x, stacked.get(kind, 1)) for kind, x in value.items()}
        return {key: _array(x) for key, x in value.items()} if isinstance(value, dict) else _array(value)

    return {f.name: packed(f.name, getattr(rollout, f.name)) for f in fields(Rollout) if f.name != "episodes"}


def unpack(parcel: Parcel) -> Rollout:
    """The rollout, without its episodes: those do not go to the learner."""
    done = parcel["done"]

    def tensor(name: str, value: Any) -> Any:
        if name == "state":
            return tuple(_tensor(array) for array in value)
        if name == "observation":
            return {kind: _unpack_pictures(array, done) for kind, array in value.items()}
        return {key: _tensor(x) for key, x in value.items()} if isinstance(value, dict) else _tensor(value)

    return Rollout(**{name: tensor(name, value) for name, value in parcel.items()})


def _pack_pictures(x: Tensor, depth: int) -> Any:
    if x.dim() != 5:
        return _array(x)
    pictures = x.permute(0, 1, 3, 4, 2).numpy()  # [T+1,N,H,W,C], as they lie in memory
    if depth == 1:
        return (np.ascontiguousarray(pictures), None)
    newest = pictures[1:, ..., -(pictures.shape[-1] // depth) :]
    return (np.ascontiguousarray(pictures[0]), np.ascontiguousarray(newest))


def _unpack_pictures(packed: Any, done: np.ndarray) -> Tensor:
    if isinstance(packed, np.ndarray):
        return _tensor(packed)
    first, newest = packed
    if newest is None:
        return _tensor(first).permute(0, 1, 4, 2, 3)
    stack = FrameStack(first.shape[-1] // newest.shape[-1])
    stack.frames = first
    pictures = np.empty((len(newest) + 1, *first.shape), first.dtype)
    pictures[0] = first
    for t, frames in enumerate(newest, start=1):
        stack.push(np.moveaxis(frames, -1, 1), done[t])
        pictures[t] = stack.frames
    return torch.from_numpy(pictures).permute(0, 1, 4, 2, 3)


def arrays_in(parcel: Any) -> Iterator[np.ndarray]:
    """All arrays of a parcel."""
    if isinstance(parcel, np.ndarray):
        yield parcel
    elif isinstance(parcel, dict | list | tuple):
        for inner in parcel.values() if isinstance(parcel, dict) else parcel:
            yield from arrays_in(inner)


def arrays_of(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [_array(tensor) for tensor in tensors]


def tensors_of(arrays: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
    """Without a copy: to be read only."""
    return tuple(_tensor(array) for array in arrays)


def pack_state(tensors: Mapping[str, Tensors]) -> dict[str, dict[str, np.ndarray]]:
    """What `Learner.save` gives."""
    return {file: {name: _array(tensor) for name, tensor in inner.items()} for file, inner in tensors.items()}


def unpack_state(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Tensors]:
    """For `Learner.load`: tensors of its own, for it will write to them."""
    return {file: {name: torch.tensor(array) for name, array in inner.items()} for file, inner in arrays.items()}


def _array(tensor: Tensor) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes an axis for those that have none


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
