"""The toy worlds against the answers that their docstrings promise, and the random streams below them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bestiary.envs import make
from bestiary.envs.toy import Streams
from bestiary.errors import UserError
from bestiary.rollout import Arrays, Step

Player = Callable[[Arrays, int], np.ndarray]  # (observation, steps since the start of the pool) -> actions


def play(name: str, player: Player, length: int, num_envs: int = 4, **options: Any) -> list[Step]:
    pool = make(f"toy/{name}", num_envs=num_envs, **options)
    steps = [pool.reset()]
    for t in range(length):
        pool.send(player(steps[-1].observation, t))
        steps.append(pool.recv())
    return steps


def always(action: int) -> Player:
    return lambda observation, t: np.full(len(observation["vector"]), action)


@pytest.mark.parametrize("arms", [2, 4, 7])
def test_arm_k_of_a_bandit_pays_its_share(arms: int) -> None:
    pulls = np.arange(3 * arms).reshape(arms, 3) % arms  # [t,N]
    for action, step in zip(pulls, play("bandit", lambda _, t: pulls[t], arms, 3, size=arms)[1:], strict=True):
        np.testing.assert_allclose(step.reward, action / (arms - 1), rtol=1e-6)
        assert step.done.all()
        assert step.game_over.all()
        assert not step.truncated.any()


@pytest.mark.parametrize("cells", [2, 8, 13])
def test_walking_right_along_the_chain_earns_one(cells: int) -> None:
    steps = play("chain", always(1), 5 * (cells - 1), size=cells)[1:]
    for t, step in enumerate(steps, start=1):
        arrived = t % (cells - 1) == 0
        assert (step.reward == (1.0 if arrived else 0.0)).all()
        assert (step.done == arrived).all()
        assert not step.truncated.any()


@pytest.mark.parametrize("cells", [2, 8, 13])
def test_walking_left_along_the_chain_costs_and_is_cut_off(cells: int) -> None:
    steps = play("chain", always(0), 8 * cells, size=cells)[1:]
    for t, step in enumerate(steps, start=1):
        np.testing.assert_allclose(step.reward, -0.01, rtol=1e-6)
        assert (step.truncated == (t % (4 * cells) == 0)).all()
        assert (step.done == step.truncated).all()
    assert sum(step.truncated[0] for step in steps) == 2


def test_the_final_observation_of_the_chain_is_the_place_it_was_cut_off_at() -> None:
    """Three steps right in five, whatever comes between: cut off in cell 3, and the new episode opens in cell 0."""
    route = [1, 1, 0, 1, 1]
    cut = play("chain", lambda _, t: np.array([route[t]]), 5, num_envs=1, time_limit=5)[-1]
    assert cut.truncated.all()
    assert cut.final["vector"].argmax() == 3
    assert cut.observation["vector"].argmax() == 0


def test_arriving_in_the_very_last_step_is_no_truncation() -> None:
    last = play("chain", always(1), 7, time_limit=7)[-1]
    assert (last.reward == 1).all()
    assert last.done.all()
    assert not last.truncated.any()
    assert last.final == {}


class PerfectMemory:
    """Writes the sign down while it is shown, says it when the light goes on."""

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


def test_the_dark_says_nothing() -> None:
    """Between sign and light all is zero; the light is the last entry alone, the sign one of the others."""
    steps = play("recall", always(0), 26, num_envs=50, delay=8)
    for t, step in enumerate(steps):
        seen = step.observation["vector"]
        if t % 9 == 0:
            assert (seen[:, :-1].sum(axis=1) == 1).all()
            assert (seen[:, -1] == 0).all()
        else:
            assert (seen[:, :-1] == 0).all()
            assert (seen[:, -1] == (t % 9 == 8)).all()


@pytest.mark.parametrize("answer", range(4))
def test_a_fixed_answer_is_right_once_in_k(answer: int) -> None:
    steps = play("recall", always(answer), 3 * 100, num_envs=200, delay=2)[1:]
    right = np.stack([step.reward for step in steps if step.done.all()])
    assert right.shape == (100, 200)
    assert right.mean() == pytest.approx(1 / 4, abs=5 * np.sqrt(0.25 * 0.75 / right.size))


def follow_the_ball(observation: Arrays, t: int) -> np.ndarray:
    field = observation["image"][:, 0]  # [N,H,W]
    ball = (field == 255).any(axis=1).argmax(axis=1)
    paddle = (field[:, -1] == 128).argmax(axis=1)
    return 1 + np.sign(ball - paddle)


@pytest.mark.parametrize("size", [2, 3, 10, 31])
def test_following_the_ball_always_catches_it(size: int) -> None:
    steps = play("catch", follow_the_ball, 10 * (size - 1), num_envs=20, size=size)[1:]
    for t, step in enumerate(steps, start=1):
        landed = t % (size - 1) == 0
        assert (step.reward == float(landed)).all()
        assert (step.done == landed).all()


def test_fleeing_from_the_ball_misses_it() -> None:
    """The paddle starts in the middle of five columns: nine steps are enough to reach a corner away from any ball."""

    def flee(observation: Arrays, t: int) -> np.ndarray:
        ball = (observation["image"][:, 0] == 255).any(axis=1).argmax(axis=1)
        return np.where(ball < 3, 2, 0)

    ends = [step for step in play("catch", flee, 90, num_envs=20)[1:] if step.done.any()]
    assert len(ends) == 10
    assert all((step.reward == -1).all() for step in ends)


def test_a_world_needs_two_of_a_thing() -> None:
    with pytest.raises(UserError, match="at least two"):
        make("toy/chain", size=1)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """5 standard errors on each moment; lanes seeded 0, 1, 2... are the hardest case for a weak generator."""
    streams = Streams(list(range(256)))
    numbers = np.stack([streams.uniform(np.ones(256, bool)) for _ in range(2000)])  # [draws, lanes]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.mean() == pytest.approx(1 / 2, abs=5 * np.sqrt(1 / 12 / numbers.size))
    assert numbers.var() == pytest.approx(1 / 12, abs=5 * np.sqrt(1 / 180 / numbers.size))
    centred = (numbers - 0.5) * np.sqrt(12)
    between_lanes = (centred.T @ centred / 2000)[~np.eye(256, dtype=bool)]
    assert np.abs(between_lanes).max() < 6 / np.sqrt(2000)
    between_draws = (centred[1:] * centred[:-1]).mean(axis=0)
    assert np.abs(between_draws).max() < 5 / np.sqrt(1999)


def test_integers_are_uniform() -> None:
    streams = Streams(list(range(100, 200)))
    numbers = np.concatenate([streams.integers(np.ones(100, bool), 7) for _ in range(500)])
    counts = np.bincount(numbers, minlength=7)
    assert len(counts) == 7
    assert ((counts - 50_000 / 7) ** 2 / (50_000 / 7)).sum() < 27.9  # chi-square, 6 degrees of freedom, p = 1e-4


def test_a_stream_stays_while_others_advance() -> None:
    """Whichever rows advance, each row's numbers come in its own order."""
    together, apart = Streams([3, 4, 5]), Streams([3, 4, 5])
    numbers = np.stack([together.uniform(np.ones(3, bool)) for _ in range(40)])
    taken = np.zeros(3, int)
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = rng.random(3) < 0.6
        drawn = apart.uniform(rows)
        np.testing.assert_array_equal(drawn[rows], numbers[taken, range(3)][rows])
        taken[rows] += 1
    assert len(set(taken.tolist())) > 1
