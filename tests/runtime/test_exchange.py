"""The exchange: order, bounds, fixed lag, and failures, without any learning."""

import threading
import time

import pytest
import torch
import torch.nn as nn

from bestiary.errors import RunError
from bestiary.rollout import Rollout
from bestiary.runtime.exchange import Exchange
from bestiary.runtime.snapshots import Snapshot


def rollout() -> Rollout:
    return Rollout.empty(1, 1, {}, {}, ())


def snapshot(version: int) -> Snapshot:
    return Snapshot(version, ())


def never(seconds: float) -> None:
    raise AssertionError("nothing stalls here")


def test_rollouts_are_taken_in_the_order_they_began_in() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=3, in_flight=3)
    numbers = [exchange.try_begin(actor) for actor in range(3)]
    assert [begun and begun[0] for begun in numbers] == [0, 1, 2]
    played = {number: rollout() for number in (2, 0, 1)}
    for number, one in played.items():  # they are finished in another order
        exchange.hand_over(number, one)
    for number in range(3):
        assert exchange.take(0, never, 1) is played[number]
        exchange.publish(snapshot(number + 1))


def test_actors_take_turns() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=2, in_flight=4)
    assert exchange.try_begin(1) is None
    assert exchange.try_begin(0) is not None
    assert exchange.try_begin(0) is None
    assert exchange.try_begin(1) is not None


def test_no_more_rollouts_begin_than_may_be_in_flight() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=1, in_flight=2)
    assert exchange.try_begin(0) is not None
    assert exchange.try_begin(0) is not None
    exchange.hand_over(0, rollout())
    assert exchange.try_begin(0) is None  # waiting to be learnt from is in flight too
    exchange.take(0, never, 1)
    assert exchange.try_begin(0) is None
    exchange.publish(snapshot(1))
    begun = exchange.try_begin(0)
    assert begun is not None
    assert (begun[0], begun[1].version) == (2, 1)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("joined", [1, 2])
def test_with_a_fixed_lag_a_rollout_begins_with_just_its_weights(lag: int, joined: int) -> None:
    """Rollout k is played with the weights after rollouts 0 .. k-lag-1, whenever it begins."""
    for late in (False, True):
        exchange: Exchange[Snapshot, Rollout] = Exchange(
            snapshot(0), actors=1, in_flight=100, fixed_lag=lag + joined - 1
        )
        used: dict[int, int] = {}
        while len(used) < 12:
            while (not late or exchange.learnt + joined > exchange.begun) and (begun := exchange.try_begin(0)):
                used[begun[0]] = begun[1].version
                exchange.hand_over(begun[0], rollout())
            if exchange.begun - exchange.learnt >= joined:
                for ahead in range(joined):
                    exchange.take(ahead, never, 1)
                exchange.publish(snapshot(exchange.learnt // joined + 1), joined)
        wanted = {k: max(0, k - lag - joined + 1) // joined for k in used}
        assert used == wanted


def test_a_dead_actor_is_heard_of_where_the_learner_waits() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=1, in_flight=1)
    threading.Timer(0.1, exchange.fail, [RunError("the world ends")]).start()
    with pytest.raises(RunError, match="the world ends"):
        exchange.take(0, never, 10)


def test_a_stall_is_reported_again_and_again() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=1, in_flight=1)
    exchange.try_begin(0)
    reports: list[float] = []

    def stalled(seconds: float) -> None:
        reports.append(seconds)
        if len(reports) == 3:
            exchange.ready[0] = rollout()

    exchange.take(0, stalled, 0.02)
    assert len(reports) == 3
    assert reports == sorted(reports)


def test_waiting_ends_with_the_exchange() -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=1, in_flight=1)
    thread = threading.Thread(target=exchange.wait, args=[exchange.progress()])
    thread.start()
    exchange.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_what_an_agent_writes_while_it_acts_stays_its_own() -> None:
    """A module may keep statistics in buffers; what was published, and other actors share, does not change."""
    learner, actor = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    published = Snapshot.of(learner, 1)
    before = [tensor.clone() for tensor in published.tensors]
    published.put_into(actor)
    actor(torch.randn(8, 2))
    assert not actor[1].running_mean.equal(learner[1].running_mean)  # type: ignore[operator, arg-type]
    assert all(torch.equal(one, other) for one, other in zip(before, published.tensors, strict=True))


@pytest.mark.parametrize("block", [2, 4])
def test_blocks_are_played_with_the_weights_before_them(block: int) -> None:
    exchange: Exchange[Snapshot, Rollout] = Exchange(snapshot(0), actors=2, in_flight=block, fixed_lag=0, block=block)
    for turn in range(3):
        begun = [exchange.try_begin(number % 2) for number in range(block)]
        assert [b[1].version if b else None for b in begun] == [turn] * block
        assert exchange.try_begin(0) is None  # the next block waits for these to be learnt from
        for b in begun:
            assert b is not None
            exchange.hand_over(b[0], rollout())
        exchange.publish(snapshot(turn + 1), block)


def test_no_actor_ever_sees_half_an_update() -> None:
    """A learner that overwrites its weights without pause, an actor that copies snapshots: always one version, whole."""
    learner, actor = nn.Linear(300, 300), nn.Linear(300, 300)
    newest = [Snapshot.of(learner, 0)]
    stop = threading.Event()

    def learn() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            with torch.no_grad():
                for weights in learner.parameters():
                    weights.fill_(version)
            newest[0] = Snapshot.of(learner, version)

    with torch.no_grad():
        for weights in learner.parameters():
            weights.fill_(0)
    newest[0] = Snapshot.of(learner, 0)
    thread = threading.Thread(target=learn)
    thread.start()
    try:
        deadline, seen = time.monotonic() + 2, set()
        while time.monotonic() < deadline:
            taken = newest[0]
            taken.put_into(actor)
            values = {float(v.detach()) for weights in actor.parameters() for v in (weights.min(), weights.max())}
            assert values == {float(taken.version)}
            seen.add(taken.version)
        assert len(seen) > 10
    finally:
        stop.set()
        thread.join()


def test_as_they_arrive_whoever_is_free_begins_and_a_lost_rollout_makes_room() -> None:
    exchange: Exchange[Snapshot, str] = Exchange(snapshot(0), actors=3, in_flight=3, in_order=False)
    begun = [exchange.try_begin(actor) for actor in (2, 0, 2)]
    numbers = [one[0] for one in begun if one is not None]
    assert len(set(numbers)) == 3
    assert exchange.try_begin(1) is None
    exchange.hand_over(numbers[2], "c")
    exchange.hand_over(numbers[0], "a")
    assert [exchange.look(ahead) for ahead in (0, 1, 2)] == ["c", "a", None]
    assert exchange.try_begin(1) is None
    assert exchange.lose(numbers[1]) == [numbers[1]]
    again = exchange.try_begin(1)
    assert again is not None
    assert again[0] not in numbers  # nobody takes it for the one that was lost
    exchange.publish(snapshot(1), 2)
    assert exchange.look(0) is None
    exchange.hand_over(again[0], "d")
    assert exchange.look(0) == "d"


def test_in_order_a_lost_rollout_is_played_again_with_the_weights_it_had() -> None:
    exchange: Exchange[Snapshot, str] = Exchange(snapshot(0), actors=2, in_flight=9, fixed_lag=1, in_order=False)
    assert exchange.in_order
    assert [exchange.try_begin(actor) for actor in (0, 1)] == [(0, snapshot(0)), (1, snapshot(0))]
    exchange.hand_over(0, "zero")
    exchange.publish(snapshot(1))
    assert exchange.try_begin(0) == (2, snapshot(1))
    assert exchange.lose(1) == [1]
    assert exchange.try_begin(1) == (1, snapshot(0))
    assert exchange.try_begin(1) is None


def test_of_a_block_an_actor_plays_all_of_its_rollouts_again() -> None:
    """Its environments are new: what it played before in the block would not go on from there."""
    exchange: Exchange[Snapshot, str] = Exchange(snapshot(0), actors=2, in_flight=6, fixed_lag=0, block=6)
    for number in range(4):
        assert exchange.try_begin(number % 2) == (number, snapshot(0))
        exchange.hand_over(number, str(number))
    assert exchange.try_begin(0) == (4, snapshot(0))
    assert exchange.lose(4) == [0, 2, 4]
    assert exchange.look(0) is None
    assert exchange.look(1) == "1"
    for number in (0, 2, 4):
        assert exchange.try_begin(0) == (number, snapshot(0))
        exchange.hand_over(number, str(number))
    assert exchange.try_begin(1) == (5, snapshot(0))
    exchange.hand_over(5, "5")
    assert [exchange.look(ahead) for ahead in range(6)] == list("012345")
