"""A torso of your own: `bestiary train toy/catch --torso examples/tiny_torso.py:Tiny --torso.width 32`."""

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.errors import UserError
from bestiary.rollout import ObservationSpec, Tensors


class Tiny(nn.Module):
    """One convolution and one fully connected layer, for small pictures."""

    def __init__(self, spec: ObservationSpec, *, width: int = 64):
        super().__init__()
        if "image" not in spec:
            raise UserError(f"Tiny reads an image, and this environment gives {', '.join(spec)}")
        channels, height, breadth = spec["image"].shape
        self.convolution = nn.Conv2d(channels, 16, kernel_size=3, padding=1)
        self.layer = nn.Linear(16 * height * breadth, width)
        self.output_size = width

    def forward(self, observation: Tensors) -> Tensor:
        x = observation["image"].float() / 255  # uint8 [B,C,H,W]
        x = torch.relu(self.convolution(x)).flatten(1)  # [B,16*H*W]
        return torch.relu(self.layer(x))  # [B,width]
