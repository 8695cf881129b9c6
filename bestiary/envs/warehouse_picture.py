"""A warehouse for people: as a picture and as text."""

from dataclasses import dataclass

import numpy as np

SIDE = 210  # pixels of a picture's longer side, about; an Atari screen is as high
FLOOR, SHELF, LINE = (238, 234, 226), (203, 182, 151), (222, 216, 205)
CRATE, LID = (150, 92, 30), (232, 160, 62)
AGEING = ((86, 172, 92), (240, 200, 70), (206, 58, 52))  # new, half way, about to vanish
ROBOT, EYE = (44, 94, 168), (228, 238, 250)


@dataclass(frozen=True)
class Scene:
    """One warehouse at one moment."""

    shelves: np.ndarray  # bool [R,C]
    ages: np.ndarray  # int [R,C]: -1 where there is no item
    robot: tuple[int, int]  # row, column
    expiry: int  # 0: ages are not shown


def draw(scene: Scene) -> np.ndarray:
    """RGB uint8 [H,W,3]: shelves along the floor, crates on them, and the robot, a disc, on top of all."""
    rows, columns = scene.ages.shape
    side = max(6, SIDE // max(rows, columns))  # of a cell
    ground = np.where(scene.shelves[..., None], SHELF, FLOOR)  # [R,C,3]
    picture = ground.repeat(side, axis=0).repeat(side, axis=1).astype(np.uint8)
    picture[::side] = picture[:, ::side] = LINE
    across = (np.arange(side) + 0.5) / side - 0.5  # a cell's own coordinates, -0.5 to 0.5
    box = np.maximum(abs(across)[:, None], abs(across))  # [side,side] distances from its middle: squares, circles
    disc = np.hypot(across[:, None], across)
    for row, column in np.argwhere(scene.ages >= 0):
        cell = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
        cell[box < 0.38] = CRATE
        cell[box < 0.30] = _colour(scene.ages[row, column] / scene.expiry) if scene.expiry else LID
    row, column = scene.robot
    cell = picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
    cell[disc < 0.32] = ROBOT
    cell[disc < 0.12] = EYE
    return picture


def _colour(age: float) -> np.ndarray:
    """From green over yellow to red as an item grows old, 0 to 1."""
    return np.array([np.interp(age, (0.0, 0.5, 1.0), shades) for shades in zip(*AGEING, strict=True)], np.uint8)


def write(scene: Scene) -> str:
    """Lines of text: `.` floor, `_` a shelf, `o` an item (or its age; `+` from 10 on), `R` the robot, `@` it on an item."""
    signs = np.where(scene.shelves, "_", ".")
    for row, column in np.argwhere(scene.ages >= 0):
        age = scene.ages[row, column]
        signs[row, column] = "o" if not scene.expiry else str(age) if age < 10 else "+"
    signs[scene.robot] = "@" if scene.ages[scene.robot] >= 0 else "R"
    return "\n".join(" ".join(line) for line in signs)
