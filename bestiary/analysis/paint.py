"""Painting over pictures: maps as colour, panels side by side, captions. Pictures are uint8 [H,W,3]."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of a picture
Color = tuple[int, int, int]
EVERYWHERE: Box = (0, 0, 1, 1)
RED: Color = (255, 40, 0)
DIM = 0.6  # of a picture's own light goes where a map is highest, so that colour shows on white, too
CAPTION = 16  # pixels


def overlay(picture: np.ndarray, cells: np.ndarray, box: Box = EVERYWHERE, strength: float = 0.6) -> np.ndarray:
    """A picture with a map [h,w] of values in [0,1] laid over a part of it: dimmed, and red where the map is high."""
    heat = strength * spread(cells, picture.shape[:2], box)[..., None]
    return (picture * (1 - heat) + np.array(RED, np.float32) * heat).astype(np.uint8)


def spread(cells: np.ndarray, size: tuple[int, ...], box: Box = EVERYWHERE) -> np.ndarray:
    """A map [h,w] of values in [0,1] over a part of a picture of `size`, smooth between the cells: float32 [H,W].

    What of the map is outside the picture is not seen."""
    height, width = size
    left, top, right, bottom = (round(share * edge) for share, edge in zip(box, (width, height) * 2, strict=True))
    smooth = Image.fromarray(cells.astype(np.float32)).resize((right - left, bottom - top), Image.Resampling.BICUBIC)
    heat = np.zeros((height, width), np.float32)
    inside = np.asarray(smooth)[max(0, -top) : height - top, max(0, -left) : width - left]
    heat[max(0, top) : bottom, max(0, left) : right] = np.clip(inside, 0, 1)
    return heat


def stretch(cells: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """A map [h,w] of a picture's pixels, over the same picture at another size: linear between the middles of pixels."""
    height, width = size
    image = Image.fromarray(cells.astype(np.float32))
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def paint(picture: np.ndarray, heats: Sequence[tuple[np.ndarray, Color]]) -> np.ndarray:
    """A picture with maps [H,W] of values in [0,1] added to it, each in its colour; light that is too bright stays white.

    Where all maps are zero, the picture is as it was."""
    highest = np.max([heat for heat, _ in heats], axis=0)[..., None]
    light = picture * (1 - DIM * highest)
    for heat, color in heats:
        light = light + heat[..., None] * np.array(color, np.float32)
    return np.clip(np.rint(light), 0, 255).astype(np.uint8)


def enlarge(picture: np.ndarray) -> np.ndarray:
    """Small pictures by whole pixels, so that a person can see them."""
    height, width = picture.shape[:2]
    scale = max(1, round(210 / height)) if max(height, width) < 100 else 1
    return np.repeat(np.repeat(picture, scale, axis=0), scale, axis=1) if scale > 1 else picture


def panels(pictures: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
    """Pictures in a row, each with a line of text below it, of one height."""
    large = [enlarge(picture) for picture in pictures]
    height = max(picture.shape[0] for picture in large)
    columns = [_captioned(p, caption, height) for p, caption in zip(large, captions, strict=True)]
    gap = np.zeros((height + CAPTION, 4, 3), np.uint8)
    return np.concatenate([part for column in columns for part in (column, gap)][:-1], axis=1)


def _captioned(picture: np.ndarray, caption: str, height: int) -> np.ndarray:
    canvas = Image.new("RGB", (picture.shape[1], height + CAPTION))
    canvas.paste(Image.fromarray(picture))
    font, draw = ImageFont.load_default(11), ImageDraw.Draw(canvas)
    while caption and draw.textlength(caption, font=font) > picture.shape[1] - 4:
        caption = caption[1:]  # names differ at their ends
    draw.text((2, height + 1), caption, fill=(230, 230, 230), font=font)
    return np.asarray(canvas)
