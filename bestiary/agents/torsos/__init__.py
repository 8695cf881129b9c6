"""Torsos: networks that turn one observation into one feature vector, [B,...] -> [B,output_size].

The convolutional torsos, `shallow`, `resnet` and `impoola`, need an observation `image`; they append all other
observations to the features of the convolutions. The torso `mlp` accepts any observations. Each torso ends with `depth`
fully connected layers of `width` units.

A torso computes its features in two stages. `encode` returns the feature map of the convolutions, or the flattened
observations (`mlp`). `project` applies the fully connected layers. If `needs_calibration` is True, training starts with
a call of `calibrate`. This method receives observations collected by a random policy, and stores their statistics in
buffers.
"""

import torch.nn as nn

from bestiary.agents.torsos.base import SUBTRACT_MEAN_HELP, ConvolutionalTorso, ImageEncoder, mlp_layers, require_image
from bestiary.agents.torsos.impoola import Impoola
from bestiary.agents.torsos.mlp import MLP, flatten_observation
from bestiary.agents.torsos.resnet import ResidualBlock, ResNet
from bestiary.agents.torsos.shallow import Shallow
from bestiary.rollout import ObservationSpec

TORSOS: dict[str, type[nn.Module]] = {"shallow": Shallow, "resnet": ResNet, "impoola": Impoola, "mlp": MLP}


def default_torso(spec: ObservationSpec) -> str:
    """Return the torso of `--torso auto`: `shallow` if there is an image of at least 36x36 pixels, else `mlp`."""
    return "shallow" if "image" in spec and min(spec["image"].shape[1:]) >= 36 else "mlp"


__all__ = [
    "MLP",
    "SUBTRACT_MEAN_HELP",
    "TORSOS",
    "ConvolutionalTorso",
    "ImageEncoder",
    "Impoola",
    "ResNet",
    "ResidualBlock",
    "Shallow",
    "default_torso",
    "flatten_observation",
    "mlp_layers",
    "require_image",
]
