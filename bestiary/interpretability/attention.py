"""Draw the attention of an agent on the images of a game, with one panel for each attention head.

The attention weights are also written to an .npz file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn as nn

from bestiary.agents.agent import Output
from bestiary.agents.component_defaults import TorsoDefaults
from bestiary.envs.vector_env import VectorEnv
from bestiary.evaluation.media import check_frames_output, save_step_data, write_images
from bestiary.evaluation.playback import Frame, PlaybackOptions, Viewer, note_screen_differs, open_playback
from bestiary.interpretability.overlays import WHOLE_IMAGE, Box, overlay_map
from bestiary.runs.run import Run
from bestiary.utils.console import note, progress_bar
from bestiary.utils.errors import UserError
from bestiary.utils.images import join_panels

SATURATION = 5  # attention is drawn in full colour if it is at least this many times as large as uniform attention


def render_attention(
    run: Run,
    options: PlaybackOptions = PlaybackOptions(),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Draw the game and the attention of each head in panels side by side. Write the weights to an .npz file.

    Return the path of the video or, if `out` is a .png file, the paths of the images. If `out` is None, the files are
    written into the run folder.
    """
    path = check_frames_output(out, overwrite, options.length, options.fps)
    playback = open_playback(run, options)
    (viewer,) = playback.viewers
    try:
        require_attention(viewer.agent, run.path)
    except UserError:
        viewer.pool.close()
        raise
    path = path or run.new_output_path("interpretability", f"attention-{viewer.file_stem}-{options.start}", ".gif")
    note_screen_differs([viewer])
    images, weights, taken = [], [], list[tuple[str, Output]]()
    for (frame,) in progress_bar(playback, "attention", options.length):
        weights.append(attention_weights(frame))
        images.append(_draw_heads(frame, weights[-1], viewer))
        taken.append((frame.action, frame.record.output))
    written = write_images(path, images, options.fps or playback.fps, first=options.start)
    stacked = np.stack(weights)  # [T,heads,R]: T steps, R cells of the feature map or R inputs
    heads = stacked.shape[1]
    map_shape = _map_shape(viewer.agent)
    if map_shape is not None:
        stacked = stacked.reshape(*stacked.shape[:2], *map_shape[1:])
    arrays_path = path.with_suffix(".npz")
    save_step_data(arrays_path, taken, options.start, playback.protocol(), weights=stacked)
    note(f"{len(images)} steps and {heads} head{'s' * (heads > 1)} are drawn; the weights are in {arrays_path}")
    return written


def require_attention(agent: Any, run: Any) -> None:
    """Raise UserError if the agent has no attention weights."""
    if not agent.has_attention:
        raise UserError(
            f"{run}: the agent has no attention; available with --agent iam --agent.dset attention, or --agent aaa"
        )


def attention_weights(frame: Frame) -> np.ndarray:
    """Return the attention weights [heads,R] at one step, over R cells of the feature map or R inputs."""
    return frame.record.output.extras["attention"][0, 0].numpy()


def attention_overlay(viewer: Viewer) -> Callable[[Frame], np.ndarray]:
    """Return a function for `record_video` that draws the mean attention of all heads on the image of a frame.

    Raise UserError if the agent has no attention.
    """
    require_attention(viewer.agent, viewer.run.path)
    note_screen_differs([viewer])

    def draw(frame: Frame) -> np.ndarray:
        return overlay_map(frame.canvas, *attention_map(attention_weights(frame), viewer.agent, viewer.pool))

    return draw


def _draw_heads(frame: Frame, weights: np.ndarray, viewer: Viewer) -> np.ndarray:
    """Return one image with several panels: first the game, then the game with the attention of each head."""
    maps = [attention_map(head[None], viewer.agent, viewer.pool) for head in weights]
    images = [overlay_map(frame.canvas, cells, box) for cells, box in maps]
    return join_panels([frame.display_image, *images], ["the game", *(f"head {k + 1}" for k in range(len(images)))])


def attention_map(weights: np.ndarray, agent: Any, pool: VectorEnv) -> tuple[np.ndarray, Box]:
    """Return the mean attention of all heads as a map [h,w], and the part of the screen that the map covers.

    `weights` [heads,R] are the attention weights over R cells of the torso's feature map, or over R inputs. The map has
    values in [0,1]: 0 means uniform attention or less, 1 means SATURATION times uniform attention or more. This scale
    is fixed, so that colours of different steps are comparable.
    """
    relative = weights.mean(axis=0) * weights.shape[1]  # [R] attention as a multiple of uniform attention
    map_shape = _map_shape(agent)
    if map_shape is not None:
        cells = relative.reshape(map_shape[1:])
        box = _feature_map_box(agent.torso, pool.observation_spec["image"].shape)
    else:
        positions = pool.input_cells  # [R,2] row and column of each input on the screen
        if positions is None:
            raise UserError(
                f"{pool.tasks[0]}: the environment does not define where its inputs are on the screen, so attention "
                "cannot be drawn"
            )
        cells, box = np.zeros(positions.max(axis=0) + 1), WHOLE_IMAGE
        np.maximum.at(cells, tuple(positions.T), relative)
    return np.clip((cells - 1) / (SATURATION - 1), 0, 1), box


def _map_shape(agent: Any) -> Any:
    """Return the shape (C, h, w) of the torso's feature map, or None if the torso has none."""
    return agent.torso.map_shape if isinstance(agent.torso, TorsoDefaults) else None


def _feature_map_box(torso: Any, image_shape: tuple[int, ...]) -> Box:
    """Return the part of the input image that is covered by all cells of the torso's feature map together.

    A cell covers a square around the centre of its receptive field. The side of the square is the distance between the
    centres of two neighbouring cells. If convolutions pad their input, the part is a little larger than the image.
    """
    centre, stride = 0.0, 1  # centre of the first cell, and distance between neighbouring cells, in pixels
    for layer in torso.convolutions.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            geometry: tuple[Any, ...] = (layer.kernel_size, layer.stride, layer.padding)
            kernel, step, padding = (v[0] if isinstance(v, tuple) else v for v in geometry)
            centre, stride = centre + ((kernel - 1) / 2 - padding) * stride, stride * step
    low = [(centre + 0.5 - stride / 2) / size for size in image_shape[1:]]
    high = [
        (centre + 0.5 + stride * (cells - 0.5)) / size
        for cells, size in zip(torso.map_shape[1:], image_shape[1:], strict=True)
    ]
    return low[1], low[0], high[1], high[0]
