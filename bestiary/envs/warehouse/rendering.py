"""Rendering of a warehouse as an image and as text."""

from dataclasses import dataclass

import numpy as np

IMAGE_SIZE = 210  # approximate length of the longer side, in pixels; an Atari screen has the same height
FLOOR_COLOUR = (238, 234, 226)
SHELF_COLOUR = (203, 182, 151)
LINE_COLOUR = (222, 216, 205)
ITEM_BORDER_COLOUR = (150, 92, 30)
ITEM_COLOUR = (232, 160, 62)
# Colours of an item at age 0, at half of its lifetime, and at the end of its lifetime.
AGE_COLOURS = ((86, 172, 92), (240, 200, 70), (206, 58, 52))
ROBOT_COLOUR = (44, 94, 168)
ROBOT_CENTRE_COLOUR = (228, 238, 250)


@dataclass(frozen=True)
class WarehouseView:
    """The data that are drawn in a picture of one warehouse with R rows and C columns of cells."""

    shelves: np.ndarray  # bool [R,C]: the cell has a shelf
    ages: np.ndarray  # int [R,C]: age of the item in the cell; -1: no item
    robot: tuple[int, int]  # row and column
    expiry: int  # age at which items expire; 0: the picture does not show ages


def draw_image(view: WarehouseView) -> np.ndarray:
    """Draw a warehouse as an RGB image uint8 [H,W,3], in which items are squares and the robot is a disc."""
    rows, columns = view.ages.shape
    side = max(6, IMAGE_SIZE // max(rows, columns))  # pixels per cell
    ground = np.where(view.shelves[..., None], SHELF_COLOUR, FLOOR_COLOUR)  # [R,C,3]
    image = ground.repeat(side, axis=0).repeat(side, axis=1).astype(np.uint8)
    image[::side] = LINE_COLOUR
    image[:, ::side] = LINE_COLOUR
    offset = (np.arange(side) + 0.5) / side - 0.5  # pixel coordinates in a cell, from -0.5 to 0.5
    square = np.maximum(abs(offset)[:, None], abs(offset))  # [side,side]: distance from the centre, maximum norm
    disc = np.hypot(offset[:, None], offset)  # [side,side]: Euclidean distance from the centre
    for row, column in np.argwhere(view.ages >= 0):
        cell = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
        cell[square < 0.38] = ITEM_BORDER_COLOUR
        cell[square < 0.30] = _age_colour(view.ages[row, column] / view.expiry) if view.expiry else ITEM_COLOUR
    row, column = view.robot
    cell = image[row * side : (row + 1) * side, column * side : (column + 1) * side]
    cell[disc < 0.32] = ROBOT_COLOUR
    cell[disc < 0.12] = ROBOT_CENTRE_COLOUR
    return image


def _age_colour(age: float) -> np.ndarray:
    """Return the colour of an item. `age` is a fraction of the lifetime: 0 is green, 0.5 yellow, 1 red."""
    channels = zip(*AGE_COLOURS, strict=True)
    return np.array([np.interp(age, (0.0, 0.5, 1.0), channel) for channel in channels], np.uint8)


def draw_text(view: WarehouseView) -> str:
    """Return a text with one symbol per cell: `.` floor, `_` shelf, `o` item, `R` robot, `@` robot on an item.

    If `view.expiry` is not 0, the symbol of an item is its age instead, or `+` from age 10 on.
    """
    symbols = np.where(view.shelves, "_", ".")
    for row, column in np.argwhere(view.ages >= 0):
        symbols[row, column] = _item_symbol(view.ages[row, column]) if view.expiry else "o"
    symbols[view.robot] = "@" if view.ages[view.robot] >= 0 else "R"
    return "\n".join(" ".join(line) for line in symbols)


def _item_symbol(age: int) -> str:
    return str(age) if age < 10 else "+"
