"""Flicker: how often frames are blank, what stays untouched, and that it belongs to the environment."""

import itertools

import numpy as np
import pytest

from bestiary.envs import make
from bestiary.errors import UserError

N = 8
pytestmark = pytest.mark.xdist_group("flicker")  # they share what was played


def steps_of(length, save_at=None, **options):
    """The steps of Pong under fixed random actions."""
    pool = make("atari/Pong", num_envs=N, seed=3, **options)
    rng = np.random.default_rng(0)
    steps = [pool.reset()]
    for t in range(length):
        if t == save_at:
            saved = pool.save()
            pool.close()
            pool = make("atari/Pong", num_envs=N, seed=3, **options)
            pool.load(saved)
        pool.send(rng.integers(0, 6, N))
        steps.append(pool.recv())
    pool.close()
    return steps


@pytest.fixture(scope="module")
def clear():
    return steps_of(400)


@pytest.fixture(scope="module")
def flickering():
    return steps_of(400, flicker=0.3)


def test_the_game_itself_is_untouched(clear, flickering):
    for one, other in zip(clear, flickering, strict=True):
        for name in ("reward", "done", "truncated", "game_over"):
            assert (getattr(one, name) == getattr(other, name)).all()
        assert (one.measures["ram"] == other.measures["ram"]).all()
    assert any(step.reward.any() for step in clear)


def test_rate_and_mask(clear, flickering):
    blank = np.stack([step.measures["blank"] for step in flickering])
    assert abs(blank.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / blank.size)
    assert len(np.unique(blank.mean(axis=0))) > 1  # environments have streams of their own
    for one, other, mask in zip(clear, flickering, blank.astype(bool), strict=True):
        newest = other.observation["image"][:, -1]
        assert not newest[mask].any()
        assert (newest[~mask] == one.observation["image"][~mask, -1]).all()
    assert "blank" not in clear[0].measures


def test_a_blank_frame_stays_in_the_stack(flickering):
    for before, after in itertools.pairwise(flickering):
        going_on = ~after.done
        assert (after.observation["image"][going_on, :3] == before.observation["image"][going_on, 1:]).all()


def test_stack_mode_blanks_a_copy_of_everything(clear):
    for one, other in zip(clear, steps_of(400, flicker=0.3, flicker_mode="stack"), strict=True):
        mask = other.measures["blank"].astype(bool)
        assert not other.observation["image"][mask].any()
        assert (other.observation["image"][~mask] == one.observation["image"][~mask]).all()


@pytest.mark.parametrize(("probability", "dark"), [(0.0, 0.0), (1.0, 1.0)])
def test_never_and_always(probability, dark):
    image = steps_of(10, flicker=probability)[-1].observation["image"]
    assert (image == 0).all() == bool(dark)


def test_what_a_cut_off_game_ended_on_flickers_too():
    steps = steps_of(60, flicker=0.5, time_limit=5)
    finals = np.concatenate([step.final["image"] for step in steps if step.truncated.any()])
    share = (~finals[:, -1].any(axis=(1, 2))).mean()
    assert 0.3 < share < 0.7


def test_is_saved_with_the_pool(flickering):
    for one, other in zip(flickering[:61], steps_of(60, save_at=30, flicker=0.3), strict=True):
        assert (one.observation["image"] == other.observation["image"]).all()


@pytest.mark.parametrize("wrong", [-0.1, 1.1])
def test_a_probability_is_between_0_and_1(wrong):
    with pytest.raises(UserError, match="flicker"):
        make("atari/Pong", flicker=wrong)
