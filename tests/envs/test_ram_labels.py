"""Labelled quantities of Atari games against the positions of the objects that the screen shows.

The objects are found by their colours on the rendered screen. Random actions are played with FIRE often enough that
games start and missiles fly. The screen shows a moving object where it was up to one emulator frame ago, so positions
may differ by the movement of one frame.
"""

from collections.abc import Callable

import numpy as np
import pytest

from bestiary.envs import make_env, ram_labels
from bestiary.step import Arrays

Colour = tuple[int, int, int]
WHITE, GREEN, ORANGE = (236, 236, 236), (92, 186, 92), (213, 130, 74)  # Pong
RED = (200, 72, 72)  # ball and paddle of Breakout
PLAYER, INVADER = (50, 132, 50), (134, 134, 29)  # Space Invaders
PLANE = (232, 232, 74)  # River Raid
VIOLET, LILAC = (184, 70, 162), (212, 140, 252)  # Demon Attack: player, missile


def play(game: str, steps: int, seed: int = 0) -> tuple[Arrays, np.ndarray]:
    """Return the labelled quantities [T] by name, and the screens [T,210,160,3], of steps with random actions."""
    pool = make_env(f"atari/{game}", num_envs=1, seed=seed, render=True)
    pool.reset()
    rng = np.random.default_rng(seed)
    labels, screens = [], []
    for t in range(steps):
        action = pool.action_spec.names.index("FIRE") if t % 7 == 0 else int(rng.integers(pool.action_spec.n))
        pool.send(np.array([action]))
        pool.recv()
        labels.append({name: values[0] for name, values in pool.read_labels().items()})
        screens.append(pool.render()[0])
    pool.close()
    return {name: np.array([row[name] for row in labels]) for name in labels[0]}, np.stack(screens)


def upper_left(
    screens: np.ndarray, is_object: Callable[[np.ndarray], np.ndarray], rows: slice, columns: slice = slice(0, 160)
) -> np.ndarray:
    """Return x and y [T,2] of the first object pixel from the left and from the top inside a region; nan: none."""
    found = np.full((len(screens), 2), np.nan)
    for t, screen in enumerate(screens):
        y, x = np.nonzero(is_object(screen[rows, columns]))
        if len(x):
            found[t] = x.min() + columns.start, y.min() + rows.start
    return found


def has_colour(colour: Colour) -> Callable[[np.ndarray], np.ndarray]:
    return lambda pixels: (pixels == colour).all(-1)


def is_not_black(pixels: np.ndarray) -> np.ndarray:
    return (pixels != 0).any(-1)


def share_within(label: np.ndarray, position: np.ndarray, tolerance: float) -> float:
    """Return the share of the steps with a visible object at which a label is within a tolerance of its position."""
    seen = np.isfinite(position)
    assert seen.sum() > 100
    return float((np.abs(label[seen] - position[seen]) <= tolerance).mean())


def test_pong_labels_are_the_positions_of_ball_and_paddles_on_the_screen() -> None:
    labels, screens = play("Pong", 300)
    field = slice(34, 194)
    ball = upper_left(screens, has_colour(WHITE), field)
    assert share_within(labels["ball_x"] - 49, ball[:, 0], 2) > 0.97
    assert share_within(labels["ball_y"] - 14, ball[:, 1], 4) > 0.97
    player = upper_left(screens, has_colour(GREEN), field, slice(140, 144))[:, 1]
    enemy = upper_left(screens, has_colour(ORANGE), field, slice(16, 20))[:, 1]
    player[player == 34] = np.nan  # the paddle is partly above the field
    enemy[enemy == 34] = np.nan
    assert share_within(labels["player_y"] - 14, player, 1) > 0.97
    assert share_within(labels["enemy_y"] - 15, enemy, 2) > 0.97


def test_breakout_labels_are_the_positions_of_ball_and_paddle_on_the_screen() -> None:
    labels, screens = play("Breakout", 300)
    inside = slice(8, 152)
    paddle = upper_left(screens, has_colour(RED), slice(190, 192), inside)[:, 0]
    assert share_within(labels["player_x"] - 47, paddle, 0) > 0.97
    ball = upper_left(screens, has_colour(RED), slice(93, 189), inside)
    assert share_within(labels["ball_x"] - 49, ball[:, 0], 1) > 0.97
    assert share_within(labels["ball_y"] + 9, ball[:, 1], 1) > 0.97


def test_space_invaders_labels_are_the_positions_of_player_and_invaders_on_the_screen() -> None:
    labels, screens = play("SpaceInvaders", 450)
    player = upper_left(screens, has_colour(PLAYER), slice(185, 195))[:, 0]
    assert share_within(labels["player_x"] - 1, player, 0) > 0.9
    invaders = upper_left(screens, has_colour(INVADER), slice(31, 157))
    assert share_within(labels["enemies_x"] - 1, invaders[:, 0], 0) > 0.97
    assert share_within(31 + 2 * labels["enemies_y"], invaders[:, 1], 0) > 0.97
    assert len(np.unique(labels["enemies_y"])) > 1


def test_river_raid_labels_are_the_positions_of_plane_and_missile_on_the_screen() -> None:
    labels, screens = play("Riverraid", 300)
    plane = upper_left(screens, has_colour(PLANE), slice(148, 160))[:, 0]
    assert share_within(labels["player_x"] + 1, plane, 3) > 0.9
    flies = (labels["missile_y"] > 30) & (labels["missile_y"] < 150)
    missile = np.full(len(screens), np.nan)
    for t in np.flatnonzero(flies):
        column = np.flatnonzero((screens[t, 10:140] == PLANE).all(-1).any(0))
        missile[t] = column[0] if len(column) else np.nan
    assert share_within(labels["missile_x"] - 1, missile, 1) > 0.8


def test_demon_attack_labels_are_the_positions_of_player_missile_and_demons_on_the_screen() -> None:
    labels, screens = play("DemonAttack", 300)
    player = upper_left(screens, has_colour(VIOLET), slice(174, 186))[:, 0]
    assert share_within(labels["player_x"] - 2, player, 2) > 0.9
    missile = np.full(len(screens), np.nan)
    for t, y in enumerate(172 - labels["missile_y"].astype(int)):
        if 30 < y < 165:
            column = np.flatnonzero((screens[t, y + 3 : y + 5] == LILAC).all(-1).any(0))
            missile[t] = column[0] if len(column) else np.nan
    assert share_within(labels["missile_x"], missile, 1) > 0.9
    for k in (1, 2, 3):
        right = np.full(len(screens), np.nan)
        for t, y in enumerate(176 - labels[f"enemy_y{k}"].astype(int)):
            if 25 < y < 160:
                # `enemy_x` is that of the right half, so the middle of a demon is a few pixels to the left. The two
                # halves are apart while a demon appears or has just been hit.
                columns = np.flatnonzero(is_not_black(screens[t, y : y + 8]).any(0))
                right[t] = columns.max() if len(columns) else np.nan
        assert share_within(labels[f"enemy_x{k}"] + 4.5, right, 2) > 0.75


def test_motion_codes_can_be_inverted() -> None:
    positions = np.arange(160)
    codes = np.array([ram_labels.encode_motion(int(x)) for x in positions])
    np.testing.assert_array_equal(ram_labels.decode_motion(codes), positions)


@pytest.mark.parametrize("game", ram_labels.LABELS)
def test_set_values_are_those_that_are_read(game: str) -> None:
    for name, label in ram_labels.LABELS[game].items():
        ram = np.zeros((1, 128), np.uint8)
        for address, byte in ram_labels.ram_bytes(game, {name: 70}).items():
            ram[0, address] = byte
        assert ram_labels.read_labels(game, ram)[name][0] == 70, label.description


@pytest.mark.parametrize("game", ram_labels.OBJECTS)
def test_objects_use_existing_labels(game: str) -> None:
    boxes = ram_labels.object_boxes(game, np.full(128, 100, np.uint8))
    assert "player" in boxes
    for x, y, width, height in boxes.values():
        assert 0 <= x < x + width <= 160
        assert 0 <= y < y + height <= 210
