"""Flicker: frequency, effect on observations, no effect on the game, and saving."""

import itertools

import numpy as np
import pytest

from bestiary.envs import make_env
from bestiary.utils.errors import UserError

N = 8
pytestmark = pytest.mark.xdist_group("flicker")  # the tests share the played steps


def steps_of(length, save_at=None, **options):
    """Return the steps of Pong with fixed random actions; `save_at` saves and loads the environment at that step."""
    pool = make_env("atari/Pong", num_envs=N, seed=3, **options)
    rng = np.random.default_rng(0)
    steps = [pool.reset()]
    for t in range(length):
        if t == save_at:
            saved = pool.save()
            pool.close()
            pool = make_env("atari/Pong", num_envs=N, seed=3, **options)
            pool.load(saved)
        pool.send(rng.integers(0, 6, N))
        steps.append(pool.recv())
    pool.close()
    return steps


@pytest.fixture(scope="module")
def clear_steps():
    return steps_of(400)


@pytest.fixture(scope="module")
def flickering_steps():
    return steps_of(400, flicker=0.3)


def test_flicker_does_not_change_the_game(clear_steps, flickering_steps):
    for clear, flickering in zip(clear_steps, flickering_steps, strict=True):
        for name in ("reward", "done", "truncated", "game_over"):
            assert (getattr(clear, name) == getattr(flickering, name)).all()
        assert (clear.measures["ram"] == flickering.measures["ram"]).all()
    assert any(step.reward.any() for step in clear_steps)


def test_frames_are_blank_at_the_given_rate_and_as_measured(clear_steps, flickering_steps):
    blank = np.stack([step.measures["blank"] for step in flickering_steps])
    assert abs(blank.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / blank.size)
    assert len(np.unique(blank.mean(axis=0))) > 1  # environments have independent streams
    for clear, flickering, mask in zip(clear_steps, flickering_steps, blank.astype(bool), strict=True):
        newest = flickering.observation["image"][:, -1]
        assert not newest[mask].any()
        assert (newest[~mask] == clear.observation["image"][~mask, -1]).all()
    assert "blank" not in clear_steps[0].measures


def test_a_blank_frame_stays_in_the_stack(flickering_steps):
    for before, after in itertools.pairwise(flickering_steps):
        same_episode = ~after.done
        assert (after.observation["image"][same_episode, :3] == before.observation["image"][same_episode, 1:]).all()


def test_mode_stack_blanks_a_copy_of_the_whole_stack(clear_steps):
    for clear, flickering in zip(clear_steps, steps_of(400, flicker=0.3, flicker_mode="stack"), strict=True):
        mask = flickering.measures["blank"].astype(bool)
        assert not flickering.observation["image"][mask].any()
        assert (flickering.observation["image"][~mask] == clear.observation["image"][~mask]).all()


@pytest.mark.parametrize(("probability", "is_blank"), [(0.0, False), (1.0, True)])
def test_probabilities_0_and_1(probability, is_blank):
    image = steps_of(10, flicker=probability)[-1].observation["image"]
    assert (image == 0).all() == is_blank


def test_final_observations_flicker_too():
    steps = steps_of(60, flicker=0.5, time_limit=5)
    finals = np.concatenate([step.final["image"] for step in steps if step.truncated.any()])
    blank_fraction = (~finals[:, -1].any(axis=(1, 2))).mean()
    assert 0.3 < blank_fraction < 0.7


def test_flicker_is_saved_with_the_environment(flickering_steps):
    for expected, step in zip(flickering_steps[:61], steps_of(60, save_at=30, flicker=0.3), strict=True):
        assert (expected.observation["image"] == step.observation["image"]).all()


@pytest.mark.parametrize("wrong", [-0.1, 1.1])
def test_a_probability_outside_0_to_1_is_refused(wrong):
    with pytest.raises(UserError, match="flicker"):
        make_env("atari/Pong", flicker=wrong)
