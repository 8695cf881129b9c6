"""Example of a user-defined torso.

bestiary train toy/catch --torso examples/tiny_torso.py:Tiny --torso.width 32
"""

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.rollout import ObservationSpec, Tensors
from bestiary.utils.errors import UserError


class Tiny(nn.Module):
    """One convolution and one fully connected layer, for small images."""

    def __init__(self, spec: ObservationSpec, *, width: int = 64):
        super().__init__()
        if "image" not in spec:
            raise UserError(f"torso Tiny: needs image observations; this environment has {', '.join(spec)}")
        channels, image_height, image_width = spec["image"].shape
        self.convolution = nn.Conv2d(channels, 16, kernel_size=3, padding=1)
        self.layer = nn.Linear(16 * image_height * image_width, width)
        self.output_size = width

    def forward(self, observation: Tensors) -> Tensor:
        x = observation["image"].float() / 255  # uint8 [B,C,H,W]
        x = torch.relu(self.convolution(x)).flatten(1)  # [B,16*H*W]
        return torch.relu(self.layer(x))  # [B,width]
