"""Find the objects in an agent's observation, erase them and move them. Images are uint8 [C,H,W].

Objects are found in one of three ways:

    labels      the RAM of an Atari game says where they are (`ram_labels.OBJECTS`)
    changes     regions in which the image differs from the background, the median image of all games
    items       the items of a warehouse, each of which is one entry of the observed vector

In stacked frames, an object is erased or moved in each frame, at its place in this frame.
"""

from dataclasses import dataclass

import numpy as np

from bestiary.envs.ram_labels import SCREEN
from bestiary.interpretability.image_edits import Rectangle, replace_pixels
from bestiary.interpretability.sampled_steps import SampledStep, Samples

# Limits for the detection "changes".
MIN_DIFFERENCE = 20  # a pixel belongs to an object if it differs from the background by more than 20 of 255 grey levels
MIN_AREA = 2  # minimum size of an object, in pixels
MAX_SHARE = 0.25  # maximum size of an object, as a share of the image
MAX_REGIONS = 8  # maximum number of objects in an image; the largest regions are kept

MARGIN = 1  # number of pixels that are added on each side of an object, for all detections in images


@dataclass(frozen=True)
class ObservedObject:
    """An object in an observation."""

    name: str
    mask: np.ndarray  # bool [C,H,W]: the pixels of the object in each channel

    @property
    def region(self) -> np.ndarray:
        """The pixels [H,W] that belong to the object in any frame."""
        return np.asarray(self.mask.any(axis=0))


def median_background(samples: Samples) -> np.ndarray:
    """Return the median of the newest frames of all games, repeated for each stacked frame, uint8 [C,H,W]."""
    assert samples.frames is not None
    depth = samples.interface.frame_stacks.get("image", 1)
    median = np.median(samples.frames, axis=0).astype(np.uint8)
    return np.concatenate([median] * depth)


def find_objects(step: SampledStep, image: np.ndarray, background: np.ndarray, how: str) -> list[ObservedObject]:
    """Return the objects of an image [C,H,W]. `how` is "labels" or "changes"."""
    if how == "changes":
        return _changed_regions(image, background, len(step.boxes) or 1)
    channels = image.shape[0] // len(step.boxes)
    objects = []
    for name in dict.fromkeys(name for boxes in step.boxes for name in boxes):
        mask = np.zeros(image.shape, bool)
        for k, boxes in enumerate(step.boxes):
            if name in boxes:
                place = Rectangle(*boxes[name]).scaled(SCREEN, image.shape[1:])
                frame = mask[k * channels : (k + 1) * channels]
                frame[:, _widened(place.rows), _widened(place.columns)] = True
        objects.append(ObservedObject(name, mask))
    return objects


def _widened(positions: slice) -> slice:
    return slice(max(0, positions.start - MARGIN), positions.stop + MARGIN)


def _changed_regions(image: np.ndarray, background: np.ndarray, depth: int) -> list[ObservedObject]:
    """Return the connected regions in which any of the `depth` stacked frames differs from the background.

    The largest region comes first.
    """
    from scipy import ndimage  # here, because only this tool needs it

    channels = image.shape[0] // depth
    differs = np.abs(image.astype(np.int16) - background) > MIN_DIFFERENCE
    differs = np.repeat(differs.reshape(depth, channels, *image.shape[1:]).any(axis=1), channels, axis=0)  # [C,H,W]
    differs = ndimage.binary_dilation(differs, np.ones((1, 2 * MARGIN + 1, 2 * MARGIN + 1)))
    regions, count = ndimage.label(differs.any(axis=0), np.ones((3, 3)))
    areas = np.bincount(regions.ravel(), minlength=count + 1)
    areas[0] = 0
    kept = [k for k in np.argsort(-areas)[:MAX_REGIONS] if MIN_AREA <= areas[k] <= MAX_SHARE * regions.size]
    return [ObservedObject("region", differs & (regions == k)) for k in kept]


def erase_object(image: np.ndarray, mask: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Return the image [C,H,W] with the background in the place of an object."""
    return replace_pixels(image, mask, background)


def move_object(image: np.ndarray, mask: np.ndarray, background: np.ndarray, shift: tuple[int, int]) -> np.ndarray:
    """Return the image [C,H,W] with an object moved by `shift` = (rows, columns) in each frame.

    Parts that leave the image are cut off.
    """
    moved = replace_pixels(image, mask, background)
    channel, row, column = np.nonzero(mask)
    new_row, new_column = row + shift[0], column + shift[1]
    inside = (new_row >= 0) & (new_row < image.shape[1]) & (new_column >= 0) & (new_column < image.shape[2])
    moved[channel[inside], new_row[inside], new_column[inside]] = image[mask][inside]
    return moved
