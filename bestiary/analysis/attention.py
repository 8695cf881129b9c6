"""Attention as pictures: from an agent's weights to maps, and where on the screen they are about."""

from typing import Any

import numpy as np
import torch.nn as nn

from bestiary.analysis.paint import EVERYWHERE, Box
from bestiary.envs.pool import Pool
from bestiary.envs.rewards import bare
from bestiary.errors import UserError

SATURATED = 5  # times its even share of the attention: a cell with that much is as red as it gets


def check_attends(agent: Any, run: Any) -> None:
    if not getattr(agent, "attends", False):
        raise UserError(
            f"{run}: its agent has no attention to draw; --agent iam --agent.dset attention and --agent aaa have"
        )


def attention_map(weights: np.ndarray, agent: Any, pool: Pool) -> tuple[np.ndarray, Box]:
    """Weights of all heads over cells or inputs, [heads,R], as one map [h,w], and the part of the screen that it covers.

    0 is an even share or less, 1 is SATURATED times that or more: the same in every picture, so that pictures compare."""
    shares = weights.mean(axis=0) * weights.shape[1]  # 1 where attention is even
    shape = getattr(agent.torso, "map_shape", None)
    if shape is not None:
        cells, box = shares.reshape(shape[1:]), _seen_by_cells(agent.torso, pool.observation_spec["image"].shape)
    else:
        places = getattr(bare(pool), "input_cells", None)  # [D,2]: row and column that an input is about
        if places is None:
            raise UserError(f"{pool.tasks[0]}: its inputs have no place in the picture, so attention cannot be drawn")
        cells, box = np.zeros(places.max(axis=0) + 1), EVERYWHERE
        np.maximum.at(cells, tuple(places.T), shares)
    return np.clip((cells - 1) / (SATURATED - 1), 0, 1), box


def _seen_by_cells(torso: Any, image: tuple[int, ...]) -> Box:
    """The part of a picture in which the cells of the torso's map have their middles, half a cell around them included.

    Where convolutions pad, that is a little more than the picture."""
    first, stride = 0.0, 1  # the middle of the first cell, and from one to the next, in pixels
    for layer in torso.convolutions.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, step, padding = (v[0] if isinstance(v, tuple) else v for v in _geometry(layer))
            first, stride = first + ((kernel - 1) / 2 - padding) * stride, stride * step
    low = [(first + 0.5 - stride / 2) / size for size in image[1:]]
    high = [
        (first + 0.5 + stride * (cells - 0.5)) / size
        for cells, size in zip(torso.map_shape[1:], image[1:], strict=True)
    ]
    return low[1], low[0], high[1], high[0]


def _geometry(layer: nn.Conv2d | nn.MaxPool2d) -> tuple[Any, Any, Any]:
    return layer.kernel_size, layer.stride, layer.padding
