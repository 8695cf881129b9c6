"""Torsos: networks that turn one observation into one feature vector, [B,...] -> [B,output_size].

The two convolutional torsos, `shallow` and `resnet`, need an observation `image`; they append all other observations to
the flattened feature map. The torso `mlp` accepts any observations. Each torso ends with `depth` fully connected layers
of `width` units.

A torso computes its features in two stages. `encode` returns the feature map of the convolutions (`shallow`, `resnet`)
or the flattened observations (`mlp`). `project` applies the fully connected layers. If `needs_calibration` is True,
training starts with a call of `calibrate`. This method receives observations collected by a random policy, and stores
their statistics in buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.defaults import TorsoDefaults
from bestiary.rollout import ObservationSpec, Tensors
from bestiary.utils.errors import UserError
from bestiary.utils.options import option

SUBTRACT_MEAN_HELP = "subtract from each image the mean image of a random policy, which is measured before training"


def mlp_layers(inputs: int, widths: Sequence[int]) -> nn.Sequential:
    """Return one linear layer per width, each followed by a ReLU."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers)


def scale_image(image: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return images [B,C,H,W] divided by 255, as float32 in channels-last memory format.

    `image` contains values from 0 to 255. It has the type uint8, or float if an interpretability tool has changed the
    images. If `mean` [1,C,H,W] is given, it is subtracted from each image before the division.
    """
    x = image.contiguous(memory_format=torch.channels_last).to(torch.float32, copy=True)
    return (x if mean is None else x.sub_(mean)).mul_(1 / 255)


class ImageEncoder(nn.Module, TorsoDefaults):
    """Convolutions over the observation `image`. If `subtract_mean` is True, a mean image is subtracted first.

    The mean image is zero until `calibrate` is called. The attribute `map_shape` is the shape (C, h, w) of the feature
    map: channels, rows and columns.
    """

    mean: Tensor | None

    def __init__(self, spec: ObservationSpec, convolutions: nn.Module, subtract_mean: bool):
        super().__init__()
        image_shape = spec["image"].shape
        mean = None
        if subtract_mean:
            mean = torch.zeros(1, *image_shape).contiguous(memory_format=torch.channels_last)
        self.register_buffer("mean", mean)  # mean image, values from 0 to 255
        self.convolutions = convolutions.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            self.map_shape = self.convolutions(torch.zeros(1, *image_shape)).shape[1:]

    def encode(self, observation: Tensors) -> Tensor:
        """Return the feature map of the image, [B,C,h,w]."""
        return self.convolutions(scale_image(observation["image"], self.mean))

    @property
    def needs_calibration(self) -> bool:
        return self.mean is not None

    def calibrate(self, observation: Tensors) -> None:
        """Store the mean of the given images. From now on, `encode` subtracts this mean image from every image."""
        assert self.mean is not None
        self.mean.copy_(observation["image"].mean(0, keepdim=True, dtype=torch.float32))


class ConvolutionalTorso(ImageEncoder):
    """Convolutions over `image`, then fully connected layers over the feature map and all other observations."""

    has_encoder = True

    def __init__(self, spec: ObservationSpec, convolutions: nn.Module, width: int, depth: int, subtract_mean: bool):
        super().__init__(spec, convolutions, subtract_mean)
        self.other_kinds = tuple(kind for kind in sorted(spec) if kind != "image")
        size = self.map_shape.numel() + sum(torch.Size(spec[kind].shape).numel() for kind in self.other_kinds)
        self.layers = mlp_layers(size, [width] * depth)
        self.output_size = width if depth else size

    def forward(self, observation: Tensors) -> Tensor:
        return self.project(self.encode(observation), observation)

    def project(self, feature_map: Tensor, observation: Tensors) -> Tensor:
        """Apply the fully connected layers to a feature map [B,C,h,w] and all other observations.

        Return the features [B,output_size].
        """
        x = feature_map.flatten(1)
        if self.other_kinds:
            x = torch.cat([x, *(observation[kind].flatten(1).float() for kind in self.other_kinds)], dim=1)
        return self.layers(x)


class Shallow(ConvolutionalTorso):
    """Three convolutions and fully connected layers, as in DQN (Mnih et al. 2015) and TorchBeast's small network."""

    @dataclass(frozen=True)
    class Options:
        width: int = option(512, "number of units of each fully connected layer", low=1)
        depth: int = option(1, "number of fully connected layers", low=0, high=100)
        subtract_mean: bool = option(True, SUBTRACT_MEAN_HELP)

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        require_image(spec, "torso shallow", min_size=36)
        convolutions = nn.Sequential(
            nn.Conv2d(spec["image"].shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=1),
            nn.ReLU(),
        )
        super().__init__(spec, convolutions, options.width, options.depth, options.subtract_mean)


class ResidualBlock(nn.Module):
    """Computes x + conv(relu(conv(relu(x))))."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class ResNet(ConvolutionalTorso):
    """The deep network of IMPALA (Espeholt et al. 2018): by default three sections with 15 convolutions in total.

    A section consists of a convolution, a max-pooling layer and two residual blocks of two convolutions each.
    """

    extra_inputs = ("reward",)  # TorchBeast's agent with this network does not use the last action

    @dataclass(frozen=True)
    class Options:
        width: int = option(256, "number of units of each fully connected layer", low=1)
        depth: int = option(1, "number of fully connected layers", low=0, high=100)
        subtract_mean: bool = option(True, SUBTRACT_MEAN_HELP)
        channels: tuple[int, ...] = option(
            (16, 32, 32),
            "number of channels of each section (a convolution, a max-pooling layer and two residual blocks)",
            low=1,
        )

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        require_image(spec, "torso resnet")
        sections: list[nn.Module] = []
        inputs = spec["image"].shape[0]
        for channels in options.channels:
            sections += [nn.Conv2d(inputs, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            sections += [ResidualBlock(channels), ResidualBlock(channels)]
            inputs = channels
        convolutions = nn.Sequential(*sections, nn.ReLU())
        super().__init__(spec, convolutions, options.width, options.depth, options.subtract_mean)


class MLP(nn.Module, TorsoDefaults):
    """Fully connected layers over all observations, flattened and concatenated in alphabetical order of their names."""

    has_encoder = True
    mean: Tensor | None
    deviation: Tensor | None

    @dataclass(frozen=True)
    class Options:
        width: int = option(128, "number of units of each layer", low=1)
        depth: int = option(2, "number of layers", low=0, high=100)
        sizes: tuple[int, ...] | None = option(
            None, "number of units of each layer, for example 512,256 (default: depth layers of width units)", low=1
        )
        normalise_inputs: bool = option(
            False,
            "normalise each input by its mean and standard deviation; before training, a random policy plays to "
            "measure them",
        )

    def __init__(self, spec: ObservationSpec, options: Options = Options()):
        super().__init__()
        inputs = sum(torch.Size(array.shape).numel() for array in spec.values())
        sizes = (options.width,) * options.depth if options.sizes is None else options.sizes
        self.layers = mlp_layers(inputs, sizes)
        self.output_size = sizes[-1] if sizes else inputs
        self.needs_calibration = options.normalise_inputs
        self.register_buffer("mean", torch.zeros(inputs) if self.needs_calibration else None)
        self.register_buffer("deviation", torch.ones(inputs) if self.needs_calibration else None)

    def forward(self, observation: Tensors) -> Tensor:
        return self.project(self.encode(observation), observation)

    def encode(self, observation: Tensors) -> Tensor:
        """Return all observations as vectors of D numbers, [B,D].

        If the option `normalise_inputs` is on, the numbers are normalised and clamped to [-10,10].
        """
        x = flatten_observation(observation)
        if self.mean is None or self.deviation is None:
            return x
        return ((x - self.mean) / self.deviation).clamp(-10, 10)

    def project(self, x: Tensor, observation: Tensors) -> Tensor:
        """Apply the fully connected layers to x [B,D], the result of `encode`. Return the features [B,output_size].

        `observation` is not used here, but the method `project` of other torsos needs it.
        """
        return self.layers(x)

    def calibrate(self, observation: Tensors) -> None:
        """Store the mean and the standard deviation of each input. For a constant input, store the deviation 1."""
        assert self.mean is not None
        assert self.deviation is not None
        x = flatten_observation(observation)
        deviation = x.std(0, correction=0)
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(torch.where(deviation > 1e-6, deviation, 1.0))


def flatten_observation(observation: Tensors) -> Tensor:
    """Return all observations, flattened and concatenated in alphabetical order of their names, [B,D].

    Images and other uint8 observations are divided by 255.
    """
    vectors = []
    for kind, x in sorted(observation.items()):
        is_bytes = kind == "image" or x.dtype == torch.uint8
        vectors.append((x.float() / 255 if is_bytes else x).flatten(1))
    return torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0]


def require_image(spec: ObservationSpec, component: str, min_size: int = 1, flag: str = "--torso") -> None:
    """Raise UserError if the environment has no image, or if the image is smaller than `min_size` x `min_size`.

    `component` is the name of the component that needs the image. The message suggests another value for the option
    `flag` (`--torso` or `--agent`).
    """
    is_torso = flag == "--torso"
    if "image" not in spec:
        found = ", ".join(spec)
        raise UserError(
            f"{component} needs an image, but the observations of this environment are: {found}; "
            f"try {flag} {'mlp' if is_torso else 'basic'}"
        )
    if min(spec["image"].shape[1:]) < min_size:
        size = "x".join(map(str, spec["image"].shape[1:]))
        raise UserError(
            f"{component} needs images of at least {min_size}x{min_size}, not {size}; "
            f"try {flag} {'resnet or mlp' if is_torso else 'basic'}"
        )


def default_torso(spec: ObservationSpec) -> str:
    """Return the torso of `--torso auto`: `shallow` if there is an image of at least 36x36 pixels, else `mlp`."""
    return "shallow" if "image" in spec and min(spec["image"].shape[1:]) >= 36 else "mlp"


TORSOS: dict[str, type[nn.Module]] = {"shallow": Shallow, "resnet": ResNet, "mlp": MLP}
