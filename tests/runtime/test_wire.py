"""Rollouts on their way to a learner: what arrives is what was sent, every share of a batch once, and frames travel singly."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from bestiary.resolve import resolve
from bestiary.rollout import Rollout, concatenate
from bestiary.runtime.build import build
from bestiary.runtime.wire import arrays_of, pack, pack_state, share_of, tensors_of, unpack, unpack_state


def play(**options: Any) -> tuple[Rollout, dict[str, int]]:
    """A rollout in which episodes end, and how its pictures are stacked."""
    (actor,), _ = build(resolve({"runtime": "serial", "num_envs": 4, "batch_size": 4, "unroll_length": 60, **options}))
    actor.start()
    for _ in range(8):
        rollout = actor.collect()
        if rollout.done[1:].any():
            break
    actor.pool.close()
    assert rollout.done[1:].any()
    return rollout, getattr(actor.pool, "stacked", {})


def assert_same(one: Rollout, other: Rollout) -> None:
    def flat(value: Any) -> list[torch.Tensor]:
        return [*(value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value])]

    for name in [f.name for f in fields(Rollout) if f.name != "episodes"]:
        pairs = list(zip(flat(getattr(one, name)), flat(getattr(other, name)), strict=True))
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
def test_what_arrives_is_what_was_sent(options: dict[str, Any]) -> None:
    rollout, stacked = play(**options)
    arrived = unpack(pack(rollout, stacked))
    assert_same(arrived, rollout)
    for kind, x in rollout.observation.items():
        assert arrived.observation[kind].stride() == x.stride()  # in the memory order that convolutions like
    assert arrived.episodes == []


def test_numbers_without_an_axis_arrive_without_one() -> None:
    counter, matrix = torch.tensor(7), torch.arange(6.0).view(2, 3).T
    for sent, arrived in zip((counter, matrix), tensors_of(arrays_of([counter, matrix])), strict=True):
        assert torch.equal(arrived, sent)
    assert unpack_state(pack_state({"model": {"n": counter}}))["model"]["n"].shape == ()


def test_frames_travel_singly() -> None:
    rollout, stacked = play(env="atari/Breakout")
    first, newest = pack(rollout, stacked)["observation"]["image"]
    stacks = rollout.observation["image"].numel()
    assert stacked == {"image": 4}
    assert first.nbytes + newest.nbytes == stacks * (4 + 60) / (4 * 61)


@pytest.mark.parametrize(
    ("num_envs", "batch_size", "learners"), [(8, 4, 2), (8, 4, 4), (4, 4, 2), (4, 8, 4), (6, 6, 3)]
)
def test_learners_share_out_every_batch_evenly(num_envs: int, batch_size: int, learners: int) -> None:
    rollout = Rollout.empty(2, num_envs, {}, {}, (torch.arange(num_envs),))
    rollouts = [rollout] * max(1, batch_size // num_envs)
    shares = [[share_of(one, rank, learners, batch_size) for one in rollouts] for rank in range(learners)]
    batches = [batch.state[0].tolist() for batch in concatenate(rollouts).groups(batch_size)]
    shared = [
        [batch.state[0].tolist() for batch in concatenate(share).groups(batch_size // learners)] for share in shares
    ]
    for number, batch in enumerate(batches):
        assert sorted(column for mine in shared for column in mine[number]) == sorted(batch)
