"""ProcGen: names, levels, and that no frame of a level that is thrown away is ever seen."""

from typing import Any

import numpy as np
import pytest

from bestiary import envs
from bestiary.envs.procgen import GAMES, LEVELS, normalised, parse_levels, split
from bestiary.errors import UserError
from bestiary.resolve import resolve


def make(name: str, num_envs: int = 1, **options: Any) -> Any:
    """A pool, with all that only ProcGen's have."""
    return envs.make(name, num_envs, **options)


def first_frame(game: str, level: int) -> np.ndarray:
    """What a level begins with: that of a pool that has no other."""
    pool = make(game, 1, seed=5, levels=f"{level}:{level + 1}")
    frame = pool.reset().observation["image"][0].copy()
    pool.close()
    return frame


@pytest.mark.parametrize("game", ["procgen/starpilot:easy", "procgen/leaper:easy", "procgen/bigfish:easy"])
def test_an_episode_opens_with_the_first_frame_of_the_level_it_plays(game):
    pool = make(game, 4, seed=1, levels="0:6")
    frames = {level: first_frame(game, level) for level in range(6)}
    step, rng, opened = pool.reset(), np.random.default_rng(0), 0
    lengths, ended = np.zeros(4, int), []
    for _ in range(1_500):
        for row in np.flatnonzero(step.done):
            np.testing.assert_array_equal(step.observation["image"][row], frames[int(pool.level[row])])
            opened += 1
        pool.send(rng.integers(0, 15, 4))
        step = pool.recv()
        lengths += 1
        ended += lengths[step.done].tolist()
        lengths[step.done] = 0
        assert not step.truncated.any()
        np.testing.assert_array_equal(step.done, step.game_over)
    assert opened > 8
    assert min(ended) > 1  # no one-step episode of a reset that nobody decided
    pool.close()


def test_levels_come_from_the_range_evenly():
    pool = make("procgen/leaper:easy", 8, seed=2, levels="1000:1004")
    rng, levels = np.random.default_rng(0), []
    step = pool.reset()
    for _ in range(2_000):
        levels += pool.level[step.done].tolist()
        pool.send(rng.integers(0, 15, 8))
        step = pool.recv()
    counts = np.bincount(np.array(levels) - 1000, minlength=4)
    assert counts.sum() > 100
    assert len(counts) == 4
    assert counts.min() > 0.5 * counts.mean()
    pool.close()


def test_owed_levels_are_played_equally_often():
    pool = make("procgen/starpilot:easy", 4, seed=3, levels="10:17")
    pool.owe(16)
    rng, played = np.random.default_rng(0), []
    step = pool.reset()
    counts, level = pool.counts.copy(), pool.level.copy()
    while counts.any():
        pool.send(rng.integers(0, 15, 4))
        step = pool.recv()
        played += level[step.done & counts].tolist()
        counts, level = pool.counts.copy(), pool.level.copy()
    assert sorted(np.bincount(np.array(played) - 10)) == [2, 2, 2, 2, 2, 3, 3]  # chance says which come once more
    pool.close()


@pytest.mark.parametrize(("levels", "games"), [("20:26", 5), ("0:200", 5), ("200:2147483647", 3), ("all", 3)])
def test_of_more_levels_than_games_none_is_played_twice(levels, games):
    pool = make("procgen/starpilot:easy", 2, seed=3, levels=levels)
    pool.owe(games)
    rng, played = np.random.default_rng(0), []
    pool.reset()
    counts, level = pool.counts.copy(), pool.level.copy()
    while counts.any():
        pool.send(rng.integers(0, 15, 2))
        played += level[pool.recv().done & counts].tolist()
        counts, level = pool.counts.copy(), pool.level.copy()
    assert len(played) == len(set(played)) == games
    pool.close()


def test_the_one_level_of_exploration_is_owed_as_often_as_there_are_games():
    pool = make("procgen/coinrun:exploration", 4, seed=3)
    pool.owe(6)
    pool.reset()
    assert pool.counts.all()
    assert pool.owed == 2
    pool.close()


def test_seeds():
    def play(seed):
        pool = make("procgen/maze:memory", 2, seed=seed)
        rng, images = np.random.default_rng(0), [pool.reset().observation["image"]]
        for _ in range(20):
            pool.send(rng.integers(0, 15, 2))
            images.append(pool.recv().observation["image"])
        pool.close()
        return np.stack(images)

    np.testing.assert_array_equal(play(1), play(1))
    assert not np.array_equal(play(1), play(2))
    both = play(1)[0]
    assert not np.array_equal(both[0], both[1])


def test_every_game_and_mode_that_is_offered_opens():
    for game, about in GAMES.items():
        for mode in about.modes.split():
            pool = make(f"procgen/{game}:{mode}", 1, seed=0)
            assert pool.reset().observation["image"].shape == (1, 3, 64, 64)
            assert pool.action_spec.n == 15
            pool.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("starpilto:easy", "procgen/starpilto: there is no such game; did you mean starpilot?"),
        ("starpilot:memory", "starpilot has the modes easy, hard, extreme"),
        ("maze:esay", "maze has the modes easy, hard, memory, exploration; did you mean easy?"),
    ],
)
def test_names_that_are_none(name, said):
    with pytest.raises(UserError) as caught:
        split(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ("5:5", "no level"),
        ("200:0", "upside down; did you mean 0:200?"),
        ("200", "expected a range such as 0:200"),
        ("a:b", "expected a range such as 0:200"),
        (f"0:{LEVELS + 1}", "levels are numbered 0 to"),
    ],
)
def test_levels_that_are_none(levels, said):
    with pytest.raises(UserError) as caught:
        resolve({"env": "procgen/maze:easy", "levels": levels})
    assert said in str(caught.value)


def test_levels():
    assert parse_levels("0:200") == (0, 200)
    assert parse_levels("all") == (0, LEVELS)
    with pytest.raises(UserError, match="exploration is one level"):
        make("procgen/maze:exploration", levels="0:10")


def test_normalised_returns():
    assert normalised("procgen/starpilot:easy", 64) == 1
    assert normalised("procgen/starpilot:hard", 1.5) == 0
    assert normalised("procgen/fruitbot:easy", -1.5) == 0
    assert normalised("procgen/maze:memory", 10) is None


def test_the_wheel_of_qt_missing(monkeypatch):
    from bestiary.envs import procgen

    def no_library(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(procgen.ctypes, "CDLL", no_library)
    with pytest.raises(UserError, match="pip install PyQt5-Qt5"):
        procgen.load_qt.__wrapped__()
