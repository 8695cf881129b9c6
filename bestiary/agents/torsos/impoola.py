"""Impoola (Trumpp et al. 2025): the ResNet of IMPALA with global average pooling instead of a flattened feature map.

The fully connected layers get the mean of each channel over all cells of the feature map:

    features = [mean over y, x of map[c, y, x]  for each channel c]          instead of  map.flatten()

With the default sizes and images of 64x64 pixels, the first fully connected layer has 2,048 inputs in `resnet` and 32
inputs in `impoola`. In `impoola`, the number of weights of this layer does not depend on the size of the image, and all
cells contribute equally to a feature.
"""

from dataclasses import dataclass

from torch import Tensor

from bestiary.agents.torsos.base import SUBTRACT_MEAN_HELP, ConvolutionalTorso, require_image
from bestiary.agents.torsos.resnet import residual_sections
from bestiary.rollout import ObservationSpec
from bestiary.utils.options import option


class Impoola(ConvolutionalTorso):
    """The convolutions of `ResNet`, global average pooling, and fully connected layers."""

    extra_inputs = ("reward",)  # as in `ResNet`, so that the two torsos differ only in the pooling

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
        require_image(spec, "torso impoola")
        convolutions = residual_sections(spec["image"].shape[0], options.channels)
        super().__init__(spec, convolutions, options.width, options.depth, options.subtract_mean)

    def map_features(self, feature_map: Tensor) -> Tensor:
        """Return the mean of each channel over the cells of a feature map, [B,C,h,w] -> [B,C]."""
        return feature_map.mean((2, 3))
