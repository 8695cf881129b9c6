"""What a small change of a picture changes further up: convolutions of pictures that are the first one but for a window.

A convolution's output at a place depends on its inputs close by, so a patch of a picture reaches only a window of each map, a
little larger after every layer. `Nearby` runs the layers on the first picture as a whole, and on the others only in the windows
that their patches reach, surrounded by what the first picture has there. When windows are most of a map, whole maps go on:

    pictures [1+K,C,H,W]  --changed-->  windows [K,h,w,C] and their corners
    each layer            --around-->   windows grown by what the layer sees --layer, without padding--> larger windows
    in the end            --filled-->   maps [1+K,C',H',W'], the same as if all had gone through all layers

It is exact: nothing is cut off, and a map's edges are padded as the layers pad them.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.torsos import Convolutional, Residual
from bestiary.jit import compiled

MOST = 0.6  # of a map: larger windows are not worth cutting out


@dataclass
class Windows:
    """Where K maps differ from a first one."""

    values: Tensor  # [K,h,w,C]
    top: Tensor  # [K], of the map's rows
    left: Tensor  # [K]


class Nearby(nn.Sequential):
    """A stack of layers, for pictures of which all are like the first one but for a small window each."""

    def __init__(self, layers: nn.Sequential):
        super().__init__(*layers)

    def forward(self, pictures: Tensor) -> Tensor:
        if len(pictures) == 1:
            return super().forward(pictures)
        pictures = pictures.permute(0, 2, 3, 1).contiguous()
        whole, windows, rest = pictures[0], changed(pictures), list(self)  # whole: [H,W,C]
        while rest and is_local(rest[0]) and windows.values[0].numel() < MOST * whole.numel():
            whole, windows = through(rest.pop(0), whole, windows)
        maps = filled(whole, windows).permute(0, 3, 1, 2)
        for layer in rest:
            maps = layer(maps)
        return maps


def nearby(agent: Any) -> Any:
    """An agent that computes the same; where it has convolutions, those of pictures that are nearly the first one quickly."""
    torso = getattr(agent, "torso", None)
    if (
        not isinstance(torso, Convolutional)
        or type(torso.convolutions) is not nn.Sequential
        or hooked(torso.convolutions)
    ):
        return agent
    if next(torso.parameters()).device.type != "cpu":
        return agent
    agent = copy.deepcopy(agent)
    agent.torso.convolutions = Nearby(agent.torso.convolutions)
    return agent


def hooked(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def is_local(layer: nn.Module) -> bool:
    """Whether `through` knows the layer: just these kinds, since what is derived from one may compute something else."""
    kind = type(layer)
    if hooked(layer):
        return False
    if isinstance(layer, Residual):
        return kind is Residual and is_local(layer.first) and is_local(layer.second)
    if kind is nn.ReLU:
        return True
    if kind not in (nn.Conv2d, nn.MaxPool2d) or isinstance(layer.padding, str):
        return False
    if getattr(layer, "padding_mode", "zeros") != "zeros" or getattr(layer, "ceil_mode", False):
        return False
    sees_all = all(k >= s for k, s in zip(pair(layer.kernel_size), pair(layer.stride), strict=True))
    return sees_all and pair(layer.dilation) == (1, 1)


def through(layer: nn.Module, whole: Tensor, windows: Windows) -> tuple[Tensor, Windows]:
    """A layer, of the first map [H,W,C] and of the windows."""
    if isinstance(layer, nn.ReLU):
        return whole.relu(), Windows(windows.values.relu(), windows.top, windows.left)
    if isinstance(layer, Residual):
        inner, near = whole, windows
        for step in (nn.ReLU(), layer.first, nn.ReLU(), layer.second):
            inner, near = through(step, inner, near)
        before = around(whole, windows, near.top, near.left, *near.values.shape[1:3])
        return whole + inner, Windows(before + near.values, near.top, near.left)
    assert isinstance(layer, nn.Conv2d | nn.MaxPool2d)
    kernel, stride, padding = (pair(size) for size in (layer.kernel_size, layer.stride, layer.padding))
    after = over(layer, whole.unsqueeze(0), padding=padding)[0]
    edge = 0.0 if isinstance(layer, nn.Conv2d) else -torch.inf
    padded = F.pad(whole, (0, 0, padding[1], padding[1], padding[0], padding[0]), value=edge)
    inside = Windows(
        windows.values, windows.top + padding[0], windows.left + padding[1]
    )  # the same places, of `padded`
    corners, sizes = [], []
    for axis, first in enumerate((inside.top, inside.left)):
        k, s, count = kernel[axis], stride[axis], after.shape[axis]
        reached = min(count, (windows.values.shape[1 + axis] + k - 2) // s + 1)  # outputs that see a window, at most
        corners.append((-((k - 1 - first) // s)).clamp(0, count - reached))  # the first of them, rounded up
        left_over = (padded.shape[axis] - k) % s  # rows at the end that no output sees, but a window may
        sizes.append(s * (reached - 1) + k + left_over)
    seen = around(padded, inside, corners[0] * stride[0], corners[1] * stride[1], *sizes)
    return after, Windows(over(layer, seen, padding=(0, 0)), *corners)


def over(layer: nn.Conv2d | nn.MaxPool2d, maps: Tensor, padding: tuple[int, int]) -> Tensor:
    """The layer's outputs [K,h',w',C'] of [K,h,w,C], with another padding."""
    maps = maps.permute(0, 3, 1, 2)
    if isinstance(layer, nn.Conv2d):
        out = F.conv2d(maps, layer.weight, layer.bias, layer.stride, padding, groups=layer.groups)
    else:
        out = F.max_pool2d(maps, layer.kernel_size, layer.stride, padding)
    return out.permute(0, 2, 3, 1)


def changed(pictures: Tensor) -> Windows:
    """The windows, all of one size, in which pictures [1+K,H,W,C] differ from the first."""
    top, bottom, left, right = edges = torch.zeros(4, len(pictures) - 1, dtype=torch.int64)
    find(pictures.numpy(), edges.numpy())
    height, width = (max(1, int(size.max())) for size in (bottom - top, right - left))
    top, left = top.clamp(max=pictures.shape[1] - height), left.clamp(max=pictures.shape[2] - width)
    values = pictures.new_empty(len(top), height, width, pictures.shape[3])
    cut(pictures[1:].numpy(), top.numpy(), left.numpy(), values.numpy())
    return Windows(values, top, left)


def around(whole: Tensor, windows: Windows, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """Larger windows [K,height,width,C] at other corners: those given, and what `whole` has around them."""
    out = whole.new_empty(len(top), height, width, whole.shape[2])
    cut(whole.contiguous().unsqueeze(0).numpy(), top.numpy(), left.numpy(), out.numpy())
    paste(out.numpy(), windows.values.contiguous().numpy(), (windows.top - top).numpy(), (windows.left - left).numpy())
    return out


def filled(whole: Tensor, windows: Windows) -> Tensor:
    """All maps [1+K,H,W,C], the first one as it is."""
    out = whole.repeat(1 + len(windows.values), 1, 1, 1)
    paste(out[1:].numpy(), windows.values.contiguous().numpy(), windows.top.numpy(), windows.left.numpy())
    return out


@compiled
def find(pictures: np.ndarray, edges: np.ndarray) -> None:
    """First and one past the last of rows and columns in which pictures [1+K,H,W,C] differ from the first, into [4,K]."""
    _, height, width, channels = pictures.shape
    for k in range(edges.shape[1]):
        top, bottom, left, right = height, 0, width, 0
        for y in range(height):
            for x in range(width):
                for c in range(channels):
                    if pictures[1 + k, y, x, c] != pictures[0, y, x, c]:
                        top, bottom = min(top, y), y + 1
                        left, right = min(left, x), max(right, x + 1)
                        break
        edges[0, k], edges[1, k], edges[2, k], edges[3, k] = min(top, bottom), bottom, min(left, right), right


@compiled
def cut(maps: np.ndarray, top: np.ndarray, left: np.ndarray, windows: np.ndarray) -> None:
    """Windows [K,h,w,C] out of as many maps, or of one for all, that begin at these rows and columns."""
    count, height, width, _ = windows.shape
    for k in range(count):
        one = maps[k if len(maps) > 1 else 0]
        for y in range(height):
            windows[k, y] = one[top[k] + y, left[k] : left[k] + width]


@compiled
def paste(maps: np.ndarray, windows: np.ndarray, top: np.ndarray, left: np.ndarray) -> None:
    """Windows [K,h,w,C] into as many maps [K,H,W,C]."""
    count, height, width, _ = windows.shape
    for k in range(count):
        for y in range(height):
            maps[k, top[k] + y, left[k] : left[k] + width] = windows[k, y]


def pair(size: Any) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)
