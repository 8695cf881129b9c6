"""Fully connected layers over all observations."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import TorsoDefaults
from bestiary.agents.torsos.base import mlp_layers
from bestiary.rollout import ObservationSpec, Tensors
from bestiary.utils.options import option


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
            "normalise each input by its mean and standard deviation, which are measured with a random policy before "
            "training",
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
