"""Activation maximisation (`bestiary look filters RUN --draw LAYER`): draw what each filter of a layer responds to.

For each filter, the method of Erhan et al. (2009) finds an input image that makes the filter's output large. The method
starts from a grey image with weak noise and changes the pixels by gradient ascent. The objective is the filter's output
before the nonlinearity, averaged over all positions. Pixels stay in the range 0 to 255.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import imageio.v3 as imageio
import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.algorithms.optimizers import Adam
from bestiary.evaluation.media import IMAGE_SUFFIXES, check_output
from bestiary.interpretability.filter_comparison import short_layer_name
from bestiary.rollout import Inputs, ObservationSpec
from bestiary.runs.run import Run
from bestiary.utils.console import note, progress_bar
from bestiary.utils.errors import UserError
from bestiary.utils.images import enlarge
from bestiary.utils.options import suggest

ASCENT_STEPS = 100
LEARNING_RATE = 4.0  # learning rate of Adam; it is large because pixels have values from 0 to 255
BATCH_SIZE = 16  # number of filters whose images are optimised at once
TILE_GAP = 4  # pixels between two tiles


def maximise_activations(
    run: Run, layer: str, *, out: str | Path | None = None, seed: int = 0, overwrite: bool = False
) -> Path:
    """Write one PNG file that shows an image for each filter of a layer, and return the path of the file.

    The weights are those of the newest checkpoint. If observations are stacks of frames, the frames of an image are
    drawn side by side, from the oldest to the newest.
    """
    path = check_output(out, overwrite, IMAGE_SUFFIXES, "images") if out is not None else None
    interface = run.config.interface
    agent = cast(nn.Module, run.agent())
    name = find_layer(agent, layer)
    count = cast(nn.Conv2d, agent.get_submodule(name)).out_channels
    batches = [range(first, min(first + BATCH_SIZE, count)) for first in range(0, count, BATCH_SIZE)]
    images: list[np.ndarray] = []
    for filters in progress_bar(batches, "activation maximisation", len(batches)):
        images += list(maximise_filters(agent, interface.observation_spec, name, filters, seed))
    stem = f"activations-{short_layer_name(name)}-{run.steps:012d}"
    path = path or run.new_output_path("interpretability", stem, ".png")
    imageio.imwrite(path, tile_images(images, interface.frame_stacks.get("image")))
    note(f"the figure shows {count} filters of the layer {name}")
    return path


def find_layer(agent: nn.Module, layer: str) -> str:
    """Return the full name of the convolution `layer`, which is a full name or a short name (see `short_layer_name`).

    Raise UserError if the agent has no convolution with this name.
    """
    names = [name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)]
    if not names:
        raise UserError(f"--draw {layer}: the agent has no convolutions; try bestiary look actions")
    for name in names:
        if layer in (name, short_layer_name(name)):
            return name
    short_names = [short_layer_name(name) for name in names]
    raise UserError(f"--draw {layer}: unknown layer; available: {', '.join(short_names)}{suggest(layer, short_names)}")


def maximise_filters(
    agent: Any, spec: ObservationSpec, layer: str, filters: Sequence[int], seed: int = 0
) -> np.ndarray:
    """Return images uint8 [n,C,H,W]: for each of n filters of a layer, an image that maximises the filter's output."""
    noise = torch.randn(spec["image"].shape, generator=torch.Generator().manual_seed(seed))
    start = 127.5 + 10 * noise  # all filters have the same start image
    images = start.repeat(len(filters), 1, 1, 1).requires_grad_()
    optimizer = Adam([images], lr=LEARNING_RATE, maximize=True)
    for _ in range(ASCENT_STEPS):
        activations = layer_activations(agent, spec, layer, images)  # [n,F,h,w] for the F filters of the layer
        targets = torch.stack([activations[k, f].mean() for k, f in enumerate(filters)])
        (images.grad,) = torch.autograd.grad(targets.sum(), images, allow_unused=True)
        if images.grad is None:
            raise UserError(
                f"--draw {layer}: this layer depends on the recurrent state and not on the image; choose another layer"
            )
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 255)
    return images.detach().round().to(torch.uint8).numpy()


def layer_activations(agent: Any, spec: ObservationSpec, layer: str, images: Tensor) -> Tensor:
    """Return the output [n,F,h,w] of a layer with F filters for n images [n,C,H,W].

    Each image is observed in the first step of an episode. All other inputs of the agent are 0.
    """
    n = len(images)
    outputs: list[Tensor] = []
    observation = {kind: torch.zeros(1, n, *array.shape) for kind, array in spec.items()}
    observation["image"] = images.unsqueeze(0)
    zeros, done = torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool)
    hook = agent.get_submodule(layer).register_forward_hook(lambda _, __, output: outputs.append(output))
    agent(Inputs(observation, zeros, done, zeros.long(), zeros.long()), agent.initial_state(n))
    hook.remove()
    return outputs[0]


def tile_images(images: list[np.ndarray], frames: int | None = None) -> np.ndarray:
    """Arrange images [C,H,W] in rows on one large image, uint8 [h,w,3], which is about twice as wide as high.

    Each image is a stack of `frames` frames, which are drawn side by side. See `_split_frames` if `frames` is None.
    """
    tiles = [enlarge(np.concatenate(_split_frames(image, frames), axis=1)) for image in images]
    height, width = (size + TILE_GAP for size in tiles[0].shape[:2])
    columns = min(len(tiles), max(1, round(math.sqrt(2 * len(tiles) * height / width))))
    rows = -(-len(tiles) // columns)
    canvas = np.zeros((rows * height - TILE_GAP, columns * width - TILE_GAP, 3), np.uint8)
    for k, tile in enumerate(tiles):
        y, x = k // columns * height, k % columns * width
        canvas[y : y + height - TILE_GAP, x : x + width - TILE_GAP] = tile
    return canvas


def _split_frames(image: np.ndarray, frames: int | None) -> list[np.ndarray]:
    """Return the frames of a stack [C,H,W] as a list of RGB images [H,W,3].

    If `frames` is None and C is a multiple of three, each frame is assumed to have three channels (RGB).
    """
    channels = len(image)
    is_colour = channels // frames == 3 if frames else channels % 3 == 0
    split = image.reshape(-1, 3 if is_colour else 1, *image.shape[1:])
    return [np.repeat(frame, 1 if is_colour else 3, axis=0).transpose(1, 2, 0) for frame in split]
