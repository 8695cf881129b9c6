"""Operations on RGB images (uint8 [H,W,3]): enlarge an image, and join several images with captions in one row."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CAPTION_HEIGHT = 16  # height of a caption, in pixels
PANEL_GAP = 4  # distance between two images, in pixels


def enlarge(image: np.ndarray) -> np.ndarray:
    """Enlarge an image with fewer than 100 rows and 100 columns by an integer factor to about 210 rows.

    Return any other image unchanged.
    """
    height, width = image.shape[:2]
    scale = max(1, round(210 / height)) if max(height, width) < 100 else 1
    return np.repeat(np.repeat(image, scale, axis=0), scale, axis=1) if scale > 1 else image


def join_panels(images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
    """Return one image that shows all images side by side, each with its caption below.

    Small images are enlarged. All images are padded at the bottom to the height of the tallest image.
    """
    large = [enlarge(image) for image in images]
    height = max(image.shape[0] for image in large)
    columns = [_with_caption(image, caption, height) for image, caption in zip(large, captions, strict=True)]
    gap = np.zeros((height + CAPTION_HEIGHT, PANEL_GAP, 3), np.uint8)
    return np.concatenate([block for column in columns for block in (column, gap)][:-1], axis=1)


def _with_caption(image: np.ndarray, caption: str, height: int) -> np.ndarray:
    """Pad an image at the bottom to `height` rows, and add a caption below."""
    caption = caption.replace("\n", " ").replace("\r", " ")
    canvas = Image.new("RGB", (image.shape[1], height + CAPTION_HEIGHT))
    canvas.paste(Image.fromarray(image))
    font = ImageFont.load_default(11)
    draw = ImageDraw.Draw(canvas)
    # Run names often differ only at their ends, so a long caption is cut at its start.
    while caption and draw.textlength(caption, font=font) > image.shape[1] - 4:
        caption = caption[1:]
    draw.text((2, height + 1), caption, fill=(230, 230, 230), font=font)
    return np.asarray(canvas)
