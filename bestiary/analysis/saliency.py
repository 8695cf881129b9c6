"""Where would a change change the agent's mind? Saliency by perturbation (Greydanus et al. 2018).

At each point of a grid, a small patch of the picture is replaced by a blurred copy of it, so that what is there is lost and
nothing else is added, and the agent is asked again, with the memory it had:

    M    a cross of five pixels, blurred by `radius`, its highest value 1
    I'   = (1 - M) I + M blur(I)                        occlude; a searchlight leaves only the patch sharp
    S    = 1/2 |L(I') - L(I)|^2                         L: the policy's logits, or the value in the units of the rewards

All patches of a frame go through the network in a few batches, whose size is bounded whatever the grid; policy and value come
out of the same pass. A blurred cross is a sum of products of blurred points, so that no mask is ever filtered, and it is zero
beyond four radii, so that only a small window of each picture is computed, and of the first layers' maps (`nearby.py`).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy.ndimage
import torch
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.analysis.nearby import nearby
from bestiary.errors import UserError
from bestiary.rollout import Inputs, ObservationSpec

# in pixels of a picture of 84, and at least; others in proportion, else one patch would cover half of a small world
RADIUS = (2.0, 0.5)  # of a patch
BLUR = (3.0, 1.0)  # of the picture that patches are replaced with
BYTES = 2**22  # of perturbed pictures, and of the memory's states for them, at a time: what fits the cache
ROUNDING = 1e-5  # changes of this size, relative to what they change, are the arithmetic's, not the picture's


@dataclass(frozen=True)
class Method:
    """How a picture is perturbed, and how a changed policy is measured."""

    density: int | None = None  # pixels from one patch to the next; None: as many as suit the picture
    radius: float | None = None  # pixels: of the blurred cross; None: as large as suits the picture
    mode: str = "occlude"  # or searchlight
    distance: str = "logits"  # or kl: of the policies, which no constant added to all logits changes
    usual_density: float = 2.0  # where none is given: of a picture of 84


@dataclass
class Maps:
    """Scores on the grid, float32 [h,w]: row i, column j are about the pixel (i, j) times the density."""

    policy: np.ndarray
    value: np.ndarray


class Saliency:
    """The saliency of an agent's input pictures: `maps = saliency(inputs, state)`, of one moment [1,1]."""

    def __init__(self, agent: Agent, spec: ObservationSpec, method: Method = Method()):
        if "image" not in spec:
            raise UserError(
                f"its agent sees {', '.join(spec)}, not pictures, so there is nothing to blur; bestiary movie shows it play, "
                "and bestiary look actions what it does"
            )
        self.agent, self.method = nearby(agent), method
        _, self.height, self.width = spec["image"].shape
        share = min(self.height, self.width) / 84
        self.density = method.density or max(1, round(share * method.usual_density))
        if self.density > min(self.height, self.width):
            raise UserError(f"--density {self.density}: the agent's pictures are only {self.height}x{self.width}")
        usual, self.blur = (max(least, share * pixels) for pixels, least in (RADIUS, BLUR))
        self.radius = usual if method.radius is None else method.radius
        self.rows, self.columns = (Profiles(size, self.radius) for size in (self.height, self.width))
        self.blurs = tuple(blur_matrix(size, self.blur) for size in (self.height, self.width))
        self.centres = grid(self.height, self.width, self.density)  # [M,2]
        self.shape = (-(-self.height // self.density), -(-self.width // self.density))
        self.whole_numbers: bool | None = None  # whether this agent wants bytes; found out once
        self.threads = ThreadPoolExecutor(os.cpu_count())

    @torch.no_grad()
    def __call__(self, inputs: Inputs, state: State) -> Maps:
        frame = inputs.observation["image"][0, 0].permute(1, 2, 0).float()  # [H,W,C]
        if self.whole_numbers is None:
            self.whole_numbers = not self._reads_floats(inputs, state, frame)
        blurred = torch.einsum("yi,ijc,xj->yxc", self.blurs[0], frame, self.blurs[1])
        each = 4 * frame.numel() + sum(s[0].numel() * s.element_size() for s in state)
        pieces = self.centres.split(max(1, BYTES // each))
        scores = self.threads.map(lambda piece: self._scores(frame, blurred, piece, inputs, state), pieces)
        policy, value = torch.cat(list(scores), dim=1).numpy()
        return Maps(policy.reshape(self.shape), value.reshape(self.shape))

    def masks(self, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Blurred crosses around some points [K,2], their highest value 1: the windows [K,h,w] in which they are not zero, and
        which rows [K,h,1] and columns [K,1,w] of the picture those are."""
        (point_y, beside_y, y), (point_x, beside_x, x) = (
            profiles.around(places)
            for profiles, places in zip((self.rows, self.columns), centres.unbind(1), strict=True)
        )
        upright = (point_y + beside_y).unsqueeze(2) * point_x.unsqueeze(1)
        across = point_y.unsqueeze(2) * beside_x.unsqueeze(1)
        masks = upright + across
        return masks / masks.amax(dim=(1, 2), keepdim=True), y.unsqueeze(2), x.unsqueeze(1)

    @torch.no_grad()
    def _scores(self, frame: Tensor, blurred: Tensor, centres: Tensor, inputs: Inputs, state: State) -> Tensor:
        """Policy and value scores [2,K] of some patches."""
        masks, y, x = self.masks(centres)
        outside, inside = (blurred, frame) if self.method.mode == "searchlight" else (frame, blurred)
        pictures = outside.repeat(1 + len(centres), 1, 1, 1)  # [1+K,H,W,C]
        which = torch.arange(1, 1 + len(centres)).view(-1, 1, 1)
        pictures[which, y, x] = torch.lerp(outside[y, x], inside[y, x], masks.unsqueeze(-1))
        pictures[0] = frame
        output = self._ask(pictures, inputs, state)  # [1,1+K]; the first is as it was
        logits, value = output.distribution.logits[0], output.value[0]
        policy = _above_rounding(0.5 * (logits[1:] - logits[:1]).square().sum(-1), logits[0].norm())
        worth = _above_rounding(0.5 * (value[1:] - value[:1]).square(), value[0].abs())
        if self.method.distance == "kl":
            log_probs = output.distribution.log_probs[0]
            divergence = (log_probs[:1].exp() * (log_probs[:1] - log_probs[1:])).sum(-1).clamp(min=0)
            policy = torch.where(policy > 0, divergence, 0.0)
        return torch.stack([policy, worth])

    def _ask(self, frames: Tensor, inputs: Inputs, state: State) -> Output:
        """What the agent makes of other pictures [K,H,W,C] in the same situation."""
        count = len(frames)
        if self.whole_numbers:
            frames = frames.round().to(torch.uint8)

        def again(x: Tensor) -> Tensor:  # [1,1,...] -> [1,K,...]
            return x.expand(1, count, *x.shape[2:])

        observation = {kind: again(x) for kind, x in inputs.observation.items() if kind != "image"}
        observation["image"] = frames.permute(0, 3, 1, 2).unsqueeze(0)
        rest = (again(x) for x in (inputs.reward, inputs.done, inputs.last_action, inputs.task))
        states = tuple(s.expand(count, *s.shape[1:]).contiguous() for s in state)
        output, _ = self.agent(Inputs(observation, *rest), states)
        return output

    def _reads_floats(self, inputs: Inputs, state: State, frame: Tensor) -> bool:
        """Whether the agent takes a picture in floats for the same picture; a user's own may not."""
        try:
            self.whole_numbers = False
            outputs = [self.agent(inputs, state)[0], self._ask(frame.unsqueeze(0).clone(), inputs, state)]
            pairs = ([o.distribution.logits for o in outputs], [o.value for o in outputs])
            return all(torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)
        except (RuntimeError, TypeError, ValueError):
            return False


def _above_rounding(scores: Tensor, size: Tensor) -> Tensor:
    return torch.where(scores > 0.5 * (ROUNDING * (1 + size)) ** 2, scores, 0.0)


def grid(height: int, width: int, density: int) -> Tensor:
    """The points that patches are around, row by row: int64 [M,2]."""
    return torch.cartesian_prod(torch.arange(0, height, density), torch.arange(0, width, density))


def blur_matrix(size: int, sigma: float) -> Tensor:
    """[size,size], by which a signal is multiplied to be blurred; edges are mirrored."""
    return torch.from_numpy(scipy.ndimage.gaussian_filter1d(np.eye(size), sigma, axis=0)).float()


class Profiles:
    """Along one axis, blurred points at every place, and the sums of those at its two neighbours."""

    def __init__(self, size: int, radius: float):
        self.point = blur_matrix(size, radius).T.contiguous()  # [size,size]: a blurred point at i in row i
        self.beside = torch.zeros_like(self.point)
        self.beside[1:] += self.point[:-1]
        self.beside[:-1] += self.point[1:]
        self.reach = int(4 * radius + 0.5) + 1  # where the filter ends, and one for the neighbours
        self.window = torch.arange(min(2 * self.reach + 1, size))
        self.last = size - len(self.window)

    def around(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of some places [K]: both profiles within the window where they are not zero, and the window's pixels; [K,w] each."""
        pixels = (places - self.reach).clamp(0, self.last).unsqueeze(1) + self.window
        return self.point[places].gather(1, pixels), self.beside[places].gather(1, pixels), pixels


def fill(cells: np.ndarray, density: int, size: tuple[int, int]) -> np.ndarray:
    """Scores on the grid [h,w] for every pixel [H,W]: linear between grid points, and the same at them."""
    tall, wide = (_between(count, density, pixels) for count, pixels in zip(cells.shape, size, strict=True))
    return tall @ cells @ wide.T


def _between(count: int, density: int, pixels: int) -> np.ndarray:
    """[pixels,count]: how much of each grid point a pixel takes; beyond the last one, all of that."""
    place = np.minimum(np.arange(pixels) / density, count - 1)
    return np.maximum(0, 1 - np.abs(place[:, None] - np.arange(count)))


# --- from scores to colour ---


def quantile_scale(scores: np.ndarray) -> np.ndarray:
    """The highest tenth of a map from 0 to 1 by rank: the same amount of colour in every frame, however little it means."""
    levels = np.quantile(scores, np.linspace(0.9, 1, 11))
    if scores.max() == scores.min():
        return np.zeros_like(scores)
    if levels[-1] == levels[0]:  # more than a tenth is equally high
        return (scores == levels[-1]).astype(scores.dtype)
    return np.where(scores > levels[0], np.interp(scores, levels, np.linspace(0, 1, 11)), 0)


def absolute_scale(scores: np.ndarray, full: float) -> np.ndarray:
    """Scores from 0 to 1, which is `full` and all above: the same colour means the same in every frame."""
    return np.clip(scores / full, 0, 1) if full > 0 else np.zeros_like(scores)


def usual_full(maps: Sequence[np.ndarray]) -> float:
    """The score that is painted at full strength: what all but one frame in twenty reach at most."""
    return float(np.quantile([scores.max() for scores in maps], 0.95)) if len(maps) else 0.0
