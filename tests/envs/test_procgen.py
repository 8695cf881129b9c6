"""ProcGen: names, levels, level quotas, and episodes that start with the first frame of their level."""

from typing import Any

import numpy as np
import pytest

from bestiary.config.resolve import resolve
from bestiary.envs import lookup_score_range, make_env
from bestiary.envs.levels import NUM_LEVELS, parse_levels
from bestiary.envs.procgen import GAMES, parse_name
from bestiary.utils.errors import UserError


def make_procgen(name: str, num_envs: int = 1, **options: Any) -> Any:
    """Return a ProcgenVectorEnv, typed as Any so that tests can use its own attributes."""
    return make_env(name, num_envs, **options)


def first_frame(game: str, level: int) -> np.ndarray:
    """Return the first frame of a level, from an environment with this level alone."""
    pool = make_procgen(game, 1, seed=5, levels=f"{level}:{level + 1}")
    frame = pool.reset().observation["image"][0].copy()
    pool.close()
    return frame


@pytest.mark.parametrize("game", ["procgen/starpilot:easy", "procgen/leaper:easy", "procgen/bigfish:easy"])
def test_an_episode_starts_with_the_first_frame_of_its_level(game):
    pool = make_procgen(game, 4, seed=1, levels="0:6")
    frames = {level: first_frame(game, level) for level in range(6)}
    step, rng, started = pool.reset(), np.random.default_rng(0), 0
    lengths, ended = np.zeros(4, int), []
    for _ in range(1_500):
        for row in np.flatnonzero(step.done):
            np.testing.assert_array_equal(step.observation["image"][row], frames[int(pool.level[row])])
            started += 1
        pool.send(rng.integers(0, 15, 4))
        step = pool.recv()
        lengths += 1
        ended += lengths[step.done].tolist()
        lengths[step.done] = 0
        assert not step.truncated.any()
        np.testing.assert_array_equal(step.done, step.game_over)
    assert started > 8
    assert min(ended) > 1  # resets do not appear as episodes of one step
    pool.close()


def test_levels_are_drawn_evenly_from_the_range():
    pool = make_procgen("procgen/leaper:easy", 8, seed=2, levels="1000:1004")
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


def test_a_level_quota_plays_all_levels_equally_often():
    pool = make_procgen("procgen/starpilot:easy", 4, seed=3, levels="10:17")
    pool.set_level_quota(16)
    rng, played = np.random.default_rng(0), []
    step = pool.reset()
    in_quota, level = pool.in_quota.copy(), pool.level.copy()
    while in_quota.any():
        pool.send(rng.integers(0, 15, 4))
        step = pool.recv()
        played += level[step.done & in_quota].tolist()
        in_quota, level = pool.in_quota.copy(), pool.level.copy()
    assert sorted(np.bincount(np.array(played) - 10)) == [2, 2, 2, 2, 2, 3, 3]  # two random levels are played once more
    pool.close()


@pytest.mark.parametrize(("levels", "games"), [("20:26", 5), ("0:200", 5), ("200:2147483647", 3), ("all", 3)])
def test_a_level_quota_with_more_levels_than_games_plays_no_level_twice(levels, games):
    pool = make_procgen("procgen/starpilot:easy", 2, seed=3, levels=levels)
    pool.set_level_quota(games)
    rng, played = np.random.default_rng(0), []
    pool.reset()
    in_quota, level = pool.in_quota.copy(), pool.level.copy()
    while in_quota.any():
        pool.send(rng.integers(0, 15, 2))
        played += level[pool.recv().done & in_quota].tolist()
        in_quota, level = pool.in_quota.copy(), pool.level.copy()
    assert len(played) == len(set(played)) == games
    pool.close()


def test_in_mode_exploration_the_quota_is_the_single_level_repeated():
    pool = make_procgen("procgen/coinrun:exploration", 4, seed=3)
    pool.set_level_quota(6)
    pool.reset()
    assert pool.in_quota.all()
    assert pool.quota_left == 2
    pool.close()


def test_the_seed_determines_the_levels():
    def play(seed):
        pool = make_procgen("procgen/maze:memory", 2, seed=seed)
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


def test_each_game_and_mode_can_be_created():
    for game, properties in GAMES.items():
        for mode in properties.modes.split():
            pool = make_procgen(f"procgen/{game}:{mode}", 1, seed=0)
            assert pool.reset().observation["image"].shape == (1, 3, 64, 64)
            assert pool.action_spec.n == 15
            pool.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("starpilto:easy", "procgen/starpilto: unknown game; did you mean starpilot?"),
        ("starpilot:memory", "starpilot has the modes easy, hard, extreme"),
        ("maze:esay", "maze has the modes easy, hard, memory, exploration; did you mean easy?"),
    ],
)
def test_invalid_names(name, expected):
    with pytest.raises(UserError) as caught:
        parse_name(name)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ("5:5", "the range is empty"),
        ("200:0", "the start is above the end; did you mean 0:200?"),
        ("200", "expected a range such as 0:200"),
        ("a:b", "expected a range such as 0:200"),
        (f"0:{NUM_LEVELS + 1}", "levels are numbered 0 to"),
    ],
)
def test_invalid_levels(levels, expected):
    with pytest.raises(UserError) as caught:
        resolve({"env": "procgen/maze:easy", "levels": levels})
    assert expected in str(caught.value)


def test_valid_levels():
    assert parse_levels("0:200") == (0, 200)
    assert parse_levels("all") == (0, NUM_LEVELS)
    with pytest.raises(UserError, match="exploration has a single level"):
        make_procgen("procgen/maze:exploration", levels="0:10")


def test_normalised_returns():
    for name, value, expected in (("starpilot:easy", 64, 1), ("starpilot:hard", 1.5, 0), ("fruitbot:easy", -1.5, 0)):
        score_range = lookup_score_range(f"procgen/{name}")
        assert score_range is not None
        assert score_range.normalise(value) == expected
    assert lookup_score_range("procgen/maze:memory") is None


def test_a_missing_qt_library_is_an_error_with_the_install_command(monkeypatch):
    from bestiary.envs import procgen

    def no_library(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(procgen.ctypes, "CDLL", no_library)
    with pytest.raises(UserError, match="pip install PyQt5-Qt5"):
        procgen.load_qt.__wrapped__()
