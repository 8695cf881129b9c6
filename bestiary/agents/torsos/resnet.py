"""The deep residual network of IMPALA (Espeholt et al. 2018)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.torsos.base import SUBTRACT_MEAN_HELP, ConvolutionalTorso, require_image
from bestiary.rollout import ObservationSpec
from bestiary.utils.options import option


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
        convolutions = residual_sections(spec["image"].shape[0], options.channels)
        super().__init__(spec, convolutions, options.width, options.depth, options.subtract_mean)


def residual_sections(inputs: int, channels: Sequence[int]) -> nn.Sequential:
    """Return a sequence of sections, followed by a ReLU.

    `inputs` is the number of channels of the image. `channels` contains the number of output channels of each section.
    """
    sections: list[nn.Module] = []
    for outputs in channels:
        sections += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        sections += [ResidualBlock(outputs), ResidualBlock(outputs)]
        inputs = outputs
    return nn.Sequential(*sections, nn.ReLU())
