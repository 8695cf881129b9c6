"""`bestiary look filters RUN --draw LAYER`: for each filter of a convolution, a picture that excites it (Erhan et al. 2009).

From faint noise on gray, the agent's input is changed by gradient ascent on what the filter gives out, its mean over places,
before any nonlinearity. Pixels stay within what the agent can see, so that nothing is drawn that it could never be shown.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import imageio.v3 as imageio
import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.algorithms.optimizers import Adam
from bestiary.analysis.files import STILLS, check_output
from bestiary.analysis.filters import short_layer
from bestiary.analysis.paint import enlarge
from bestiary.console import note, tracked
from bestiary.errors import UserError
from bestiary.options import suggest
from bestiary.rollout import Inputs, ObservationSpec
from bestiary.runs.folder import Run

ASCENTS = 100  # steps of each picture
RATE = 4.0  # of Adam, in steps of a pixel's 256
AT_ONCE = 16  # pictures
GAP = 4  # pixels between two


def draw_filters(
    run: Run, layer: str, *, out: str | Path | None = None, seed: int = 0, overwrite: bool = False
) -> Path:
    """A sheet of pictures, filter after filter, row by row; of a stack of frames, each from the oldest to the newest."""
    path = check_output(out, overwrite, STILLS, "drawings are") if out is not None else None
    pool = run.config.make_pool(1, 0)
    pool.close()
    spec, agent = pool.observation_spec, cast(nn.Module, run.agent())
    name = which_layer(agent, layer)
    count = cast(nn.Conv2d, agent.get_submodule(name)).out_channels
    batches = [range(first, min(first + AT_ONCE, count)) for first in range(0, count, AT_ONCE)]
    drawn = [excite(agent, spec, name, filters, seed) for filters in tracked(batches, "drawing", len(batches))]
    frames = getattr(pool, "stacked", {}).get("image")
    path = path or run.new_path("looks", f"drawings-{short_layer(name)}-{run.steps:012d}", ".png")
    imageio.imwrite(path, sheet([picture for part in drawn for picture in part], frames))
    note(f"{count} filters of {name}")
    return path


def which_layer(agent: nn.Module, asked: str) -> str:
    """The convolution of a name, or of what is left of it in the figures of `look filters`."""
    names = [name for name, module in agent.named_modules() if isinstance(module, nn.Conv2d)]
    if not names:
        raise UserError(f"--draw {asked}: its agent has no convolutions")
    for name in names:
        if asked in (name, short_layer(name)):
            return name
    short = [short_layer(name) for name in names]
    raise UserError(f"--draw {asked}: its convolutions are {', '.join(short)}{suggest(asked, short)}")


def excite(agent: Any, spec: ObservationSpec, layer: str, filters: Sequence[int], seed: int = 0) -> np.ndarray:
    """Pictures uint8 [n,C,H,W] that excite so many filters of a layer, one each."""
    start = 127.5 + 10 * torch.randn(spec["image"].shape, generator=torch.Generator().manual_seed(seed))
    pictures = start.repeat(len(filters), 1, 1, 1).requires_grad_()  # all begin alike
    optimizer = Adam([pictures], lr=RATE, maximize=True)
    for _ in range(ASCENTS):
        given = given_out(agent, spec, layer, pictures)  # [n,filters,h,w]
        wanted = torch.stack([given[k, f].mean() for k, f in enumerate(filters)])
        (pictures.grad,) = torch.autograd.grad(wanted.sum(), pictures, allow_unused=True)
        if pictures.grad is None:
            raise UserError(f"--draw {layer}: it sees what the agent remembers, not the picture; draw another layer")
        optimizer.step()
        with torch.no_grad():
            pictures.clamp_(0, 255)
    return pictures.detach().round().to(torch.uint8).numpy()


def given_out(agent: Any, spec: ObservationSpec, layer: str, pictures: Tensor) -> Tensor:
    """What a layer gives out on pictures [n,C,H,W], each the first of a game: [n,filters,h,w]."""
    n, caught = len(pictures), list[Tensor]()
    seen = {kind: torch.zeros(1, n, *array.shape) for kind, array in spec.items()} | {"image": pictures.unsqueeze(0)}
    nothing, first = torch.zeros(1, n), torch.ones(1, n, dtype=torch.bool)
    hook = agent.get_submodule(layer).register_forward_hook(lambda _, __, output: caught.append(output))
    agent(Inputs(seen, nothing, first, nothing.long(), nothing.long()), agent.initial_state(n))
    hook.remove()
    return caught[0]


def sheet(pictures: list[np.ndarray], frames: int | None = None) -> np.ndarray:
    """Pictures [C,H,W] of so many frames each as one, uint8 [h,w,3]; about twice as wide as tall."""
    tiles = [enlarge(np.concatenate(_frames(picture, frames), axis=1)) for picture in pictures]
    height, width = (size + GAP for size in tiles[0].shape[:2])
    columns = min(len(tiles), max(1, round(math.sqrt(2 * len(tiles) * height / width))))
    canvas = np.zeros((-(-len(tiles) // columns) * height - GAP, columns * width - GAP, 3), np.uint8)
    for k, tile in enumerate(tiles):
        y, x = k // columns * height, k % columns * width
        canvas[y : y + height - GAP, x : x + width - GAP] = tile
    return canvas


def _frames(picture: np.ndarray, frames: int | None) -> list[np.ndarray]:
    """The frames of a stack, [H,W,3] each: in colour where three channels are one."""
    channels = len(picture)
    colour = channels // frames == 3 if frames else channels % 3 == 0
    parts = picture.reshape(-1, 3 if colour else 1, *picture.shape[1:])
    return [np.repeat(part, 1 if colour else 3, axis=0).transpose(1, 2, 0) for part in parts]
