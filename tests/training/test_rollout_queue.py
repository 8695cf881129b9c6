"""Rollout queue and published weights: order, limits, fixed lag and failures, without learning."""

import threading
import time

import pytest
import torch
import torch.nn as nn

from bestiary.rollout import Rollout
from bestiary.training.rollout_queue import RolloutQueue
from bestiary.training.weights import Weights
from bestiary.utils.errors import RunError


def make_rollout() -> Rollout:
    return Rollout.empty(1, 1, {}, {}, ())


def make_weights(version: int) -> Weights:
    return Weights(version, ())


def fail_on_stall(seconds: float) -> None:
    raise AssertionError("the queue must not stall")


def test_rollouts_are_returned_in_the_order_in_which_they_were_started() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=3, max_in_flight=3)
    started = [queue.try_start(actor) for actor in range(3)]
    assert [start and start[0] for start in started] == [0, 1, 2]
    rollouts = {number: make_rollout() for number in (2, 0, 1)}
    for number, rollout in rollouts.items():  # completed in another order
        queue.put(number, rollout)
    for number in range(3):
        assert queue.get(0, fail_on_stall, 1) is rollouts[number]
        queue.publish(make_weights(number + 1))


def test_actors_start_rollouts_in_turn() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=2, max_in_flight=4)
    assert queue.try_start(1) is None
    assert queue.try_start(0) is not None
    assert queue.try_start(0) is None
    assert queue.try_start(1) is not None


def test_number_of_rollouts_in_flight_is_limited() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=1, max_in_flight=2)
    assert queue.try_start(0) is not None
    assert queue.try_start(0) is not None
    queue.put(0, make_rollout())
    assert queue.try_start(0) is None  # a waiting rollout is in flight, too
    queue.get(0, fail_on_stall, 1)
    assert queue.try_start(0) is None
    queue.publish(make_weights(1))
    started = queue.try_start(0)
    assert started is not None
    assert (started[0], started[1].version) == (2, 1)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_rollouts", [1, 2])
def test_fixed_lag_determines_the_weights_of_each_rollout(lag: int, num_rollouts: int) -> None:
    """Rollout k uses the weights trained on rollouts 0 .. k-lag-1, whether it starts early or late."""
    for late in (False, True):
        queue: RolloutQueue[Weights, Rollout] = RolloutQueue(
            make_weights(0), num_actors=1, max_in_flight=100, fixed_lag=lag + num_rollouts - 1
        )
        used: dict[int, int] = {}
        while len(used) < 12:
            while (not late or queue.num_consumed + num_rollouts > queue.num_started) and (
                started := queue.try_start(0)
            ):
                used[started[0]] = started[1].version
                queue.put(started[0], make_rollout())
            if queue.num_started - queue.num_consumed >= num_rollouts:
                for offset in range(num_rollouts):
                    queue.get(offset, fail_on_stall, 1)
                queue.publish(make_weights(queue.num_consumed // num_rollouts + 1), num_rollouts)
        expected = {k: max(0, k - lag - num_rollouts + 1) // num_rollouts for k in used}
        assert used == expected


def test_error_of_an_actor_is_raised_where_the_learner_waits() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=1, max_in_flight=1)
    threading.Timer(0.1, queue.fail, [RunError("the environment failed")]).start()
    with pytest.raises(RunError, match="the environment failed"):
        queue.get(0, fail_on_stall, 10)


def test_stall_is_reported_repeatedly() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=1, max_in_flight=1)
    queue.try_start(0)
    reports: list[float] = []

    def on_stall(seconds: float) -> None:
        reports.append(seconds)
        if len(reports) == 3:
            queue.completed[0] = make_rollout()

    queue.get(0, on_stall, 0.02)
    assert len(reports) == 3
    assert reports == sorted(reports)


def test_closing_the_queue_wakes_waiting_actors() -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(make_weights(0), num_actors=1, max_in_flight=1)
    thread = threading.Thread(target=queue.wait_for_progress, args=[queue.progress()])
    thread.start()
    queue.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_buffers_written_during_inference_do_not_change_published_weights() -> None:
    """A module may write statistics to its buffers; the published tensors are shared by all actors."""
    learner, actor = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    published = Weights.from_agent(learner, 1)
    before = [tensor.clone() for tensor in published.tensors]
    published.load_into(actor)
    actor(torch.randn(8, 2))
    assert not actor[1].running_mean.equal(learner[1].running_mean)  # type: ignore[operator, arg-type]
    assert all(torch.equal(one, other) for one, other in zip(before, published.tensors, strict=True))


@pytest.mark.parametrize("block_size", [2, 4])
def test_block_is_collected_with_the_weights_before_it(block_size: int) -> None:
    queue: RolloutQueue[Weights, Rollout] = RolloutQueue(
        make_weights(0), num_actors=2, max_in_flight=block_size, fixed_lag=0, block_size=block_size
    )
    for turn in range(3):
        started = [queue.try_start(number % 2) for number in range(block_size)]
        assert [start[1].version if start else None for start in started] == [turn] * block_size
        assert queue.try_start(0) is None  # the next block waits until this one is consumed
        for start in started:
            assert start is not None
            queue.put(start[0], make_rollout())
        queue.publish(make_weights(turn + 1), block_size)


def test_actor_never_sees_a_partial_update() -> None:
    """A learner overwrites its weights continuously; all weights that an actor loads are of one version."""
    learner, actor = nn.Linear(300, 300), nn.Linear(300, 300)
    published_weights = [Weights.from_agent(learner, 0)]
    stop = threading.Event()

    def learn() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            with torch.no_grad():
                for weights in learner.parameters():
                    weights.fill_(version)
            published_weights[0] = Weights.from_agent(learner, version)

    with torch.no_grad():
        for weights in learner.parameters():
            weights.fill_(0)
    published_weights[0] = Weights.from_agent(learner, 0)
    thread = threading.Thread(target=learn)
    thread.start()
    try:
        deadline, seen = time.monotonic() + 2, set()
        while time.monotonic() < deadline:
            loaded = published_weights[0]
            loaded.load_into(actor)
            values = {float(v.detach()) for weights in actor.parameters() for v in (weights.min(), weights.max())}
            assert values == {float(loaded.version)}
            seen.add(loaded.version)
        assert len(seen) > 10
    finally:
        stop.set()
        thread.join()


def test_out_of_order_any_actor_may_start_and_a_discarded_rollout_is_replaced() -> None:
    queue: RolloutQueue[Weights, str] = RolloutQueue(make_weights(0), num_actors=3, max_in_flight=3, in_order=False)
    started = [queue.try_start(actor) for actor in (2, 0, 2)]
    numbers = [start[0] for start in started if start is not None]
    assert len(set(numbers)) == 3
    assert queue.try_start(1) is None
    queue.put(numbers[2], "c")
    queue.put(numbers[0], "a")
    assert [queue.peek(offset) for offset in (0, 1, 2)] == ["c", "a", None]
    assert queue.try_start(1) is None
    assert queue.discard(numbers[1]) == [numbers[1]]
    replacement = queue.try_start(1)
    assert replacement is not None
    assert replacement[0] not in numbers  # a new number, so that a late result is not mistaken for it
    queue.publish(make_weights(1), 2)
    assert queue.peek(0) is None
    queue.put(replacement[0], "d")
    assert queue.peek(0) == "d"


def test_in_order_a_discarded_rollout_is_collected_again_with_the_same_weights() -> None:
    queue: RolloutQueue[Weights, str] = RolloutQueue(
        make_weights(0), num_actors=2, max_in_flight=9, fixed_lag=1, in_order=False
    )
    assert queue.in_order
    assert [queue.try_start(actor) for actor in (0, 1)] == [(0, make_weights(0)), (1, make_weights(0))]
    queue.put(0, "zero")
    queue.publish(make_weights(1))
    assert queue.try_start(0) == (2, make_weights(1))
    assert queue.discard(1) == [1]
    assert queue.try_start(1) == (1, make_weights(0))
    assert queue.try_start(1) is None


def test_actor_collects_all_its_rollouts_of_a_block_again() -> None:
    """The environments of a replaced actor restart, so its earlier rollouts of the block would not be continued."""
    queue: RolloutQueue[Weights, str] = RolloutQueue(
        make_weights(0), num_actors=2, max_in_flight=6, fixed_lag=0, block_size=6
    )
    for number in range(4):
        assert queue.try_start(number % 2) == (number, make_weights(0))
        queue.put(number, str(number))
    assert queue.try_start(0) == (4, make_weights(0))
    assert queue.discard(4) == [0, 2, 4]
    assert queue.peek(0) is None
    assert queue.peek(1) == "1"
    for number in (0, 2, 4):
        assert queue.try_start(0) == (number, make_weights(0))
        queue.put(number, str(number))
    assert queue.try_start(1) == (5, make_weights(0))
    queue.put(5, "5")
    assert [queue.peek(offset) for offset in range(6)] == list("012345")
