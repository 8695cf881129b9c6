"""Torsos: from one observation to one feature vector. `torso(observation[B,...]) -> [B, output_size]`.

The two convolutional torsos need an `image`, and read all other observations beside it; `mlp` reads everything. After its
convolutions each has `depth` fully connected layers of `width` units.

A torso that is `curious` is shown some random play before the training (`acquaint`), and keeps what it took from it in buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.errors import UserError
from bestiary.options import option
from bestiary.rollout import ObservationSpec, Tensors


def fully_connected(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    """A layer of each width, a ReLU after each."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


def scaled(image: Tensor, mean: Tensor | None = None) -> Tensor:
    """uint8 [B,C,H,W] -> float in [0,1], less the mean picture [C,H,W], in the memory layout that convolutions like.

    Floats in [0,255] do as well: what a lens changed about a picture need not be whole numbers."""
    x = image.contiguous(memory_format=torch.channels_last).to(torch.float32, copy=True)
    return (x if mean is None else x.sub_(mean)).mul_(1 / 255)


class Convolutional(nn.Module):
    """A stack of convolutions over `image`, then fully connected layers over that and all other observations."""

    inputs: tuple[str, ...] = ("reward", "action")  # what the published net sees besides
    mean: Tensor | None

    def __init__(self, spec: ObservationSpec, convolutions: nn.Module, width: int, depth: int, center: bool):
        super().__init__()
        mean = torch.zeros(1, *spec["image"].shape).contiguous(memory_format=torch.channels_last) if center else None
        self.register_buffer("mean", mean)  # in [0,255]
        self.convolutions = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            self.map_shape = self.convolutions(torch.zeros(1, *spec["image"].shape)).shape[1:]  # C, h, w
        size = self.map_shape.numel()
        self.others = tuple(kind for kind in sorted(spec) if kind != "image")
        size += sum(torch.Size(spec[kind].shape).numel() for kind in self.others)
        self.layers = fully_connected(size, [width] * depth)
        self.output_size = width if depth else size

    def forward(self, observation: Tensors) -> Tensor:
        return self.digest(self.look(observation), observation)

    def look(self, observation: Tensors) -> Tensor:
        """The map that the convolutions make of the picture, [B,C,h,w]."""
        return self.convolutions(scaled(observation["image"], self.mean))

    @property
    def curious(self) -> bool:
        return self.mean is not None

    def acquaint(self, observation: Tensors) -> None:
        """Take the mean of some first pictures as what is always there: only what differs from it is seen from then on."""
        assert self.mean is not None
        self.mean.copy_(observation["image"].mean(0, keepdim=True, dtype=torch.float32))

    def digest(self, cells: Tensor, observation: Tensors) -> Tensor:
        """From that map, and all other observations, to features [B, output_size]."""
        x = cells.flatten(1)
        if self.others:
            x = torch.cat([x, *(observation[kind].flatten(1).float() for kind in self.others)], dim=1)
        return self.layers(x)


class Shallow(Convolutional):
    """Three convolutions, as in the DQN of Nature 2015 and TorchBeast's small net."""

    @dataclass(frozen=True)
    class Options:
        width: int = option(512, "units of each fully connected layer", low=1)
        depth: int = option(1, "fully connected layers", low=0, high=100)
        center: bool = option(True, "see pictures less their mean, taken in random play before the training")

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        need_image(spec, "torso shallow", at_least=36)
        convolutions = nn.Sequential(
            nn.Conv2d(spec["image"].shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
        )
        super().__init__(spec, convolutions, options.width, options.depth, options.center)


class Residual(nn.Module):
    """x + two convolutions of it, each after a ReLU."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class ResNet(Convolutional):
    """IMPALA's deep net: three sections of a convolution, a pooling and two residual blocks; 15 convolutions."""

    inputs = ("reward",)  # the published net does not see the last action

    @dataclass(frozen=True)
    class Options:
        width: int = option(256, "units of each fully connected layer", low=1)
        depth: int = option(1, "fully connected layers", low=0, high=100)
        center: bool = option(True, "see pictures less their mean, taken in random play before the training")
        channels: tuple[int, ...] = option((16, 32, 32), "channels of each section", low=1)

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        need_image(spec, "torso resnet")
        sections: list[nn.Module] = []
        inputs = spec["image"].shape[0]
        for channels in options.channels:
            sections += [nn.Conv2d(inputs, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            sections += [Residual(channels), Residual(channels)]
            inputs = channels
        super().__init__(spec, nn.Sequential(*sections, nn.ReLU()), options.width, options.depth, options.center)


class MLP(nn.Module):
    """Fully connected layers over all observations, flattened side by side in the order of their names."""

    inputs = ("reward", "action")
    mean: Tensor | None
    deviation: Tensor | None

    @dataclass(frozen=True)
    class Options:
        width: int = option(128, "units of each layer", low=1)
        depth: int = option(2, "layers", low=0, high=100)
        sizes: tuple[int, ...] | None = option(
            None, "units of each layer, one by one: 512,256 (none: width and depth)", low=1
        )
        normalize: bool = option(False, "scale inputs by their mean and deviation in random play before the training")

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        super().__init__()
        inputs = sum(torch.Size(array.shape).numel() for array in spec.values())
        sizes = (options.width,) * options.depth if options.sizes is None else options.sizes
        self.layers = fully_connected(inputs, sizes)
        self.output_size = sizes[-1] if sizes else inputs
        self.curious = options.normalize
        self.register_buffer("mean", torch.zeros(inputs) if self.curious else None)
        self.register_buffer("deviation", torch.ones(inputs) if self.curious else None)

    def forward(self, observation: Tensors) -> Tensor:
        return self.digest(self.look(observation), observation)

    def look(self, observation: Tensors) -> Tensor:
        """All inputs side by side, [B,D], normalised where asked for."""
        x = flatten_all(observation)
        if self.mean is None or self.deviation is None:
            return x
        return ((x - self.mean) / self.deviation).clamp(-10, 10)

    def digest(self, x: Tensor, observation: Tensors) -> Tensor:
        return self.layers(x)

    def acquaint(self, observation: Tensors) -> None:
        """Take mean and deviation of each input; one that never changed keeps its scale."""
        assert self.mean is not None
        assert self.deviation is not None
        x = flatten_all(observation)
        deviation = x.std(0, correction=0)
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(torch.where(deviation > 1e-6, deviation, 1.0))


def flatten_all(observation: Tensors) -> Tensor:
    """All observations side by side in the order of their names, [B,D]; pictures and other bytes scaled to [0,1]."""
    scale = {kind for kind, x in observation.items() if kind == "image" or x.dtype == torch.uint8}
    parts = [x.float() / 255 if kind in scale else x for kind, x in sorted(observation.items())]
    return torch.cat([part.flatten(1) for part in parts], dim=1) if len(parts) > 1 else parts[0].flatten(1)


def need_image(spec: ObservationSpec, part: str, at_least: int = 1, instead: str = "--torso") -> None:
    """Refuse an environment without pictures, or with smaller ones."""
    if "image" not in spec:
        other = "mlp" if instead == "--torso" else "basic"
        raise UserError(f"{part} needs an image, and this environment gives {', '.join(spec)}: try {instead} {other}")
    if min(spec["image"].shape[1:]) < at_least:
        size = "x".join(map(str, spec["image"].shape[1:]))
        other = "resnet or mlp" if instead == "--torso" else "basic"
        raise UserError(f"{part} needs images of at least {at_least}x{at_least}, not {size}: try {instead} {other}")


def suitable(spec: ObservationSpec) -> str:
    """The torso that `--torso auto` stands for."""
    return "shallow" if "image" in spec and min(spec["image"].shape[1:]) >= 36 else "mlp"


TORSOS: dict[str, type[nn.Module]] = {"shallow": Shallow, "resnet": ResNet, "mlp": MLP}
