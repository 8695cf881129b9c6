"""Atari against an independent oracle: the emulator of ale-py, stepped frame by frame.

With `noop_max=1` the start of a game is deterministic: a reset and one frame of FIRE (NOOP if FIRE is off).
The oracle therefore predicts rewards, lives, ends of episodes, RAM and images.
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

from bestiary.envs import make_env
from bestiary.envs.atari_games import ACTIONS, action_names, list_games
from bestiary.rollout import Step
from bestiary.utils.errors import RunError

GAMES = ["Breakout", "Pong", "SpaceInvaders"]
NUM_ENVS = 4

ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def rom_path(game: str) -> str:
    snake = re.sub(r"(?<!^)(?=[A-Z]|3d)", "_", game).lower()  # SpaceInvaders -> space_invaders
    return roms.get_rom_path(snake)


def area_average(screen: np.ndarray, height: int, width: int) -> np.ndarray:
    """Scale an image [H,W] down by area: a new pixel is the mean of the old pixels it covers, weighted by coverage."""

    def coverage(old: int, new: int) -> np.ndarray:
        edges = np.arange(new + 1) * old / new
        left, right = edges[:-1, None], edges[1:, None]
        pixels = np.arange(old)[None]
        overlap = np.minimum(right, pixels + 1) - np.maximum(left, pixels)
        return np.clip(overlap, 0, None) * new / old

    return coverage(screen.shape[0], height) @ screen @ coverage(screen.shape[1], width).T


class Oracle:
    """One emulator with an independent implementation of the preprocessing rules of DQN."""

    def __init__(self, game: str, fire: bool = True, episodic_life: bool = True, skip: int = 4):
        self.ale = ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(rom_path(game))
        self.actions = self.ale.getMinimalActionSet()
        self.fire = fire and Action.FIRE in self.actions
        self.episodic_life = episodic_life
        self.skip = skip
        self.capture_screens = False  # off by default, because it is slow
        self.fire_reward = 0.0  # reward of the FIRE steps after lost lives
        self.start_game()

    def start_game(self) -> None:
        self.ale.reset_game()
        self.ale.act(Action.FIRE if self.fire else Action.NOOP)
        self.lives = self.ale.lives()
        self.screen = self.ale.getScreenGrayscale()

    def _repeat(self, action: Action) -> float:
        """Repeat an action for `skip` frames; the screen is the maximum of the last two."""
        reward, screens = 0.0, deque[np.ndarray](maxlen=2)
        for _ in range(self.skip):
            reward += self.ale.act(action)
            if self.capture_screens:
                screens.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        if self.capture_screens:
            self.screen = np.max(list(screens), axis=0)
        return reward

    def step(self, action: int) -> tuple[float, bool, bool]:
        """Return reward, done and game over of one step; a new game starts in the same step."""
        reward = self._repeat(self.actions[action])
        lost = self.ale.lives() < self.lives and not self.ale.game_over()
        if lost and self.fire:
            fire_reward = self._repeat(Action.FIRE)
            self.fire_reward += fire_reward
            reward += fire_reward
        over = self.ale.game_over()
        self.lives = self.ale.lives()
        if over:
            self.start_game()
        return reward, (lost and self.episodic_life) or over, over


@dataclass
class Match:
    """Steps of a vector environment, and of one oracle per environment, with the same random actions."""

    steps: list[Step]  # of the vector environment, including the initial step
    lives: list[list[int]]  # [t][env]: of the oracles after each step
    oracle_steps: list[list[tuple[float, bool, bool]]]  # [t][env]: reward, done, game over
    ram: list[np.ndarray]  # [t] of [N,128], of the oracles
    screens: dict[int, np.ndarray]  # [t] of [N,210,160], of the oracles, for some t
    pool_lives: list[np.ndarray]  # [t] of [N]: of the vector environment


def play_match(
    game: str, length: int, num_envs: int, fire: bool = True, episodic_life: bool = True, capture_every: int = 0
) -> Match:
    pool = make_env(f"atari/{game}", num_envs=num_envs, seed=0, noop_max=1, fire=fire, episodic_life=episodic_life)
    oracles = [Oracle(game, fire, episodic_life) for _ in range(num_envs)]

    def ram() -> np.ndarray:
        return np.stack([oracle.ale.getRAM() for oracle in oracles])

    def screens() -> np.ndarray:
        return np.stack([oracle.screen for oracle in oracles])

    match = Match([pool.reset()], [], [], [ram()], {0: screens()}, [])
    rng = np.random.default_rng(7)
    for t in range(1, length + 1):
        actions = rng.integers(pool.action_spec.n, size=num_envs)
        capture = capture_every > 0 and t % capture_every == 0
        pool.send(actions)
        for oracle in oracles:
            oracle.capture_screens = capture
        match.oracle_steps.append([oracle.step(int(a)) for oracle, a in zip(oracles, actions, strict=True)])
        match.steps.append(pool.recv())
        match.lives.append([oracle.lives for oracle in oracles])
        match.pool_lives.append(pool.lives.copy())  # type: ignore[attr-defined]
        match.ram.append(ram())
        if capture:
            match.screens[t] = screens()
    pool.close()
    return match


def assert_agreement(match: Match) -> None:
    """Check that all steps of the vector environment equal those of the oracles."""
    expected = np.array(match.oracle_steps)  # [T,N,3]
    steps = match.steps[1:]
    assert len(steps) == len(expected)
    np.testing.assert_array_equal([step.reward for step in steps], expected[:, :, 0])
    np.testing.assert_array_equal([step.done for step in steps], expected[:, :, 1] == 1)
    np.testing.assert_array_equal([step.game_over for step in steps], expected[:, :, 2] == 1)
    np.testing.assert_array_equal([step.measures["score"] for step in steps], expected[:, :, 0])
    np.testing.assert_array_equal(match.pool_lives, match.lives)
    np.testing.assert_array_equal([step.measures["ram"] for step in match.steps], match.ram)
    assert not any(step.truncated.any() for step in steps)


@lru_cache(maxsize=1)  # a module fixture would be created again if tests with other parameters run in between
def long_match(game: str) -> Match:
    """Play 5,000 steps of one game in four environments."""
    return play_match(game, 1250, NUM_ENVS, capture_every=25)


@pytest.fixture(params=[pytest.param(game, marks=pytest.mark.xdist_group(game)) for game in GAMES])
def match(request: pytest.FixtureRequest) -> Match:
    return long_match(request.param)


def test_all_steps_equal_those_of_the_oracle(match: Match, request: pytest.FixtureRequest) -> None:
    assert_agreement(match)
    game = request.node.callspec.params["match"]
    done, over = (np.array([getattr(step, name) for step in match.steps[1:]]) for name in ("done", "game_over"))
    assert over.any(axis=0).all(), "each environment must finish a game for a meaningful test"
    assert np.array_equal(done, over) == (game == "Pong")  # Pong has no lives
    assert np.count_nonzero([step.reward for step in match.steps]) > 20


def test_the_newest_frame_is_the_maximum_of_two_screens_scaled_by_area(match: Match) -> None:
    compared = 0
    for t, screens in match.screens.items():
        for env, screen in enumerate(screens):
            expected = area_average(screen.reshape(210, 160).astype(float), 84, 84)
            frame = match.steps[t].observation["image"][env, -1]
            assert np.abs(frame - expected).max() <= 2, (t, env)
            compared += 1
    assert compared == NUM_ENVS * 51


def test_the_stack_has_the_oldest_frame_first_and_is_refilled_at_done(match: Match) -> None:
    stacks: list[deque[np.ndarray]] = [deque(maxlen=4) for _ in range(NUM_ENVS)]
    for step in match.steps:
        for env, frames in enumerate(stacks):
            image = step.observation["image"][env]
            frames.extend([image[-1]] * (4 if step.done[env] else 1))
            np.testing.assert_array_equal(image, np.stack(list(frames)))


@pytest.mark.parametrize(
    ("game", "fire", "episodic_life"),
    [("Breakout", True, False), ("Breakout", False, True), ("Seaquest", True, True), ("Asterix", True, True)],
)
def test_steps_equal_the_oracle_without_fire_or_episodic_life(game: str, fire: bool, episodic_life: bool) -> None:
    """The minimal action set of Seaquest has all 18 actions; that of Asterix has no FIRE."""
    match = play_match(game, 200, 2, fire, episodic_life)
    assert_agreement(match)
    assert (np.diff(match.lives, axis=0) < 0).any(), "no life was lost, so the test checks nothing"
    if not episodic_life:
        for step in match.steps[1:]:
            np.testing.assert_array_equal(step.done, step.game_over)


def test_the_reward_of_fire_after_a_lost_life_is_added() -> None:
    """In River Raid, 60 frames of FIRE are long enough to shoot an object before the next step."""
    pool, oracle = make_env("atari/Riverraid", noop_max=1, frame_skip=60), Oracle("Riverraid", skip=60)
    pool.reset()
    for action in np.random.default_rng(7).integers(18, size=60):
        pool.send(np.array([action]))
        reward, done, over = oracle.step(int(action))
        step = pool.recv()
        assert (step.reward[0], step.done[0], step.game_over[0]) == (reward, done, over)
    assert oracle.fire_reward > 0
    pool.close()


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_actions_of_each_game_are_those_of_the_emulator(every: int) -> None:
    from envpool.atari.registration import atari_game_list

    assert [game.lower() for game in list_games()] == [game.replace("_", "") for game in atari_game_list]
    for game in list_games()[::every]:
        ale = ALEInterface()
        ale.loadROM(rom_path(game))
        assert action_names(game, full=False) == tuple(action.name for action in ale.getMinimalActionSet()), game


def test_the_full_action_set_has_18_actions() -> None:
    assert tuple(ACTIONS) == tuple(Action(value).name for value in range(18))
    for game in ("Breakout", "Freeway", "Seaquest"):
        assert action_names(game, full=True) == tuple(ACTIONS)
    pool = make_env("atari/Breakout", full_actions=True, noop_max=1)
    assert pool.action_spec.n == 18
    oracle = Oracle("Breakout")
    oracle.actions = oracle.ale.getLegalActionSet()
    pool.reset()
    for action in [*range(18), *range(18)]:
        pool.send(np.array([action]))
        reward, *_ = oracle.step(action)
        step = pool.recv()
        assert step.reward[0] == reward
        np.testing.assert_array_equal(step.measures["ram"][0], oracle.ale.getRAM())


def play(length: int, actions: Any = None, **options: Any) -> list[Step]:
    """Play one environment of Breakout with random or given actions; deterministic unless `options` say otherwise."""
    pool = make_env("atari/Breakout", num_envs=1, **{"noop_max": 1, **options})
    steps = [pool.reset()]
    chosen = np.random.default_rng(11).integers(pool.action_spec.n, size=length) if actions is None else actions
    for action in itertools.islice(chosen, length):
        pool.send(np.array([action]))
        steps.append(pool.recv())
    pool.close()
    return steps


def test_a_time_limit_truncates_with_the_last_frames() -> None:
    """A game without a limit shows which final observation the truncated game must have."""
    unlimited, limited = play(60, episodic_life=False), play(60, episodic_life=False, time_limit=25)
    assert [t for t, step in enumerate(limited) if step.truncated[0]] == [25, 50]
    for step in (limited[25], limited[50]):
        assert step.done[0]
        assert step.game_over[0]
    for t in range(25):
        assert not limited[t].final
        np.testing.assert_array_equal(limited[t].observation["image"], unlimited[t].observation["image"])
    np.testing.assert_array_equal(limited[25].final["image"], unlimited[25].observation["image"])
    first = limited[0].observation["image"]
    np.testing.assert_array_equal(limited[25].observation["image"], first)
    assert not np.array_equal(limited[25].final["image"], first)


@pytest.fixture(scope="module")
def game_length() -> int:
    """Length in steps of the game of Breakout that `play` plays."""
    steps = play(600, episodic_life=False)
    length = next(t for t, step in enumerate(steps) if step.game_over[0])
    assert not steps[length].truncated[0]
    return length


def test_a_game_over_in_the_last_step_before_the_time_limit_is_no_truncation(game_length: int) -> None:
    ended = play(game_length, episodic_life=False, time_limit=game_length)[-1]
    assert ended.game_over[0]
    assert ended.done[0]
    assert not ended.truncated[0]
    assert ended.final == {}
    truncated = play(game_length, episodic_life=False, time_limit=game_length - 1)[-2]
    assert truncated.truncated[0]
    assert truncated.game_over[0]


def test_after_a_game_over_at_the_time_limit_the_next_game_is_complete(game_length: int) -> None:
    """The start of the next game takes no step: with the same actions, it equals the first game."""
    actions = np.random.default_rng(11).integers(4, size=game_length)
    steps = play(2 * game_length, np.tile(actions, 2), episodic_life=False, time_limit=game_length)
    for first, second in zip(steps[:game_length], steps[game_length:], strict=False):
        np.testing.assert_array_equal(first.observation["image"], second.observation["image"])
        np.testing.assert_array_equal(first.measures["ram"], second.measures["ram"])


def test_the_time_limit_does_not_count_fire_after_lost_lives() -> None:
    """FIRE after a lost life is a hidden step: the game is truncated after 100 other steps."""
    steps = play(100, time_limit=100)
    assert any(step.done[0] for step in steps[1:90]), "no life was lost, so the test checks nothing"
    assert [t for t, step in enumerate(steps) if step.truncated[0]] == [100]


def test_the_time_limit_does_not_count_fixed_noops() -> None:
    steps = play(20, noop_mode="fixed", noop_max=20, time_limit=15)
    assert [t for t, step in enumerate(steps) if step.truncated[0]] == [15]


def test_a_life_lost_in_the_last_step_before_the_time_limit_is_no_truncation() -> None:
    """The episode terminated, so its value must not be bootstrapped; the game ends at the time limit all the same."""
    lost = next(t for t, step in enumerate(play(300)) if t > 0 and step.done[0])
    last = play(lost, time_limit=lost)[-1]
    assert last.done[0]
    assert not last.truncated[0]


@pytest.mark.parametrize("noop_max", [1, 20])
def test_fixed_noops_do_not_depend_on_the_seed(noop_max: int) -> None:
    first, second = (play(150, noop_mode="fixed", noop_max=noop_max, seed=seed) for seed in (1, 2))
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours.observation["image"], theirs.observation["image"])
        np.testing.assert_array_equal(ours.measures["ram"], theirs.measures["ram"])


def test_fixed_noops_are_hidden_noop_steps() -> None:
    """20 frames are five hidden steps of NOOP, followed by one of FIRE, which is action 1 of Breakout."""
    by_hand = play(6, [0] * 5 + [1], fire=False)
    fixed = play(0, noop_mode="fixed", noop_max=20)
    np.testing.assert_array_equal(fixed[0].measures["ram"], by_hand[6].measures["ram"])


def test_a_life_lost_during_fixed_noops_is_an_error() -> None:
    with pytest.raises(RunError, match="--noop-max 1000: a life was lost"):
        make_env("atari/SpaceInvaders", noop_mode="fixed", noop_max=1000).reset()


def test_random_noops_depend_on_the_seed() -> None:
    first = [play(0, noop_max=30, seed=seed)[0].measures["ram"].tobytes() for seed in range(4)]
    assert len(set(first)) >= 3


def test_sticky_actions_are_random_and_cannot_be_saved() -> None:
    sticky, deterministic = (play(60, sticky=sticky, episodic_life=False) for sticky in (0.5, 0.0))
    assert any(
        not np.array_equal(a.measures["ram"], b.measures["ram"]) for a, b in zip(sticky, deterministic, strict=True)
    )
    pool = make_env("atari/Breakout", sticky=0.5)
    pool.reset()
    assert not pool.saveable
    assert pool.save() == {}


def test_frame_size_scales_the_same_screen() -> None:
    pool = make_env("atari/Breakout", noop_max=1, frame_size=(105, 40), frame_stack=1)
    assert pool.observation_spec["image"].shape == (1, 105, 40)
    screen = Oracle("Breakout").screen.reshape(210, 160).astype(float)
    assert np.abs(pool.reset().observation["image"][0, 0] - area_average(screen, 105, 40)).max() <= 2


def test_colour_frames_are_the_screen_itself_at_full_size() -> None:
    pool = make_env("atari/Breakout", noop_max=1, gray=False, frame_size=(210, 160), frame_stack=2, render=True)
    assert pool.observation_spec["image"].shape == (6, 210, 160)
    oracle = Oracle("Breakout")
    image = pool.reset().observation["image"][0]
    expected = np.moveaxis(oracle.ale.getScreenRGB(), -1, 0)
    np.testing.assert_array_equal(image, np.concatenate([expected, expected]))
    np.testing.assert_array_equal(pool.render()[0], oracle.ale.getScreenRGB())


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_frame_stack(depth: int) -> None:
    expected = _stack(play(40, frame_stack=1), depth)
    for step, image in zip(play(40, frame_stack=depth), expected, strict=True):
        np.testing.assert_array_equal(step.observation["image"][0], image)


def _stack(steps: list[Step], depth: int) -> Iterator[np.ndarray]:
    frames: deque[np.ndarray] = deque(maxlen=depth)
    for step in steps:
        frames.extend([step.observation["image"][0]] * (depth if step.done[0] else 1))
        yield np.concatenate(list(frames))


@pytest.mark.parametrize("skip", [1, 2, 7])
def test_frame_skip(skip: int) -> None:
    pool = make_env("atari/Breakout", noop_max=1, frame_skip=skip)
    assert pool.frames_per_step == skip
    oracle = Oracle("Breakout", skip=skip)
    oracle.capture_screens = True
    pool.reset()
    for action in np.random.default_rng(0).integers(4, size=200 // skip):
        pool.send(np.array([action]))
        reward, done, over = oracle.step(int(action))
        step = pool.recv()
        assert (step.reward[0], step.done[0], step.game_over[0]) == (reward, done, over)
        np.testing.assert_array_equal(step.measures["ram"][0], oracle.ale.getRAM())
        expected = area_average(oracle.screen.reshape(210, 160).astype(float), 84, 84)
        assert np.abs(step.observation["image"][0, -1] - expected).max() <= 2
