"""Packing and unpacking of rollouts and learner states, and the shards of learners."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from bestiary.config.resolve import resolve
from bestiary.distributed.serialisation import (
    pack_rollout,
    pack_state,
    shard,
    to_arrays,
    to_tensors,
    unpack_rollout,
    unpack_state,
)
from bestiary.rollout import Rollout, concatenate
from bestiary.training.factory import make_actors_and_learner


def collect_rollout(**options: Any) -> tuple[Rollout, Mapping[str, int]]:
    """Return a rollout in which episodes end, and the number of stacked frames of its images."""
    base = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "rollout_length": 60}
    (actor,), _ = make_actors_and_learner(resolve({**base, **options}))
    actor.start()
    for _ in range(8):
        rollout = actor.collect()
        if rollout.done[1:].any():
            break
    actor.pool.close()
    assert rollout.done[1:].any()
    return rollout, actor.pool.frame_stacks


def assert_equal_rollouts(first: Rollout, second: Rollout) -> None:
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, dict):
            return list(value.values())
        return list(value) if isinstance(value, tuple) else [value]

    for name in [f.name for f in fields(Rollout) if f.name != "episodes"]:
        pairs = list(zip(tensors(getattr(first, name)), tensors(getattr(second, name)), strict=True))
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs), name


@pytest.mark.parametrize(
    "options",
    [
        {"env": "atari/Breakout"},
        {"env": "atari/Breakout", "gray": False, "frame_stack": 2},
        {"env": "atari/Breakout", "frame_stack": 1},
        {"env": "atari/Breakout", "flicker": 0.5},
        {"env": "atari/Breakout", "flicker": 0.5, "flicker_mode": "stack"},
        {"env": ["atari/Breakout", "atari/SpaceInvaders"], "memory": "lstm", "time_limit": 100},
        {"env": "toy/recall", "memory": "gru"},
        {"env": "procgen/starpilot:easy", "levels": "0:20"},
    ],
    ids=str,
)
def test_an_unpacked_rollout_equals_the_packed_one(options: dict[str, Any]) -> None:
    rollout, frame_stacks = collect_rollout(**options)
    received = unpack_rollout(pack_rollout(rollout, frame_stacks))
    assert_equal_rollouts(received, rollout)
    for kind, tensor in rollout.observation.items():
        assert received.observation[kind].stride() == tensor.stride()  # the memory format for fast convolutions
    assert received.episodes == []


def test_scalars_and_transposed_tensors_keep_their_shape() -> None:
    scalar, matrix = torch.tensor(7), torch.arange(6.0).view(2, 3).T
    for sent, received in zip((scalar, matrix), to_tensors(to_arrays([scalar, matrix])), strict=True):
        assert torch.equal(received, sent)
    assert unpack_state(pack_state({"model": {"n": scalar}}))["model"]["n"].shape == ()


def test_stacked_images_are_sent_as_single_frames() -> None:
    rollout, frame_stacks = collect_rollout(env="atari/Breakout")
    first, newest = pack_rollout(rollout, frame_stacks)["observation"]["image"]
    stacked_bytes = rollout.observation["image"].numel()
    assert frame_stacks == {"image": 4}
    assert first.nbytes + newest.nbytes == stacked_bytes * (4 + 60) / (4 * 61)


@pytest.mark.parametrize(
    ("num_envs", "batch_size", "num_learners"), [(8, 4, 2), (8, 4, 4), (4, 4, 2), (4, 8, 4), (6, 6, 3)]
)
def test_each_learner_gets_an_equal_shard_of_each_batch(num_envs: int, batch_size: int, num_learners: int) -> None:
    """The k-th batches of all learners together are the k-th batch of a single learner."""
    rollout = Rollout.empty(2, num_envs, {}, {}, (torch.arange(num_envs),))
    rollouts = [rollout] * max(1, batch_size // num_envs)
    shards = [[shard(one, rank, num_learners, batch_size) for one in rollouts] for rank in range(num_learners)]
    batches = [batch.state[0].tolist() for batch in concatenate(rollouts).split(batch_size)]
    sharded_batches = [
        [batch.state[0].tolist() for batch in concatenate(own).split(batch_size // num_learners)] for own in shards
    ]
    for number, batch in enumerate(batches):
        assert sorted(column for own in sharded_batches for column in own[number]) == sorted(batch)
