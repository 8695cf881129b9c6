"""Conversion of rollouts, weights and learner states to NumPy arrays, which Ray sends between processes.

Ray stores arrays in shared memory without pickling them. The receiver gets read-only arrays, which other processes may
read at the same time. If an image observation is a stack of the last frames, each frame is sent only once, and the
receiver builds the stacks again. With the usual stacks of 4 frames, this reduces the size to about a quarter.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bestiary.envs.observation_transforms import FrameStack
from bestiary.rollout import Rollout, Tensors

# A rollout as arrays: a dict that maps the name of each field of `Rollout`, except `episodes`, to its arrays.
# Image observations become a pair of arrays. With frame stacks: (whole stacks of time step 0, newest frame of each of
# the time steps 1 to T). Without frame stacks: (images of all time steps, None).
Payload = dict[str, Any]


def shard(rollout: Rollout, rank: int, num_learners: int, batch_size: int) -> Rollout:
    """Return the part of a rollout for the learner with index `rank`. Each learner gets an equal part of each batch.

    Args:
        rollout: a rollout of N environments.
        rank: index of the learner in the learner group.
        num_learners: number of learners in the group.
        batch_size: number of trajectories per batch, summed over the learners.
    """
    if num_learners == 1:
        return rollout
    per_batch = min(batch_size, rollout.num_envs)  # number of trajectories of this rollout per batch
    column = torch.arange(rollout.num_envs)
    return rollout.select(column[column % per_batch // (per_batch // num_learners) == rank])


def pack_rollout(rollout: Rollout, frame_stacks: Mapping[str, int]) -> Payload:
    """Convert a rollout to arrays.

    Args:
        rollout: the rollout; its episodes are not part of the result.
        frame_stacks: name of an image observation -> number of its stacked frames. Image observations without frame
            stack are not listed.
    """

    def pack(name: str, value: Any) -> Any:
        if name == "state":
            return [_to_array(tensor) for tensor in value]
        if name == "observation":
            return {kind: _pack_observation(tensor, frame_stacks.get(kind, 1)) for kind, tensor in value.items()}
        if isinstance(value, dict):
            return {key: _to_array(tensor) for key, tensor in value.items()}
        return _to_array(value)

    return {f.name: pack(f.name, getattr(rollout, f.name)) for f in fields(Rollout) if f.name != "episodes"}


def unpack_rollout(payload: Payload) -> Rollout:
    """Convert arrays to a rollout without episodes."""
    done = payload["done"]

    def unpack(name: str, value: Any) -> Any:
        if name == "state":
            return tuple(_to_tensor(array) for array in value)
        if name == "observation":
            return {kind: _unpack_observation(packed, done) for kind, packed in value.items()}
        if isinstance(value, dict):
            return {key: _to_tensor(array) for key, array in value.items()}
        return _to_tensor(value)

    return Rollout(**{name: unpack(name, value) for name, value in payload.items()})


def _pack_observation(observation: Tensor, num_frames: int) -> Any:
    """Convert observations [T+1,N,...] to arrays.

    If the images are frame stacks, keep the whole stacks of time step 0, but only the newest frame of each later step.
    """
    if observation.dim() != 5:
        return _to_array(observation)
    images = observation.permute(0, 1, 3, 4, 2).numpy()  # [T+1,N,H,W,C], the order of the axes in memory
    if num_frames == 1:
        return (np.ascontiguousarray(images), None)
    newest = images[1:, ..., -(images.shape[-1] // num_frames) :]
    return (np.ascontiguousarray(images[0]), np.ascontiguousarray(newest))


def _unpack_observation(packed: Any, done: np.ndarray) -> Tensor:
    """Convert the result of `_pack_observation` to a tensor.

    `done` [T+1,N] marks the first time step of each episode. In this step, the frame stack consists of copies of the
    newest frame, because the episode has no earlier frames.
    """
    if isinstance(packed, np.ndarray):
        return _to_tensor(packed)
    first, newest = packed
    if newest is None:
        return _to_tensor(first).permute(0, 1, 4, 2, 3)
    stack = FrameStack(first.shape[-1] // newest.shape[-1])
    stack.frames = first
    images = np.empty((len(newest) + 1, *first.shape), first.dtype)
    images[0] = first
    for t, frames in enumerate(newest, start=1):
        stack.push(np.moveaxis(frames, -1, 1), done[t])
        images[t] = stack.frames
    return torch.from_numpy(images).permute(0, 1, 4, 2, 3)


def iterate_arrays(payload: Any) -> Iterator[np.ndarray]:
    """Yield all arrays in a payload, including arrays in nested dicts, lists and tuples."""
    if isinstance(payload, np.ndarray):
        yield payload
    elif isinstance(payload, dict):
        for value in payload.values():
            yield from iterate_arrays(value)
    elif isinstance(payload, list | tuple):
        for value in payload:
            yield from iterate_arrays(value)


def to_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Convert tensors to contiguous arrays in CPU memory."""
    return [_to_array(tensor) for tensor in tensors]


def to_tensors(arrays: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
    """Convert arrays to tensors. The tensors share the memory of the arrays and must not be changed."""
    return tuple(_to_tensor(array) for array in arrays)


def pack_state(tensors: Mapping[str, Tensors]) -> dict[str, dict[str, np.ndarray]]:
    """Convert the result of `Learner.save` to arrays."""
    return {file: {name: _to_array(tensor) for name, tensor in inner.items()} for file, inner in tensors.items()}


def unpack_state(arrays: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Tensors]:
    """Convert arrays to tensors for `Learner.load`. The tensors are copies, because the learner changes its tensors."""
    return {file: {name: torch.tensor(array) for name, array in inner.items()} for file, inner in arrays.items()}


def _to_array(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to a contiguous array in CPU memory."""
    array = tensor.detach().cpu().numpy()
    # `ascontiguousarray` converts a scalar to an array with one axis, which `reshape` removes.
    return np.ascontiguousarray(array).reshape(array.shape)


def _to_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor that shares its memory. The array may be read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
