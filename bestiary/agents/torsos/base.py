"""Common code of torsos: image encoders, fully connected layers, and checks of the observations."""

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import TorsoDefaults
from bestiary.rollout import ObservationSpec, Tensors
from bestiary.utils.errors import UserError

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
    map that the convolutions return: channels, rows and columns.
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
    """Convolutions over `image`, then fully connected layers over its features and all other observations."""

    has_encoder = True

    def __init__(self, spec: ObservationSpec, convolutions: nn.Module, width: int, depth: int, subtract_mean: bool):
        super().__init__(spec, convolutions, subtract_mean)
        self.other_kinds = tuple(kind for kind in sorted(spec) if kind != "image")
        with torch.no_grad():
            num_map_features = self.map_features(torch.zeros(1, *self.map_shape)).shape[1]
        size = num_map_features + sum(torch.Size(spec[kind].shape).numel() for kind in self.other_kinds)
        self.layers = mlp_layers(size, [width] * depth)
        self.output_size = width if depth else size

    def forward(self, observation: Tensors) -> Tensor:
        return self.project(self.encode(observation), observation)

    def map_features(self, feature_map: Tensor) -> Tensor:
        """Return the inputs [B,D] of the fully connected layers, given a feature map [B,C,h,w]."""
        return feature_map.flatten(1)

    def project(self, feature_map: Tensor, observation: Tensors) -> Tensor:
        """Apply the fully connected layers to a feature map [B,C,h,w] and all other observations.

        Return the features [B,output_size].
        """
        x = self.map_features(feature_map)
        if self.other_kinds:
            x = torch.cat([x, *(observation[kind].flatten(1).float() for kind in self.other_kinds)], dim=1)
        return self.layers(x)


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
