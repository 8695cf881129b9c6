"""Labelled quantities of Atari games: RAM addresses of the positions of the ball, the player and other objects.

Addresses are facts about the games; many are listed in the Atari Annotated RAM Interface (Anand et al. 2019). The
addresses, offsets and sizes below were measured for this table: tests/envs/test_ram_labels.py compares them with the
objects on the screen. Where the list of Anand et al. differs from the measurement (Space Invaders: `enemies_y`, Demon
Attack: `player_x`), the measured address is used.

Two codings of a value occur. "plain" is the byte itself. "motion" is the coding of the console's motion registers: the
low four bits count blocks of 15 pixels, and the high four bits are a signed shift to the left. Such values are
converted to pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bestiary.envs.labelled_quantities import Label
from bestiary.step import Arrays

SCREEN = (210, 160)  # height and width of the screen, in pixels
MOTION_OFFSET = 14  # position of a sprite whose motion value is 0, in pixels
BALL = ("ball_y", 1, 255)  # the ball exists while ball_y is in this range
PADDLE_FOLLOWS_JOYSTICK = (
    "the game computes this value from the joystick in each frame, so it cannot be set; use --move"
)


@dataclass(frozen=True)
class RamLabel:
    """The address of one quantity in the RAM."""

    address: int
    description: str
    coding: str = "plain"  # plain or motion, see the module docstring
    copies: tuple[int, ...] = ()  # further addresses to which the value is written when the quantity is set
    exists_if: tuple[str, float, float] | None = None  # see `Label.exists_if`
    why_not_settable: str = ""

    def read(self, ram: np.ndarray) -> np.ndarray:
        """Return the values of N games, float32 [N], given the RAM of the games, uint8 [N,128]."""
        cell = ram[:, self.address].astype(np.int64)
        return (decode_motion(cell) if self.coding == "motion" else cell).astype(np.float32)

    def write(self, value: float) -> dict[int, int]:
        """Return {address: byte}: the bytes of the RAM that set the quantity to a value."""
        byte = encode_motion(int(value)) if self.coding == "motion" else int(value)
        return {address: byte for address in (self.address, *self.copies)}

    @property
    def label(self) -> Label:
        high = SCREEN[1] - 1 if self.coding == "motion" else 255
        return Label(self.description, 0, high, exists_if=self.exists_if, why_not_settable=self.why_not_settable)


@dataclass(frozen=True)
class ScreenObject:
    """An object whose place on the screen follows from labelled quantities.

    Its upper left pixel is (x + left, y_sign * y + top). x and y are the values of two labels. If a label is None, its
    value is 0.
    """

    width: int
    height: int
    left: int = 0
    top: int = 0
    x: str | None = None
    y: str | None = None
    y_sign: int = 1
    # The object is visible only if the value of this label is inside the range (both limits included).
    visible: tuple[str, float, float] | None = None

    def box(self, labels: Mapping[str, float]) -> tuple[int, int, int, int] | None:
        """Return x, y, width and height of the object on the screen, or None if it is not visible."""
        if self.visible is not None:
            name, low, high = self.visible
            if not low <= labels[name] <= high:
                return None
        x = self.left + (int(labels[self.x]) if self.x else 0)
        y = self.top + self.y_sign * (int(labels[self.y]) if self.y else 0)
        left, right = max(0, x), min(SCREEN[1], x + self.width)
        top, bottom = max(0, y), min(SCREEN[0], y + self.height)
        return (left, top, right - left, bottom - top) if right > left and bottom > top else None


def decode_motion(cell: np.ndarray) -> np.ndarray:
    """Convert values of motion registers to horizontal positions in pixels, 0 to 159."""
    shift = np.where(cell >> 4 > 7, (cell >> 4) - 16, cell >> 4)
    return (15 * (cell & 15) + MOTION_OFFSET - shift) % SCREEN[1]


def encode_motion(x: int) -> int:
    """Return the value of a motion register for a horizontal position in pixels. The inverse of `decode_motion`."""
    distance = (x - MOTION_OFFSET) % SCREEN[1]
    blocks = (distance + 7) // 15
    shift = 15 * blocks - distance
    return (shift & 15) << 4 | blocks


LABELS: dict[str, dict[str, RamLabel]] = {
    "Pong": {
        "ball_x": RamLabel(
            49, "horizontal position of the ball, 49 more than its column on the screen", exists_if=BALL
        ),
        "ball_y": RamLabel(
            54, "vertical position of the ball, 14 more than its row on the screen; 0: no ball", exists_if=BALL
        ),
        "player_y": RamLabel(
            51,
            "vertical position of the agent's paddle (right); after it is set, the game moves the paddle back to the "
            "position of the joystick",
            copies=(60,),
        ),
        "enemy_y": RamLabel(50, "vertical position of the opponent's paddle (left)", copies=(21,)),
        "player_score": RamLabel(14, "points of the agent"),
        "enemy_score": RamLabel(13, "points of the opponent"),
    },
    "Breakout": {
        "ball_x": RamLabel(
            99, "horizontal position of the ball, 49 more than its column on the screen", exists_if=BALL
        ),
        "ball_y": RamLabel(
            101, "vertical position of the ball, 9 less than its row on the screen; 0: no ball", exists_if=BALL
        ),
        "player_x": RamLabel(
            72,
            "horizontal position of the paddle, 47 more than its column on the screen",
            why_not_settable=PADDLE_FOLLOWS_JOYSTICK,
        ),
    },
    "SpaceInvaders": {
        "player_x": RamLabel(28, "horizontal position of the player, 1 more than its column on the screen"),
        "enemies_x": RamLabel(26, "horizontal position of the group of invaders, 1 more than its column on the screen"),
        "enemies_y": RamLabel(16, "number of 2-pixel rows that the group of invaders has come down"),
        "lives": RamLabel(
            73,
            "lives left",
            why_not_settable="the game ends when another counter reaches 0, so this value cannot be set",
        ),
    },
    "Riverraid": {
        "player_x": RamLabel(51, "horizontal position of the plane, 1 less than its column on the screen"),
        "missile_x": RamLabel(117, "horizontal position of the plane's missile, 1 more than its column on the screen"),
        "missile_y": RamLabel(50, "vertical position of the plane's missile, larger is higher; 180: no missile"),
        "fuel": RamLabel(55, "fuel level, high byte"),
    },
    "DemonAttack": {
        "player_x": RamLabel(16, "horizontal position of the player, in pixels", "motion"),
        "missile_x": RamLabel(22, "horizontal position of the player's missile, in pixels", "motion"),
        "missile_y": RamLabel(21, "vertical position of the player's missile, larger is higher"),
        "enemy_x1": RamLabel(17, "horizontal position of the right half of the highest demon, in pixels", "motion"),
        "enemy_x2": RamLabel(18, "horizontal position of the right half of the middle demon, in pixels", "motion"),
        "enemy_x3": RamLabel(19, "horizontal position of the right half of the lowest demon, in pixels", "motion"),
        "enemy_y1": RamLabel(69, "vertical position of the highest demon, larger is higher"),
        "enemy_y2": RamLabel(70, "vertical position of the middle demon, larger is higher"),
        "enemy_y3": RamLabel(71, "vertical position of the lowest demon, larger is higher"),
    },
}

OBJECTS: dict[str, dict[str, ScreenObject]] = {
    "Pong": {
        "ball": ScreenObject(2, 4, -49, -14, "ball_x", "ball_y", visible=("ball_y", 1, 255)),
        "player": ScreenObject(4, 16, 140, -14, None, "player_y"),
        "enemy": ScreenObject(4, 16, 16, -15, None, "enemy_y"),
    },
    "Breakout": {
        "ball": ScreenObject(2, 4, -49, 9, "ball_x", "ball_y", visible=("ball_y", 1, 180)),
        "player": ScreenObject(16, 4, -47, 189, "player_x", None),
    },
    "SpaceInvaders": {
        "player": ScreenObject(7, 10, -1, 185, "player_x", None),
    },
    "Riverraid": {
        "player": ScreenObject(7, 14, 1, 147, "player_x", None),
        "missile": ScreenObject(1, 8, -1, 157, "missile_x", "missile_y", y_sign=-1, visible=("missile_y", 0, 155)),
    },
    "DemonAttack": {
        "player": ScreenObject(7, 12, -2, 174, "player_x", None),
        "missile": ScreenObject(1, 8, 0, 172, "missile_x", "missile_y", y_sign=-1),
    },
}


def make_labels(game: str) -> dict[str, Label]:
    """Return the labelled quantities of a game; an empty dict if the game is not in the table."""
    return {name: label.label for name, label in LABELS.get(game, {}).items()}


def read_labels(game: str, ram: np.ndarray) -> Arrays:
    """Return the labelled quantities of N games by name, float32 [N], given the RAM of the games, uint8 [N,128]."""
    return {name: label.read(ram) for name, label in LABELS.get(game, {}).items()}


def ram_bytes(game: str, values: Mapping[str, float]) -> dict[int, int]:
    """Return {address: byte}: the bytes of the RAM that set labelled quantities to the given values."""
    bytes_to_write: dict[int, int] = {}
    for name, value in values.items():
        bytes_to_write |= LABELS[game][name].write(value)
    return bytes_to_write


def object_boxes(game: str, ram: np.ndarray) -> dict[str, tuple[int, int, int, int]]:
    """Return x, y, width and height on the screen of all visible objects of one game, by name. `ram` is uint8 [128]."""
    labels = {name: float(values[0]) for name, values in read_labels(game, ram[None]).items()}
    boxes = {name: thing.box(labels) for name, thing in OBJECTS.get(game, {}).items()}
    return {name: box for name, box in boxes.items() if box is not None}
