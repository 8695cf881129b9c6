"""Perturbation saliency of an agent's image observations (Greydanus et al. 2018).

Saliency shows which parts of an image influence the agent's output. A small patch of the image is blurred, which
removes the information in this patch and adds none. The agent is run again on this image with the same recurrent state.
The score of the patch measures how much the output changes. Patches are centred on all points of a regular grid:

    M    mask of the patch: a cross of five pixels, blurred with standard deviation `radius`, scaled to a maximum of 1
    I'   = (1 - M) I + M blur(I)     perturbed image; in mode "searchlight", all of I except the patch is blurred
    S    = 1/2 |L(I') - L(I)|^2      score; L is the vector of policy logits, or the value in units of the reward

`PRESETS` has the size and the distance of the patches in two published implementations.

Two properties make this fast. First, a blurred cross is a sum of outer products of one-dimensional blurred points, so
the masks are computed without filtering images. Second, a mask is zero beyond four standard deviations, so only a small
window of each image and of the first feature maps has to be computed (`incremental_conv.py`).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.interpretability.incremental_conv import with_incremental_convolutions
from bestiary.rollout import Inputs, ObservationSpec
from bestiary.utils.errors import UserError

MIN_RADIUS = 0.5  # minimum radius of the patches if the user does not set a radius, in pixels
MIN_BLUR = 1.0  # minimum standard deviation of the filter that makes the blurred image, in pixels
MAX_BATCH_BYTES = 2**22  # maximum size of the images and states of one batch, so that they fit into the CPU cache
ROUNDING_ERROR = 1e-5  # smaller relative changes of outputs are regarded as floating-point errors


@dataclass(frozen=True)
class PatchPreset:
    """The sizes of the patches in a published implementation, for images of `image_size` x `image_size` pixels.

    All lengths are scaled for images of another size, because an unscaled patch could cover half of a small image.
    """

    image_size: int
    density: float  # distance between the centres of neighbouring patches
    radius: float  # standard deviation of the blur that makes the mask
    blur: float = 3.0  # standard deviation of the filter that makes the blurred image


PRESETS = {
    # The code of Greydanus et al. 2018.
    "greydanus": PatchPreset(image_size=80, density=5.0, radius=5.0),
    # Settings of the multi-task fork of TorchBeast, which has smaller patches on a finer grid.
    "torchbeast-popart": PatchPreset(image_size=84, density=2.0, radius=2.0),
}


@dataclass(frozen=True)
class SaliencyOptions:
    """Options that say how an image is perturbed and how the change of the policy is measured."""

    density: int | None = None  # distance of patch centres in pixels; None: `default_density`, scaled to the image size
    # Standard deviation, in pixels, of the Gaussian mask that selects the patch; None: the value of the preset, scaled
    # to the size of the image. This is not the strength of the blur.
    radius: float | None = None
    mode: str = "occlude"  # occlude: blur the patch; searchlight: blur all except the patch
    distance: str = "logits"  # logits: half the squared distance of the logits; kl: KL divergence of the policies
    preset: str = "torchbeast-popart"  # a key of PRESETS
    # Distance of patch centres that is used if `density` is None. It is scaled to the image size. None: the value of
    # the preset.
    default_density: float | None = None


@dataclass
class SaliencyMaps:
    """Scores of all patches, float32 [h,w]. Entry (i, j): patch centred at row i * density and column j * density."""

    policy: np.ndarray
    value: np.ndarray


class Saliency:
    """Computes the saliency maps of an agent: `maps = saliency(inputs, state)` for one step of one environment."""

    def __init__(self, agent: Agent, spec: ObservationSpec, options: SaliencyOptions = SaliencyOptions()):
        if "image" not in spec:
            raise UserError(
                f"the agent observes {', '.join(spec)} and no images, so it has no saliency map; "
                "try bestiary video or bestiary look actions"
            )
        self.agent = with_incremental_convolutions(agent)
        self.options = options
        _, self.height, self.width = spec["image"].shape
        preset = PRESETS[options.preset]
        scale = min(self.height, self.width) / preset.image_size
        self.density = options.density or max(1, round(scale * (options.default_density or preset.density)))
        if self.density > min(self.height, self.width):
            raise UserError(f"--density {self.density}: larger than the agent's images of {self.height}x{self.width}")
        self.blur = max(MIN_BLUR, scale * preset.blur)
        self.radius = max(MIN_RADIUS, scale * preset.radius) if options.radius is None else options.radius
        self.row_profiles = BlurProfiles(self.height, self.radius)
        self.column_profiles = BlurProfiles(self.width, self.radius)
        self.blur_matrices = (blur_matrix(self.height, self.blur), blur_matrix(self.width, self.blur))
        self.centres = patch_centres(self.height, self.width, self.density)  # [n,2], see `patch_centres`
        self.shape = (-(-self.height // self.density), -(-self.width // self.density))
        self.needs_uint8: bool | None = None  # whether the agent needs uint8 images; None: not tested yet
        self.threads = ThreadPoolExecutor(os.cpu_count())

    @torch.no_grad()
    def __call__(self, inputs: Inputs, state: State) -> SaliencyMaps:
        """Return the saliency maps of one step, given the inputs [1,1,...] and the recurrent state before this step."""
        frame = inputs.observation["image"][0, 0].permute(1, 2, 0).float()  # [H,W,C]
        if self.needs_uint8 is None:
            self.needs_uint8 = not self._accepts_floats(inputs, state, frame)
        blurred = torch.einsum("yi,ijc,xj->yxc", self.blur_matrices[0], frame, self.blur_matrices[1])
        bytes_per_patch = 4 * frame.numel() + sum(s[0].numel() * s.element_size() for s in state)
        batches = self.centres.split(max(1, MAX_BATCH_BYTES // bytes_per_patch))
        scores = self.threads.map(lambda centres: self._scores(frame, blurred, centres, inputs, state), batches)
        policy, value = torch.cat(list(scores), dim=1).numpy()
        return SaliencyMaps(policy.reshape(self.shape), value.reshape(self.shape))

    def masks(self, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the masks (blurred crosses with a maximum of 1) of patches at `centres` [K,2].

        A mask is computed only in the window in which it is not zero. Return the masks [K,h,w] in their windows, and
        the rows [K,h,1] and columns [K,1,w] of the image that the windows cover.
        """
        rows, columns = centres.unbind(1)
        point_y, neighbours_y, y = self.row_profiles.windows(rows)
        point_x, neighbours_x, x = self.column_profiles.windows(columns)
        vertical = (point_y + neighbours_y).unsqueeze(2) * point_x.unsqueeze(1)
        horizontal = point_y.unsqueeze(2) * neighbours_x.unsqueeze(1)
        masks = vertical + horizontal
        return masks / masks.amax(dim=(1, 2), keepdim=True), y.unsqueeze(2), x.unsqueeze(1)

    @torch.no_grad()
    def _scores(self, frame: Tensor, blurred: Tensor, centres: Tensor, inputs: Inputs, state: State) -> Tensor:
        """Return the policy and value scores [2,K] of the patches at `centres` [K,2]."""
        masks, y, x = self.masks(centres)
        outside, inside = (blurred, frame) if self.options.mode == "searchlight" else (frame, blurred)
        images = outside.repeat(1 + len(centres), 1, 1, 1)  # [1+K,H,W,C]
        index = torch.arange(1, 1 + len(centres)).view(-1, 1, 1)
        images[index, y, x] = torch.lerp(outside[y, x], inside[y, x], masks.unsqueeze(-1))
        images[0] = frame
        output = self._run_agent(images, inputs, state)  # [1,1+K]; entry 0 is the unperturbed frame
        logits, value = output.distribution.logits[0], output.value[0]
        policy_scores = _drop_rounding_errors(0.5 * (logits[1:] - logits[:1]).square().sum(-1), logits[0].norm())
        value_scores = _drop_rounding_errors(0.5 * (value[1:] - value[:1]).square(), value[0].abs())
        if self.options.distance == "kl":
            log_probs = output.distribution.log_probs[0]
            divergence = (log_probs[:1].exp() * (log_probs[:1] - log_probs[1:])).sum(-1).clamp(min=0)
            policy_scores = torch.where(policy_scores > 0, divergence, 0.0)
        return torch.stack([policy_scores, value_scores])

    def _run_agent(self, images: Tensor, inputs: Inputs, state: State) -> Output:
        """Return the agent's output for K images [K,H,W,C]. All other inputs and the recurrent state are the same."""
        count = len(images)
        if self.needs_uint8:
            images = images.round().to(torch.uint8)

        def repeat(x: Tensor) -> Tensor:  # [1,1,...] -> [1,K,...]
            return x.expand(1, count, *x.shape[2:])

        observation = {kind: repeat(x) for kind, x in inputs.observation.items() if kind != "image"}
        observation["image"] = images.permute(0, 3, 1, 2).unsqueeze(0)
        rest = (repeat(x) for x in (inputs.reward, inputs.done, inputs.last_action, inputs.task))
        states = tuple(s.expand(count, *s.shape[1:]).contiguous() for s in state)
        output, _ = self.agent(Inputs(observation, *rest), states)
        return output

    def _accepts_floats(self, inputs: Inputs, state: State, frame: Tensor) -> bool:
        """Return whether the agent's output is the same for a float image as for a uint8 image.

        Users' agents may require uint8 images.
        """
        try:
            self.needs_uint8 = False
            outputs = [self.agent(inputs, state)[0], self._run_agent(frame.unsqueeze(0).clone(), inputs, state)]
            pairs = ([o.distribution.logits for o in outputs], [o.value for o in outputs])
            return all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)
        except (RuntimeError, TypeError, ValueError):
            return False


def _drop_rounding_errors(scores: Tensor, magnitude: Tensor) -> Tensor:
    """Set scores to 0 if they are so small that they may be caused by floating-point errors alone.

    `magnitude` is the magnitude of the agent's unperturbed output.
    """
    return torch.where(scores > 0.5 * (ROUNDING_ERROR * (1 + magnitude)) ** 2, scores, 0.0)


def patch_centres(height: int, width: int, density: int) -> Tensor:
    """Return the row and column of the centre of each of n patches, int64 [n,2]. Patches are ordered row by row."""
    return torch.cartesian_prod(torch.arange(0, height, density), torch.arange(0, width, density))


def blur_matrix(size: int, sigma: float) -> Tensor:
    """Return a matrix M [size,size] that blurs a signal x [size]: M @ x. At the edges, the signal is mirrored."""
    from scipy.ndimage import gaussian_filter1d  # here, because only saliency needs SciPy

    return torch.from_numpy(gaussian_filter1d(np.eye(size), sigma, axis=0)).float()


class BlurProfiles:
    """One-dimensional blurred points, one for each position along one axis of the image.

    `point[i]` is a blurred point at position i. `neighbours[i]` is the sum of the blurred points at i - 1 and i + 1.
    `Saliency.masks` multiplies the profiles of a row with those of a column to make a blurred cross.
    """

    def __init__(self, size: int, radius: float):
        self.point = blur_matrix(size, radius).T.contiguous()  # [size,size]
        self.neighbours = torch.zeros_like(self.point)
        self.neighbours[1:] += self.point[:-1]
        self.neighbours[:-1] += self.point[1:]
        # SciPy cuts the filter off at four standard deviations. `neighbours` sums blurred points that are one pixel
        # beside the centre, so the window is one pixel larger on each side.
        self.reach = int(4 * radius + 0.5) + 1
        self.window = torch.arange(min(2 * self.reach + 1, size))
        self.last_start = size - len(self.window)

    def windows(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `point` and `neighbours` at positions [K], and the pixels to which their values belong.

        All three are [K,w]. They cover only a window of w pixels around each position, because all values outside the
        window are zero.
        """
        pixels = (positions - self.reach).clamp(0, self.last_start).unsqueeze(1) + self.window
        return self.point[positions].gather(1, pixels), self.neighbours[positions].gather(1, pixels), pixels


def interpolate_grid(cells: np.ndarray, density: int, size: tuple[int, int]) -> np.ndarray:
    """Interpolate the scores [h,w] of all patches linearly to scores [H,W] of all pixels.

    At the centre of a patch, the score of the patch is unchanged.
    """
    vertical, horizontal = (
        _interpolation_weights(count, density, pixels) for count, pixels in zip(cells.shape, size, strict=True)
    )
    return vertical @ cells @ horizontal.T


def _interpolation_weights(count: int, density: int, pixels: int) -> np.ndarray:
    """Return weights [pixels,count] that interpolate the scores of `count` patches linearly along one axis.

    Pixels after the centre of the last patch get the score of that patch.
    """
    position = np.minimum(np.arange(pixels) / density, count - 1)
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(count)))


# --- conversion of scores to colour intensities ---


def quantile_scale(scores: np.ndarray) -> np.ndarray:
    """Return intensities in [0,1] that depend only on the ranks of the scores.

    The highest 10 % of the scores are mapped to the range 0 to 1, and all other scores to 0.
    """
    levels = np.quantile(scores, np.linspace(0.9, 1, 11))
    if scores.max() == scores.min():
        return np.zeros_like(scores)
    if levels[-1] == levels[0]:  # more than a tenth of the scores are equal to the maximum
        return (scores == levels[-1]).astype(scores.dtype)
    return np.where(scores > levels[0], np.interp(scores, levels, np.linspace(0, 1, 11)), 0)


def absolute_scale(scores: np.ndarray, full: float) -> np.ndarray:
    """Return intensities in [0,1]: the scores divided by `full`, clipped at 1.

    If different frames have the same `full`, their intensities are comparable.
    """
    return np.clip(scores / full, 0, 1) if full > 0 else np.zeros_like(scores)


def default_full_score(maps: Sequence[np.ndarray]) -> float:
    """Return the default score for full colour.

    Each frame has a largest score. The result is the 95th percentile of these scores.
    """
    return float(np.quantile([scores.max() for scores in maps], 0.95)) if len(maps) else 0.0
