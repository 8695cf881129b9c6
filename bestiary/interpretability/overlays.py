"""Draw heat maps over RGB images. Images are uint8 [H,W,3]."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

# Left, top, right and bottom edge of a rectangle, as fractions of the width and height of an image.
Box = tuple[float, float, float, float]
Colour = tuple[int, int, int]
WHOLE_IMAGE: Box = (0, 0, 1, 1)
RED: Colour = (255, 40, 0)
DIMMING = 0.6  # pixels at which a map is 1 are darkened by this fraction, so that colours are visible on white


def overlay_map(image: np.ndarray, cells: np.ndarray, box: Box = WHOLE_IMAGE, strength: float = 0.6) -> np.ndarray:
    """Colour the part `box` of an image red, as much as the map `cells` [h,w] says.

    The map is resized to this part. Where it is 0, the image does not change. Where it is 1, the share `strength` of
    the colour is replaced by red.
    """
    heat = strength * resize_map_to_box(cells, image.shape[:2], box)[..., None]
    return (image * (1 - heat) + np.array(RED, np.float32) * heat).astype(np.uint8)


def resize_map_to_box(cells: np.ndarray, size: tuple[int, ...], box: Box = WHOLE_IMAGE) -> np.ndarray:
    """Resize a map [h,w] of values in [0,1] to the part `box` of an image with the size (H, W).

    Return values for all pixels of the image, float32 [H,W]. They are 0 outside the box. The interpolation is bicubic.
    Parts of the box that lie outside the image are cut off.
    """
    height, width = size
    left, top, right, bottom = (round(share * edge) for share, edge in zip(box, (width, height) * 2, strict=True))
    smooth = Image.fromarray(cells.astype(np.float32)).resize((right - left, bottom - top), Image.Resampling.BICUBIC)
    heat = np.zeros((height, width), np.float32)
    inside = np.asarray(smooth)[max(0, -top) : height - top, max(0, -left) : width - left]
    heat[max(0, top) : bottom, max(0, left) : right] = np.clip(inside, 0, 1)
    return heat


def resize_map(cells: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize a map [h,w] that has one value per pixel to another image size, with bilinear interpolation."""
    height, width = size
    image = Image.fromarray(cells.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def overlay_colours(image: np.ndarray, maps: Sequence[tuple[np.ndarray, Colour]]) -> np.ndarray:
    """Draw maps [H,W] with values in [0,1] over an image, each map in its own colour.

    Pixels at which a map is high are also darkened. Pixels at which all maps are 0 do not change. Colour values above
    255 are clipped.
    """
    highest = np.max([heat for heat, _ in maps], axis=0)[..., None]
    light = image * (1 - DIMMING * highest)
    for heat, colour in maps:
        light = light + heat[..., None] * np.array(colour, np.float32)
    return np.clip(np.rint(light), 0, 255).astype(np.uint8)
