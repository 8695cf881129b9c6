"""Edits of an observed image inside a rectangle: erase, blur, move and copy. Images are uint8 or float [C,H,W].

All channels are edited at the same place, so an edit changes all stacked frames. The functions return a new image.
"""

from dataclasses import dataclass

import numpy as np

from bestiary.interpretability.saliency import PRESETS, blur_matrix

RING = 2  # width in pixels of the ring around an erased rectangle, from which the fill colour is computed
BLUR_PRESET = PRESETS["torchbeast-popart"]


@dataclass(frozen=True)
class Rectangle:
    """A rectangle in pixels of the agent's observation. (x, y) is its upper left pixel.

    If the observation describes the cells of a grid, the unit is a cell: x is the column and y is the row.
    """

    x: int
    y: int
    width: int
    height: int

    @property
    def rows(self) -> slice:
        return slice(self.y, self.y + self.height)

    @property
    def columns(self) -> slice:
        return slice(self.x, self.x + self.width)

    def fits(self, size: tuple[int, int]) -> bool:
        """Return whether the rectangle is not empty and lies completely inside an image of the size (H, W)."""
        height, width = size
        is_positive = min(self.x, self.y) >= 0 and min(self.width, self.height) >= 1
        return is_positive and self.x + self.width <= width and self.y + self.height <= height

    def scaled(self, old_size: tuple[int, int], new_size: tuple[int, int]) -> "Rectangle":
        """Return the smallest rectangle of whole pixels that covers this rectangle in an image scaled to another size.

        Both sizes are (H, W). For example, this converts a rectangle on the rendered screen to a rectangle on the
        observation.
        """
        down, across = new_size[0] / old_size[0], new_size[1] / old_size[1]
        left, top = int(np.floor(self.x * across)), int(np.floor(self.y * down))
        right = min(new_size[1], int(np.ceil((self.x + self.width) * across)))
        bottom = min(new_size[0], int(np.ceil((self.y + self.height) * down)))
        return Rectangle(left, top, right - left, bottom - top)


def erase(image: np.ndarray, rectangle: Rectangle) -> np.ndarray:
    """Fill a rectangle with the median colour of the pixels around it, separately in each channel.

    If the rectangle covers the whole image, the fill colour is the median of the image.
    """
    _, height, width = image.shape
    ring = np.zeros((height, width), bool)
    top, left = max(0, rectangle.y - RING), max(0, rectangle.x - RING)
    ring[top : rectangle.y + rectangle.height + RING, left : rectangle.x + rectangle.width + RING] = True
    ring[rectangle.rows, rectangle.columns] = False
    pixels = image[:, ring] if ring.any() else image.reshape(len(image), -1)  # [C,n]
    edited = image.copy()
    edited[:, rectangle.rows, rectangle.columns] = np.median(pixels, axis=1)[:, None, None].astype(image.dtype)
    return edited


def blur(image: np.ndarray, rectangle: Rectangle) -> np.ndarray:
    """Replace a rectangle by the same part of the blurred image.

    The strength of the blur is the same as in saliency maps.
    """
    _, height, width = image.shape
    sigma = max(1.0, min(height, width) / BLUR_PRESET.image_size * BLUR_PRESET.blur)
    vertical, horizontal = blur_matrix(height, sigma).numpy(), blur_matrix(width, sigma).numpy()
    part = vertical[rectangle.rows] @ image.astype(np.float32) @ horizontal[rectangle.columns].T  # [C,h,w]
    edited = image.copy()
    edited[:, rectangle.rows, rectangle.columns] = _round_like(part, image)
    return edited


def copy(image: np.ndarray, rectangle: Rectangle, x: int, y: int) -> np.ndarray:
    """Paste a copy of a rectangle so that its upper left pixel is (x, y). Pixels outside the image are cut off."""
    return _paste(image, image[:, rectangle.rows, rectangle.columns], x, y)


def move(image: np.ndarray, rectangle: Rectangle, x: int, y: int) -> np.ndarray:
    """Erase a rectangle, and paste its old content so that its upper left pixel is (x, y)."""
    return _paste(erase(image, rectangle), image[:, rectangle.rows, rectangle.columns], x, y)


def replace_pixels(image: np.ndarray, mask: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Replace the pixels in `mask`, bool [C,H,W], by those of `background` [C,H,W]."""
    return np.where(mask, background, image).astype(image.dtype)


def _paste(image: np.ndarray, part: np.ndarray, x: int, y: int) -> np.ndarray:
    _, height, width = image.shape
    part = part[:, : max(0, height - y), : max(0, width - x)]
    edited = image.copy()
    edited[:, y : y + part.shape[1], x : x + part.shape[2]] = part
    return edited


def _round_like(values: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Convert values to the type of an image. Integers are rounded."""
    if image.dtype.kind == "f":
        return values.astype(image.dtype)
    return values.round().clip(0, 255).astype(image.dtype)
