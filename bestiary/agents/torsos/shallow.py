"""The convolutional network of DQN (Mnih et al. 2015)."""

from dataclasses import dataclass

import torch.nn as nn

from bestiary.agents.torsos.base import SUBTRACT_MEAN_HELP, ConvolutionalTorso, require_image
from bestiary.rollout import ObservationSpec
from bestiary.utils.options import option


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
