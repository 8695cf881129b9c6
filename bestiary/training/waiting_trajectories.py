"""Trajectories that wait for the next learn call, because they are too few for a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bestiary.algorithms.replay_buffer import pack_trajectories, unpack_trajectories
from bestiary.rollout import Rollout, Tensors, concatenate


class WaitingTrajectories:
    """Holds the trajectories that are left after a learn call: fewer than a batch needs.

    Args:
        batch_size: number of trajectories per batch. None: no trajectory ever waits.
    """

    def __init__(self, batch_size: int | None):
        self.batch_size = batch_size
        self.rollout: Rollout | None = None  # fewer than `batch_size` trajectories

    def complete(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return rollouts that contain a multiple of `batch_size` trajectories, or an empty list.

        The returned rollouts consist of the waiting trajectories and the new ones, in the order of collection. If the
        last trajectories are too few for a batch, they wait. If batches fit exactly, the rollouts are returned without
        copies.
        """
        count = sum(rollout.num_envs for rollout in rollouts)
        if self.batch_size is None or (self.rollout is None and count % self.batch_size == 0):
            return [*rollouts]
        joined = concatenate(rollouts if self.rollout is None else [self.rollout, *rollouts])
        used = joined.num_envs - joined.num_envs % self.batch_size
        # A copy, because a slice would keep the memory of all trajectories.
        self.rollout = joined.select(torch.arange(used, joined.num_envs)) if used < joined.num_envs else None
        if self.rollout is not None:
            self.rollout.episodes = []
        return [joined.env_slice(0, used)] if used else []

    def save(self) -> Tensors:
        """Return the waiting trajectories as tensors by name, for a checkpoint."""
        return {} if self.rollout is None else pack_trajectories(self.rollout)

    def load(self, tensors: Tensors, device: torch.device) -> None:
        """Restore the result of `save`.

        Raises:
            KeyError, ValueError: the tensors are not valid, or contain too many trajectories to wait.
        """
        self.rollout = None
        if not tensors:
            return
        rollout = unpack_trajectories(tensors)
        length, count = rollout.log_prob.shape
        entries = (rollout.reward, rollout.done, rollout.truncated, rollout.task, rollout.last_action)
        expected = {
            (length + 1, count): [*entries, *rollout.observation.values(), *rollout.measures.values()],
            (length, count): [rollout.value, rollout.bootstrap, rollout.version, *rollout.extras.values()],
            (count,): list(rollout.state),
        }
        for shape, found in expected.items():
            if any(tensor.shape[: len(shape)] != shape for tensor in found):
                raise ValueError("the waiting trajectories have tensors of different lengths")
        max_waiting = 0 if self.batch_size is None else self.batch_size - 1
        if count > max_waiting:
            raise ValueError(f"{count} trajectories are waiting, but at most {max_waiting} can wait in this run")
        if not all(_is_finite(tensor) for found in expected.values() for tensor in found):
            raise ValueError("the waiting trajectories have values that are not finite")
        self.rollout = rollout.to(device)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
