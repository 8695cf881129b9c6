"""Incremental convolutions: compute the feature maps of K images that are almost equal to a reference image.

Each of the K images differs from the reference only in a small patch, as in perturbation saliency. The output of a
convolution at one position depends only on nearby inputs. In each feature map, the patch therefore changes only a small
window, which grows a little with every layer. `IncrementalConvolutions` applies the layers to the whole reference
image, but to the K other images only in these windows. As soon as the windows cover most of a map, it applies the
remaining layers to whole maps, which is then faster. The steps are:

    find_windows     find and cut out the windows [K,h,w,C] in which images [1+K,H,W,C] differ from the first image
    apply_layer      extend each window by the surrounding values of the reference that the layer needs, and apply the
                     layer to the extended window; the result is the window of the next feature map
    fill_maps        paste the windows into copies of the reference's map; the result is the maps [1+K,H',W',C'] of all
                     images

The result is exact: no changed value is ignored, and the padding at the edges of a map is that of the layers.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.agent import find_child
from bestiary.agents.torsos import ConvolutionalTorso, ResidualBlock
from bestiary.utils.numba_jit import cached_njit

MAX_WINDOW_FRACTION = 0.6  # if a window is larger than this fraction of a map, it is faster to compute whole maps


@dataclass
class Windows:
    """The windows in which K maps differ from a reference map. All windows have the same size."""

    values: Tensor  # [K,h,w,C] values of the maps in their windows
    top: Tensor  # [K] first row of each window
    left: Tensor  # [K] first column of each window


class IncrementalConvolutions(nn.Sequential):
    """A sequence of layers for batches in which each image differs from the first image only in a small window."""

    def __init__(self, layers: nn.Sequential):
        super().__init__(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return the feature maps [1+K,C',H',W'] of images [1+K,C,H,W]. The first image is the reference."""
        if len(images) == 1:
            return super().forward(images)
        images = images.permute(0, 2, 3, 1).contiguous()
        reference = images[0]  # [H,W,C]
        windows = find_windows(images)
        remaining = list(self)
        while (
            remaining
            and is_supported(remaining[0])
            and windows.values[0].numel() < MAX_WINDOW_FRACTION * reference.numel()
        ):
            reference, windows = apply_layer(remaining.pop(0), reference, windows)
        maps = fill_maps(reference, windows).permute(0, 3, 1, 2)
        for layer in remaining:
            maps = layer(maps)
        return maps


def with_incremental_convolutions(agent: Any) -> Any:
    """Return a copy of the agent whose torso has incremental convolutions.

    Some agents are not supported: the torso has no plain sequence of convolutions, the sequence has hooks, or the agent
    is not on the CPU. In these cases, return the agent itself.
    """
    torso = find_child(agent, "torso")
    if (
        not isinstance(torso, ConvolutionalTorso)
        or type(torso.convolutions) is not nn.Sequential
        or has_hooks(torso.convolutions)
    ):
        return agent
    if next(torso.parameters()).device.type != "cpu":
        return agent
    agent = copy.deepcopy(agent)
    agent.torso.convolutions = IncrementalConvolutions(agent.torso.convolutions)
    return agent


def has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def is_supported(layer: nn.Module) -> bool:
    """Return whether `apply_layer` supports the layer.

    Supported layers are ReLU, residual blocks, and convolutions and max-pooling layers with common options. Subclasses
    are not supported, because they may compute something else. Layers with hooks are not supported either.
    """
    kind = type(layer)
    if has_hooks(layer):
        return False
    if isinstance(layer, ResidualBlock):
        return kind is ResidualBlock and is_supported(layer.first) and is_supported(layer.second)
    if kind is nn.ReLU:
        return True
    if kind not in (nn.Conv2d, nn.MaxPool2d) or isinstance(layer.padding, str):
        return False
    if getattr(layer, "padding_mode", "zeros") != "zeros" or getattr(layer, "ceil_mode", False):
        return False
    covers_input = all(k >= s for k, s in zip(as_pair(layer.kernel_size), as_pair(layer.stride), strict=True))
    return covers_input and as_pair(layer.dilation) == (1, 1)


def apply_layer(layer: nn.Module, reference: Tensor, windows: Windows) -> tuple[Tensor, Windows]:
    """Apply a layer to a reference map [H,W,C] and to the windows. Return the next reference map and windows."""
    if isinstance(layer, nn.ReLU):
        return reference.relu(), Windows(windows.values.relu(), windows.top, windows.left)
    if isinstance(layer, ResidualBlock):
        inner_reference, inner = reference, windows
        for inner_layer in (nn.ReLU(), layer.first, nn.ReLU(), layer.second):
            inner_reference, inner = apply_layer(inner_layer, inner_reference, inner)
        skip = extend_windows(reference, windows, inner.top, inner.left, *inner.values.shape[1:3])
        return reference + inner_reference, Windows(skip + inner.values, inner.top, inner.left)
    assert isinstance(layer, nn.Conv2d | nn.MaxPool2d)
    kernel, stride, padding = (as_pair(size) for size in (layer.kernel_size, layer.stride, layer.padding))
    output = run_layer(layer, reference.unsqueeze(0), padding=padding)[0]
    edge = 0.0 if isinstance(layer, nn.Conv2d) else -torch.inf
    padded = F.pad(reference, (0, 0, padding[1], padding[1], padding[0], padding[0]), value=edge)
    # The same windows, with positions relative to the corner of `padded`.
    inside = Windows(windows.values, windows.top + padding[0], windows.left + padding[1])
    corners, sizes = [], []
    for axis, start in enumerate((inside.top, inside.left)):
        k, s, count = kernel[axis], stride[axis], output.shape[axis]
        # The largest number of outputs (rows or columns) that can depend on a window.
        affected = min(count, (windows.values.shape[1 + axis] + k - 2) // s + 1)
        # The index of the first output that depends on the window: (start - k + 1) / s, rounded up.
        corners.append((-((k - 1 - start) // s)).clamp(0, count - affected))
        # Number of rows or columns at the end that no output uses (the stride does not divide the size). The old window
        # may contain these rows or columns. The extended window must contain the whole old window, so it is enlarged by
        # their number.
        unused = (padded.shape[axis] - k) % s
        sizes.append(s * (affected - 1) + k + unused)
    receptive_field = extend_windows(padded, inside, corners[0] * stride[0], corners[1] * stride[1], *sizes)
    return output, Windows(run_layer(layer, receptive_field, padding=(0, 0)), *corners)


def run_layer(layer: nn.Conv2d | nn.MaxPool2d, maps: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return the output [K,h',w',C'] of a layer for maps [K,h,w,C]. `padding` replaces the layer's own padding."""
    maps = maps.permute(0, 3, 1, 2)
    if isinstance(layer, nn.Conv2d):
        out = F.conv2d(maps, layer.weight, layer.bias, layer.stride, padding, groups=layer.groups)
    else:
        out = F.max_pool2d(maps, layer.kernel_size, layer.stride, padding)
    return out.permute(0, 2, 3, 1)


def find_windows(images: Tensor) -> Windows:
    """Return the windows in which images [1+K,H,W,C] differ from the first image.

    All windows are as high as the highest difference and as wide as the widest difference.
    """
    top, bottom, left, right = bounds = torch.zeros(4, len(images) - 1, dtype=torch.int64)
    find_bounds(images.numpy(), bounds.numpy())
    height, width = (max(1, int(size.max())) for size in (bottom - top, right - left))
    top, left = top.clamp(max=images.shape[1] - height), left.clamp(max=images.shape[2] - width)
    values = images.new_empty(len(top), height, width, images.shape[3])
    cut_windows(images[1:].numpy(), top.numpy(), left.numpy(), values.numpy())
    return Windows(values, top, left)


def extend_windows(reference: Tensor, windows: Windows, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """Return larger windows [K,height,width,C] with their first rows and columns at `top` [K] and `left` [K].

    The values outside the old windows are copied from the map `reference` [H,W,C].
    """
    out = reference.new_empty(len(top), height, width, reference.shape[2])
    cut_windows(reference.contiguous().unsqueeze(0).numpy(), top.numpy(), left.numpy(), out.numpy())
    rows, columns = windows.top - top, windows.left - left
    paste_windows(out.numpy(), windows.values.contiguous().numpy(), rows.numpy(), columns.numpy())
    return out


def fill_maps(reference: Tensor, windows: Windows) -> Tensor:
    """Return maps [1+K,H,W,C]: first the reference, then K copies of the reference, each with one window pasted in."""
    out = reference.repeat(1 + len(windows.values), 1, 1, 1)
    paste_windows(out[1:].numpy(), windows.values.contiguous().numpy(), windows.top.numpy(), windows.left.numpy())
    return out


@cached_njit
def find_bounds(images: np.ndarray, bounds: np.ndarray) -> None:
    """Find the rows and columns in which images [1+K,H,W,C] differ from the first image.

    For each of the K other images, write the first row, last row + 1, first column and last column + 1 into `bounds`
    [4,K].
    """
    _, height, width, channels = images.shape
    for k in range(bounds.shape[1]):
        top, bottom, left, right = height, 0, width, 0
        for y in range(height):
            for x in range(width):
                for c in range(channels):
                    if images[1 + k, y, x, c] != images[0, y, x, c]:
                        top, bottom = min(top, y), y + 1
                        left, right = min(left, x), max(right, x + 1)
                        break
        bounds[0, k], bounds[1, k], bounds[2, k], bounds[3, k] = min(top, bottom), bottom, min(left, right), right


@cached_njit
def cut_windows(maps: np.ndarray, top: np.ndarray, left: np.ndarray, windows: np.ndarray) -> None:
    """Copy K windows of maps into `windows` [K,h,w,C]. Window k starts at row `top[k]` and column `left[k]`.

    `maps` has one map for each window, or only one map for all windows.
    """
    count, height, width, _ = windows.shape
    for k in range(count):
        source = maps[k if len(maps) > 1 else 0]
        for y in range(height):
            windows[k, y] = source[top[k] + y, left[k] : left[k] + width]


@cached_njit
def paste_windows(maps: np.ndarray, windows: np.ndarray, top: np.ndarray, left: np.ndarray) -> None:
    """Copy windows [K,h,w,C] into maps [K,H,W,C]. Window k starts at row `top[k]` and column `left[k]`."""
    count, height, width, _ = windows.shape
    for k in range(count):
        for y in range(height):
            maps[k, top[k] + y, left[k] : left[k] + width] = windows[k, y]


def as_pair(size: Any) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)
