"""Atari against an independent oracle: ale-py's emulator, driven by hand one frame at a time.

With `noops=1` a game starts without chance: the emulator's reset and one frame (FIRE where it is pressed, else NOOP). So
the oracle knows everything that the pool must show: rewards, lives, ends, memory and pictures.
"""

import itertools
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ale_py
import numpy as np
import pytest
from ale_py import Action, ALEInterface, roms

from bestiary.envs import make
from bestiary.envs.atari import ACTIONS, action_names, games
from bestiary.errors import RunError
from bestiary.rollout import Step

GAMES = ["Breakout", "Pong", "SpaceInvaders"]
LANES = 4

ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def rom_path(game: str) -> str:
    snake = re.sub(r"(?<!^)(?=[A-Z]|3d)", "_", game).lower()  # SpaceInvaders -> space_invaders
    return roms.get_rom_path(snake)


def area_average(screen: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale [H,W] down exactly: each new pixel is the mean of the old ones below it, in part where only in part."""

    def shares(old: int, new: int) -> np.ndarray:
        edges = np.arange(new + 1) * old / new
        left, right = edges[:-1, None], edges[1:, None]
        pixels = np.arange(old)[None]
        overlap = np.minimum(right, pixels + 1) - np.maximum(left, pixels)
        return np.clip(overlap, 0, None) * new / old

    return shares(screen.shape[0], height) @ screen @ shares(screen.shape[1], width).T


class Oracle:
    """One emulator, one decision at a time, with DeepMind's rules written out."""

    def __init__(self, game: str, fire: bool = True, life_ends: bool = True, skip: int = 4):
        self.ale = ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(rom_path(game))
        self.actions = self.ale.getMinimalActionSet()
        self.fire, self.life_ends, self.skip = fire and Action.FIRE in self.actions, life_ends, skip
        self.watching = False  # pictures cost time
        self.earned_by_fire = 0.0
        self.start_game()

    def start_game(self) -> None:
        self.ale.reset_game()
        self.ale.act(Action.FIRE if self.fire else Action.NOOP)
        self.lives = self.ale.lives()
        self.screen = self.ale.getScreenGrayscale()

    def _hold(self, action: Action) -> float:
        """One action for `skip` frames; the screen is the brighter of the last two."""
        reward, screens = 0.0, deque[np.ndarray](maxlen=2)
        for _ in range(self.skip):
            reward += self.ale.act(action)
            if self.watching:
                screens.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        if self.watching:
            self.screen = np.max(list(screens), axis=0)
        return reward

    def decide(self, action: int) -> tuple[float, bool, bool]:
        """The reward, whether learning's episode ended, and whether the game did. A new game starts at once."""
        reward = self._hold(self.actions[action])
        lost = self.ale.lives() < self.lives and not self.ale.game_over()
        if lost and self.fire:
            earned = self._hold(Action.FIRE)
            self.earned_by_fire += earned
            reward += earned
        over = self.ale.game_over()
        self.lives = self.ale.lives()
        if over:
            self.start_game()
        return reward, (lost and self.life_ends) or over, over


@dataclass
class Match:
    """A pool and its oracles, one for each lane, playing the same random actions."""

    steps: list[Step]  # of the pool, the first one included
    lives: list[list[int]]  # of the oracles after each decision
    decided: list[list[tuple[float, bool, bool]]]  # [t][lane]: what the oracles say
    ram: list[np.ndarray]  # [t] of [lanes,128]
    screens: dict[int, np.ndarray]  # [t] of [lanes,210,160], for some t
    pool_lives: list[np.ndarray]


def play_match(
    game: str, length: int, lanes: int, fire: bool = True, life_ends: bool = True, watch_every: int = 0
) -> Match:
    pool = make(f"atari/{game}", num_envs=lanes, seed=0, noops=1, fire=fire, life_ends=life_ends)
    oracles = [Oracle(game, fire, life_ends) for _ in range(lanes)]

    def memories() -> np.ndarray:
        return np.stack([oracle.ale.getRAM() for oracle in oracles])

    def screens() -> np.ndarray:
        return np.stack([oracle.screen for oracle in oracles])

    match = Match([pool.reset()], [], [], [memories()], {0: screens()}, [])
    rng = np.random.default_rng(7)
    for t in range(1, length + 1):
        actions = rng.integers(pool.action_spec.n, size=lanes)
        watched = watch_every > 0 and t % watch_every == 0
        pool.send(actions)
        for oracle in oracles:
            oracle.watching = watched
        match.decided.append([oracle.decide(int(a)) for oracle, a in zip(oracles, actions, strict=True)])
        match.steps.append(pool.recv())
        match.lives.append([oracle.lives for oracle in oracles])
        match.pool_lives.append(pool.lives.copy())  # type: ignore[attr-defined]
        match.ram.append(memories())
        if watched:
            match.screens[t] = screens()
    pool.close()
    return match


def assert_agreement(match: Match) -> None:
    """The pool took exactly one step for each decision of the oracles, and nothing differs anywhere."""
    decided = np.array(match.decided)  # [T,lanes,3]
    steps = match.steps[1:]
    assert len(steps) == len(decided)
    np.testing.assert_array_equal([step.reward for step in steps], decided[:, :, 0])
    np.testing.assert_array_equal([step.done for step in steps], decided[:, :, 1] == 1)
    np.testing.assert_array_equal([step.game_over for step in steps], decided[:, :, 2] == 1)
    np.testing.assert_array_equal([step.measures["score"] for step in steps], decided[:, :, 0])
    np.testing.assert_array_equal(match.pool_lives, match.lives)
    np.testing.assert_array_equal([step.measures["ram"] for step in match.steps], match.ram)
    assert not any(step.truncated.any() for step in steps)


@lru_cache(maxsize=1)  # a fixture of the module would be made anew where others come between its tests
def long_match(game: str) -> Match:
    """5,000 steps of one game, in four lanes."""
    return play_match(game, 1250, LANES, watch_every=25)


@pytest.fixture(params=[pytest.param(game, marks=pytest.mark.xdist_group(game)) for game in GAMES])
def match(request: pytest.FixtureRequest) -> Match:
    return long_match(request.param)


def test_the_pool_agrees_with_the_oracle(match: Match, request: pytest.FixtureRequest) -> None:
    assert_agreement(match)
    game = request.node.callspec.params["match"]
    done, over = (np.array([getattr(step, name) for step in match.steps[1:]]) for name in ("done", "game_over"))
    assert over.any(axis=0).all(), "every lane should have finished a game for this to say much"
    assert np.array_equal(done, over) == (game == "Pong")  # Pong has no lives
    assert np.count_nonzero([step.reward for step in match.steps]) > 20


def test_the_newest_frame_is_the_brighter_of_two_screens_scaled_by_area(match: Match) -> None:
    compared = 0
    for t, screens in match.screens.items():
        for lane, screen in enumerate(screens):
            expected = area_average(screen.reshape(210, 160).astype(float), 84, 84)
            shown = match.steps[t].observation["image"][lane, -1]
            assert np.abs(shown - expected).max() <= 2, (t, lane)
            compared += 1
    assert compared == LANES * 51


def test_the_stack_has_the_oldest_frame_first_and_is_refilled_at_done(match: Match) -> None:
    lanes: list[deque[np.ndarray]] = [deque(maxlen=4) for _ in range(LANES)]
    for step in match.steps:
        for lane, frames in enumerate(lanes):
            image = step.observation["image"][lane]
            frames.extend([image[-1]] * (4 if step.done[lane] else 1))
            np.testing.assert_array_equal(image, np.stack(list(frames)))


@pytest.mark.parametrize(
    ("game", "fire", "life_ends"),
    [("Breakout", True, False), ("Breakout", False, True), ("Seaquest", True, True), ("Asterix", True, True)],
)
def test_the_pool_agrees_without_fire_or_without_life_ends(game: str, fire: bool, life_ends: bool) -> None:
    """Seaquest knows all eighteen actions, Asterix has no FIRE among its own."""
    match = play_match(game, 200, 2, fire, life_ends)
    assert_agreement(match)
    assert (np.diff(match.lives, axis=0) < 0).any(), "no life was lost: this game says nothing"
    if not life_ends:
        for step in match.steps[1:]:
            np.testing.assert_array_equal(step.done, step.game_over)


def test_what_fire_earns_after_a_lost_life_is_not_lost() -> None:
    """60 frames of FIRE are long enough to shoot something down in River Raid before anybody decides again."""
    pool, oracle = make("atari/Riverraid", noops=1, frame_skip=60), Oracle("Riverraid", skip=60)
    pool.reset()
    for action in np.random.default_rng(7).integers(18, size=60):
        pool.send(np.array([action]))
        reward, done, over = oracle.decide(int(action))
        step = pool.recv()
        assert (step.reward[0], step.done[0], step.game_over[0]) == (reward, done, over)
    assert oracle.earned_by_fire > 0
    pool.close()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_game_knows_the_actions_that_the_emulator_says(every: int) -> None:
    from envpool.atari.registration import atari_game_list

    assert [game.lower() for game in games()] == [game.replace("_", "") for game in atari_game_list]
    for game in games()[::every]:
        ale = ALEInterface()
        ale.loadROM(rom_path(game))
        assert action_names(game, full=False) == tuple(action.name for action in ale.getMinimalActionSet()), game


def test_the_full_set_has_eighteen_actions() -> None:
    assert tuple(ACTIONS) == tuple(Action(value).name for value in range(18))
    for game in ("Breakout", "Freeway", "Seaquest"):
        assert action_names(game, full=True) == tuple(ACTIONS)
    pool = make("atari/Breakout", full_actions=True, noops=1)
    assert pool.action_spec.n == 18
    oracle = Oracle("Breakout")
    oracle.actions = oracle.ale.getLegalActionSet()
    pool.reset()
    for action in [*range(18), *range(18)]:
        pool.send(np.array([action]))
        reward, *_ = oracle.decide(action)
        step = pool.recv()
        assert step.reward[0] == reward
        np.testing.assert_array_equal(step.measures["ram"][0], oracle.ale.getRAM())


def play(length: int, actions: Any = None, **options: Any) -> list[Step]:
    """Breakout in one lane with random (or the given) actions; without chance in the emulator but for `options`."""
    pool = make("atari/Breakout", num_envs=1, **{"noops": 1, **options})
    steps = [pool.reset()]
    chosen = np.random.default_rng(11).integers(pool.action_spec.n, size=length) if actions is None else actions
    for action in itertools.islice(chosen, length):
        pool.send(np.array([action]))
        steps.append(pool.recv())
    pool.close()
    return steps


def test_a_time_limit_truncates_with_the_last_frames() -> None:
    """Without life ends the uncut game shows at the same time what the cut one must have ended on."""
    uncut, cut = play(60, life_ends=False), play(60, life_ends=False, time_limit=25)
    assert [t for t, step in enumerate(cut) if step.truncated[0]] == [25, 50]
    for step in (cut[25], cut[50]):
        assert step.done[0]
        assert step.game_over[0]
    for t in range(25):
        assert not cut[t].final
        np.testing.assert_array_equal(cut[t].observation["image"], uncut[t].observation["image"])
    np.testing.assert_array_equal(cut[25].final["image"], uncut[25].observation["image"])
    first = cut[0].observation["image"]
    np.testing.assert_array_equal(cut[25].observation["image"], first)
    assert not np.array_equal(cut[25].final["image"], first)


@pytest.fixture(scope="module")
def game_length() -> int:
    """Decisions that one recorded game of Breakout lasts, without FIRE of ours in between."""
    steps = play(600, life_ends=False)
    length = next(t for t, step in enumerate(steps) if step.game_over[0])
    assert not steps[length].truncated[0]
    return length


def test_a_game_over_in_the_last_step_before_the_time_limit_is_no_truncation(game_length: int) -> None:
    ended = play(game_length, life_ends=False, time_limit=game_length)[-1]
    assert ended.game_over[0]
    assert ended.done[0]
    assert not ended.truncated[0]
    assert ended.final == {}
    cut = play(game_length, life_ends=False, time_limit=game_length - 1)[-2]
    assert cut.truncated[0]
    assert cut.game_over[0]


def test_after_a_game_over_at_the_time_limit_the_next_game_is_whole(game_length: int) -> None:
    """The start of the next game costs no decision: it equals the first game, played with the same actions."""
    actions = np.random.default_rng(11).integers(4, size=game_length)
    steps = play(2 * game_length, np.tile(actions, 2), life_ends=False, time_limit=game_length)
    for first, second in zip(steps[:game_length], steps[game_length:], strict=False):
        np.testing.assert_array_equal(first.observation["image"], second.observation["image"])
        np.testing.assert_array_equal(first.measures["ram"], second.measures["ram"])


def test_the_time_limit_counts_decisions_where_lives_end_episodes() -> None:
    """FIRE after a lost life is no decision: with lives or without, the game is cut off after 100 of them."""
    steps = play(100, time_limit=100)
    assert any(step.done[0] for step in steps[1:90]), "no life was lost: this game says nothing"
    assert [t for t, step in enumerate(steps) if step.truncated[0]] == [100]


def test_the_time_limit_counts_decisions_after_fixed_noops() -> None:
    steps = play(20, noop_mode="fixed", noops=20, time_limit=15)
    assert [t for t, step in enumerate(steps) if step.truncated[0]] == [15]


def test_a_life_lost_in_the_last_step_before_the_time_limit_is_no_truncation() -> None:
    """Learning's episode ended by itself, so nothing must be bootstrapped from it; the game is cut off all the same."""
    lost = next(t for t, step in enumerate(play(300)) if t > 0 and step.done[0])
    last = play(lost, time_limit=lost)[-1]
    assert last.done[0]
    assert not last.truncated[0]


@pytest.mark.parametrize("noops", [1, 20])
def test_fixed_noops_are_the_same_whatever_the_seed(noops: int) -> None:
    first, second = (play(150, noop_mode="fixed", noops=noops, seed=seed) for seed in (1, 2))
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours.observation["image"], theirs.observation["image"])
        np.testing.assert_array_equal(ours.measures["ram"], theirs.measures["ram"])


def test_fixed_noops_are_idle_frames() -> None:
    """20 frames are five decisions of NOOP and then FIRE, which nobody sees. Breakout's second action is FIRE."""
    idle = play(6, [0] * 5 + [1], fire=False)
    opened = play(0, noop_mode="fixed", noops=20)
    np.testing.assert_array_equal(opened[0].measures["ram"], idle[6].measures["ram"])


def test_a_life_lost_during_fixed_noops_is_not_hidden() -> None:
    with pytest.raises(RunError, match="a life was lost during 1000 no-ops"):
        make("atari/SpaceInvaders", noop_mode="fixed", noops=1000).reset()


def test_random_noops_depend_on_the_seed() -> None:
    first = [play(0, noops=30, seed=seed)[0].measures["ram"].tobytes() for seed in range(4)]
    assert len(set(first)) >= 3


def test_sticky_actions_are_random_and_cannot_be_saved() -> None:
    sticky, sure = (play(60, sticky=sticky, life_ends=False) for sticky in (0.5, 0.0))
    assert any(not np.array_equal(a.measures["ram"], b.measures["ram"]) for a, b in zip(sticky, sure, strict=True))
    pool = make("atari/Breakout", sticky=0.5)
    pool.reset()
    assert not pool.saveable
    assert pool.save() == {}


def test_frame_size_scales_the_same_screen() -> None:
    pool = make("atari/Breakout", noops=1, frame_size=(105, 40), frame_stack=1)
    assert pool.observation_spec["image"].shape == (1, 105, 40)
    screen = Oracle("Breakout").screen.reshape(210, 160).astype(float)
    assert np.abs(pool.reset().observation["image"][0, 0] - area_average(screen, 105, 40)).max() <= 2


def test_colour_frames_are_the_screen_itself_at_full_size() -> None:
    pool = make("atari/Breakout", noops=1, gray=False, frame_size=(210, 160), frame_stack=2, render=True)
    assert pool.observation_spec["image"].shape == (6, 210, 160)
    oracle = Oracle("Breakout")
    image = pool.reset().observation["image"][0]
    expected = np.moveaxis(oracle.ale.getScreenRGB(), -1, 0)
    np.testing.assert_array_equal(image, np.concatenate([expected, expected]))
    np.testing.assert_array_equal(pool.render()[0], oracle.ale.getScreenRGB())


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_frame_stack(depth: int) -> None:
    for deep, flat in zip(play(40, frame_stack=depth), _stacked(play(40, frame_stack=1), depth), strict=True):
        np.testing.assert_array_equal(deep.observation["image"][0], flat)


def _stacked(steps: list[Step], depth: int) -> Iterator[np.ndarray]:
    frames: deque[np.ndarray] = deque(maxlen=depth)
    for step in steps:
        frames.extend([step.observation["image"][0]] * (depth if step.done[0] else 1))
        yield np.concatenate(list(frames))


@pytest.mark.parametrize("skip", [1, 2, 7])
def test_frame_skip(skip: int) -> None:
    pool = make("atari/Breakout", noops=1, frame_skip=skip)
    assert pool.frames_per_step == skip
    oracle = Oracle("Breakout", skip=skip)
    oracle.watching = True
    pool.reset()
    for action in np.random.default_rng(0).integers(4, size=200 // skip):
        pool.send(np.array([action]))
        reward, done, over = oracle.decide(int(action))
        step = pool.recv()
        assert (step.reward[0], step.done[0], step.game_over[0]) == (reward, done, over)
        np.testing.assert_array_equal(step.measures["ram"][0], oracle.ale.getRAM())
        expected = area_average(oracle.screen.reshape(210, 160).astype(float), 84, 84)
        assert np.abs(step.observation["image"][0, -1] - expected).max() <= 2
