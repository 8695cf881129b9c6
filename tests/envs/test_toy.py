"""The toy games against the returns that their docstrings state, and the random streams."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bestiary.envs import make_env
from bestiary.envs.toy import RandomStreams
from bestiary.rollout import Arrays, Step
from bestiary.utils.errors import UserError

Policy = Callable[[Arrays, int], np.ndarray]  # (observation, steps since the reset) -> actions


def play(name: str, policy: Policy, length: int, num_envs: int = 4, **options: Any) -> list[Step]:
    pool = make_env(f"toy/{name}", num_envs=num_envs, **options)
    steps = [pool.reset()]
    for t in range(length):
        pool.send(policy(steps[-1].observation, t))
        steps.append(pool.recv())
    return steps


def always(action: int) -> Policy:
    return lambda observation, t: np.full(len(observation["vector"]), action)


@pytest.mark.parametrize("arms", [2, 4, 7])
def test_arm_k_of_a_bandit_has_reward_k_over_arms_minus_1(arms: int) -> None:
    pulls = np.arange(3 * arms).reshape(arms, 3) % arms  # [t,N]
    for action, step in zip(pulls, play("bandit", lambda _, t: pulls[t], arms, 3, size=arms)[1:], strict=True):
        np.testing.assert_allclose(step.reward, action / (arms - 1), rtol=1e-6)
        assert step.done.all()
        assert step.game_over.all()
        assert not step.truncated.any()


@pytest.mark.parametrize("cells", [2, 8, 13])
def test_walking_right_along_the_chain_has_return_1(cells: int) -> None:
    steps = play("chain", always(1), 5 * (cells - 1), size=cells)[1:]
    for t, step in enumerate(steps, start=1):
        arrived = t % (cells - 1) == 0
        assert (step.reward == (1.0 if arrived else 0.0)).all()
        assert (step.done == arrived).all()
        assert not step.truncated.any()


@pytest.mark.parametrize("cells", [2, 8, 13])
def test_walking_left_along_the_chain_costs_and_is_truncated(cells: int) -> None:
    steps = play("chain", always(0), 8 * cells, size=cells)[1:]
    for t, step in enumerate(steps, start=1):
        np.testing.assert_allclose(step.reward, -0.01, rtol=1e-6)
        assert (step.truncated == (t % (4 * cells) == 0)).all()
        assert (step.done == step.truncated).all()
    assert sum(step.truncated[0] for step in steps) == 2


def test_the_final_observation_of_the_chain_is_the_cell_of_the_truncation() -> None:
    """Four steps right and one left end in cell 3; the new episode starts in cell 0."""
    actions = [1, 1, 0, 1, 1]
    last = play("chain", lambda _, t: np.array([actions[t]]), 5, num_envs=1, time_limit=5)[-1]
    assert last.truncated.all()
    assert last.final["vector"].argmax() == 3
    assert last.observation["vector"].argmax() == 0


def test_arriving_in_the_last_step_before_the_limit_is_no_truncation() -> None:
    last = play("chain", always(1), 7, time_limit=7)[-1]
    assert (last.reward == 1).all()
    assert last.done.all()
    assert not last.truncated.any()
    assert last.final == {}


class PerfectMemory:
    """A policy that stores the sign when it is shown and always names the stored sign."""

    def __init__(self, num_envs: int):
        self.sign = np.zeros(num_envs, np.int64)

    def __call__(self, observation: Arrays, t: int) -> np.ndarray:
        shown = observation["vector"][:, :-1]
        self.sign = np.where(shown.any(axis=1), shown.argmax(axis=1), self.sign)
        return self.sign


@pytest.mark.parametrize(("signs", "delay"), [(2, 1), (4, 8), (9, 30)])
def test_a_perfect_memory_recalls_every_sign(signs: int, delay: int) -> None:
    steps = play("recall", PerfectMemory(4), 6 * (delay + 1), size=signs, delay=delay)[1:]
    for t, step in enumerate(steps, start=1):
        answered = t % (delay + 1) == 0
        assert (step.reward == float(answered)).all()
        assert (step.done == answered).all()


def test_observations_during_the_delay_are_zero() -> None:
    """The sign is one-hot in the first entries; the signal to answer is 1 in the last entry alone."""
    steps = play("recall", always(0), 26, num_envs=50, delay=8)
    for t, step in enumerate(steps):
        observation = step.observation["vector"]
        if t % 9 == 0:
            assert (observation[:, :-1].sum(axis=1) == 1).all()
            assert (observation[:, -1] == 0).all()
        else:
            assert (observation[:, :-1] == 0).all()
            assert (observation[:, -1] == (t % 9 == 8)).all()


@pytest.mark.parametrize("answer", range(4))
def test_a_fixed_answer_is_correct_once_in_k(answer: int) -> None:
    steps = play("recall", always(answer), 3 * 100, num_envs=200, delay=2)[1:]
    correct = np.stack([step.reward for step in steps if step.done.all()])
    assert correct.shape == (100, 200)
    assert correct.mean() == pytest.approx(1 / 4, abs=5 * np.sqrt(0.25 * 0.75 / correct.size))


class Counter:
    """A policy that adds the shown numbers modulo `size` and names the sum."""

    def __init__(self, num_envs: int, size: int):
        self.sum = np.zeros(num_envs, np.int64)
        self.size = size

    def __call__(self, observation: Arrays, t: int) -> np.ndarray:
        starts = observation["vector"][:, -1] == 1
        self.sum = (np.where(starts, 0, self.sum) + observation["vector"][:, :-1].argmax(axis=1)) % self.size
        return self.sum


@pytest.mark.parametrize(("size", "delay"), [(2, 1), (2, 6), (5, 9)])
def test_counting_solves_parity(size: int, delay: int) -> None:
    steps = play("parity", Counter(4, size), 5 * delay, size=size, delay=delay)[1:]
    for t, step in enumerate(steps, start=1):
        np.testing.assert_allclose(step.reward, 1 / delay, rtol=1e-6)
        assert (step.done == (t % delay == 0)).all()
        assert (step.observation["vector"][:, -1] == step.done).all()


def test_naming_the_last_number_is_right_in_the_first_step_only() -> None:
    """In later steps, the sum of the earlier numbers is uniform, so the answer is right once in `size`."""
    steps = play("parity", lambda x, t: x["vector"][:, :-1].argmax(axis=1), 400, num_envs=100, size=4, delay=8)[1:]
    mean_return = sum(float(step.reward.sum()) for step in steps) / (100 * 50)
    assert mean_return == pytest.approx((1 + 7 / 4) / 8, abs=0.01)


def follow_the_ball(observation: Arrays, t: int) -> np.ndarray:
    image = observation["image"][:, 0]  # [N,H,W]
    ball = (image == 255).any(axis=1).argmax(axis=1)
    paddle = (image[:, -1] == 128).argmax(axis=1)
    return 1 + np.sign(ball - paddle)


@pytest.mark.parametrize("size", [2, 3, 10, 31])
def test_following_the_ball_always_catches_it(size: int) -> None:
    steps = play("catch", follow_the_ball, 10 * (size - 1), num_envs=20, size=size)[1:]
    for t, step in enumerate(steps, start=1):
        landed = t % (size - 1) == 0
        assert (step.reward == float(landed)).all()
        assert (step.done == landed).all()


def test_moving_away_from_the_ball_misses_it() -> None:
    """The paddle starts in the middle of five columns; nine steps are enough to reach the corner away from the ball."""

    def move_away(observation: Arrays, t: int) -> np.ndarray:
        ball = (observation["image"][:, 0] == 255).any(axis=1).argmax(axis=1)
        return np.where(ball < 3, 2, 0)

    ends = [step for step in play("catch", move_away, 90, num_envs=20)[1:] if step.done.any()]
    assert len(ends) == 10
    assert all((step.reward == -1).all() for step in ends)


def test_size_1_is_refused() -> None:
    with pytest.raises(UserError, match=r"--size 1.*at least 2"):
        make_env("toy/chain", size=1)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Moments within 5 standard errors; seeds 0, 1, 2, ... are the hardest case for a weak generator."""
    streams = RandomStreams(list(range(256)))
    numbers = np.stack([streams.uniform(np.ones(256, bool)) for _ in range(2000)])  # [draws, streams]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.mean() == pytest.approx(1 / 2, abs=5 * np.sqrt(1 / 12 / numbers.size))
    assert numbers.var() == pytest.approx(1 / 12, abs=5 * np.sqrt(1 / 180 / numbers.size))
    centred = (numbers - 0.5) * np.sqrt(12)
    between_streams = (centred.T @ centred / 2000)[~np.eye(256, dtype=bool)]
    assert np.abs(between_streams).max() < 6 / np.sqrt(2000)
    between_draws = (centred[1:] * centred[:-1]).mean(axis=0)
    assert np.abs(between_draws).max() < 5 / np.sqrt(1999)


def test_integers_are_uniform() -> None:
    streams = RandomStreams(list(range(100, 200)))
    numbers = np.concatenate([streams.integers(np.ones(100, bool), 7) for _ in range(500)])
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7
    assert ((counts - 50_000 / 7) ** 2 / (50_000 / 7)).sum() < 27.9  # chi-square, 6 degrees of freedom, p = 1e-4


def test_a_stream_does_not_change_while_others_advance() -> None:
    """For any selection of rows, each row returns the numbers of its own stream in order."""
    all_streams, some_streams = RandomStreams([3, 4, 5]), RandomStreams([3, 4, 5])
    numbers = np.stack([all_streams.uniform(np.ones(3, bool)) for _ in range(40)])
    taken = np.zeros(3, int)
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = rng.random(3) < 0.6
        drawn = some_streams.uniform(rows)
        np.testing.assert_array_equal(drawn[rows], numbers[taken, range(3)][rows])
        taken[rows] += 1
    assert len(set(taken.tolist())) > 1
