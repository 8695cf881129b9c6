"""LearnSizes: the limits on waiting trajectories, updates and policy lag, compared with a simulation of a run."""

import itertools
import random

import pytest

from bestiary.algorithms.learn_call_sizes import LearnSizes


def simulate(sizes: LearnSizes, in_flight_calls: int) -> tuple[int, int, int]:
    """Return the maximum numbers of waiting trajectories and of updates per call, and the maximum policy lag.

    Each rollout starts with the weights of `in_flight_calls` learn calls before the call that receives it. In each
    epoch of a call, all complete batches are used once.
    """
    generator = random.Random(0)
    versions = [0]  # weights version after each call
    waiting: list[int] = []  # for each waiting trajectory, the version at the start of its collection
    results = (0, 0, 0)
    pools = itertools.cycle((sizes.pool_size, sizes.largest_pool_size))
    for call in range(200):
        started = versions[max(0, call - in_flight_calls + 1)]
        new = sum(next(pools) for _ in range(sizes.rollouts))
        if generator.random() < 0.1:  # a cluster may receive rollouts in any order
            next(pools)
        trajectories = waiting + new * [started]
        batches = len(trajectories) // sizes.batch_size
        version, lag = versions[-1], 0
        for _ in range(sizes.epochs):
            for index in range(batches):
                oldest = min(trajectories[index * sizes.batch_size : (index + 1) * sizes.batch_size])
                lag = max(lag, version - oldest)
                version += 1
        waiting = trajectories[batches * sizes.batch_size :]
        found = (len(waiting), version - versions[-1], lag)
        results = (max(results[0], found[0]), max(results[1], found[1]), max(results[2], found[2]))
        versions.append(version)
    return results


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize(
    ("pool_size", "largest", "batch_size"),
    [(32, 32, 4), (8, 8, 32), (45, 45, 4), (22, 23, 4), (24, 24, 32), (5, 6, 32), (16, 16, 24), (7, 7, 7), (1, 1, 5)],
)
def test_limits_hold_and_are_reached(pool_size: int, largest: int, batch_size: int, epochs: int) -> None:
    sizes = LearnSizes(-(-batch_size // pool_size), batch_size, epochs, pool_size, largest, on_policy=False)
    for calls in (1, 2, 4):
        waiting, updates, lag = simulate(sizes, calls)
        assert waiting == sizes.max_waiting
        assert updates <= sizes.max_updates()
        assert lag <= sizes.max_policy_lag(calls)
        if pool_size == largest:  # with unequal pools, the worst order of the pools may not occur
            assert updates == sizes.max_updates()
            assert lag >= sizes.max_policy_lag(calls) - epochs
    limit = sizes.max_policy_lag(3)
    assert sizes.max_calls(limit, limit=9) == 3
    assert sizes.max_calls(-1, limit=9) == 0
    assert sizes.max_calls(10**9, limit=9) == 9


def test_exact_batches_have_the_limits_of_rollouts_that_do_not_wait() -> None:
    sizes = LearnSizes(1, 4, 1, 32, 32, on_policy=False)
    assert (sizes.max_waiting, sizes.max_updates(), sizes.max_updates(2)) == (0, 8, 16)
    assert sizes.max_policy_lag(2) == 15
