"""A game of a trained agent as a GIF or MP4: the environment's own picture, not the agent's small input."""

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import torch.nn as nn
from PIL import Image

from bestiary.analysis.play import play
from bestiary.config import make_pool
from bestiary.console import note
from bestiary.envs import canonical
from bestiary.envs.pool import Pool
from bestiary.envs.rewards import bare
from bestiary.errors import UserError
from bestiary.options import suggest
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run

SUFFIXES = (".gif", ".mp4")
ENOUGH = 50  # steps that make a movie worth watching; shorter games are followed by another


def film(
    run: Run,
    *,
    out: str | Path | None = None,
    length: int = 2_000,
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    fps: float = 0,
    overwrite: bool = False,
    attention: bool = False,
    env: str | None = None,
) -> Path:
    """Film one game, or its first `length` steps (of very short games, several); returns the file.

    With `attention`, where the agent looks is drawn over the picture. Where a flickering game is blank to the agent, it is
    drawn dark. `env` is one of the run's tasks, else the first."""
    config = run.config
    env = canonical(env) if env is not None else None
    if env is not None and env not in config.envs:
        raise UserError(f"--env {env}: the run's tasks are {', '.join(config.envs)}{suggest(env, config.envs)}")
    task = config.envs.index(env) if env is not None else 0
    chosen = checkpoints.choose(run.path, checkpoint)
    stem = f"{chosen.steps:012d}-{'greedy' if greedy else 'sampled'}"
    path = check_output(out, overwrite) if out is not None else run.new_path("movies", stem, ".gif")
    agent = run.agent(chosen.steps)
    if attention and not getattr(agent, "attends", False):
        raise UserError(f"{run.path}: its agent has no attention to draw; --agent iam --agent.dset attention has")
    streams = np.random.SeedSequence([config.training.seed, 2, seed]).spawn(2)
    pool = make_pool([config.envs[task]], config.env_options, 1, streams[0], render=True, rewards=config.rewards)
    pictures: list[np.ndarray] = []
    earned = [0.0]  # a game
    try:
        for step, output in play(agent, pool, greedy=greedy, seed=int(streams[1].generate_state(1)[0]), task=task):
            earned[-1] += float(step.reward[0])
            if len(pictures) >= length or (step.game_over[0] and len(pictures) >= ENOUGH):
                break  # the picture after a game over already belongs to the next game
            if step.game_over[0]:
                earned.append(0.0)
            picture = pool.render()[0]
            if "blank" in step.measures and step.measures["blank"][0]:
                picture = picture // 4  # a flickering game, and the agent sees nothing of this
            if attention:
                weights = output.extras["attention"][0, 0].numpy()  # [heads,R]
                picture = overlay(picture, *attention_map(weights, agent, pool))
            pictures.append(picture)
    finally:
        pool.close()
    write_movie(path, pictures, fps or (60 / pool.frames_per_step if pool.frames_per_step > 1 else 10))
    note(f"{len(pictures)} steps, return {', '.join(f'{r:g}' for r in earned)}")
    return path


Box = tuple[float, float, float, float]  # left, top, right, bottom, as shares of a picture
EVERYWHERE: Box = (0, 0, 1, 1)
SATURATED = 5  # times its even share of the attention: a cell with that much is as red as it gets


def attention_map(weights: np.ndarray, agent: Any, pool: Pool) -> tuple[np.ndarray, Box]:
    """Weights of all heads over cells or inputs, [heads,R], as one map [h,w], and the part of the screen that it covers.

    0 is an even share or less, 1 is SATURATED times that or more: the same in every picture, so that pictures compare."""
    shares = weights.mean(axis=0) * weights.shape[1]  # 1 where attention is even
    shape = getattr(agent.torso, "map_shape", None)
    if shape is not None:
        cells, box = shares.reshape(shape[1:]), _seen_by_cells(agent.torso, pool.observation_spec["image"].shape)
    else:
        places = getattr(bare(pool), "input_cells", None)  # [D,2]: row and column that an input is about
        if places is None:
            raise UserError(f"{pool.tasks[0]}: its inputs have no place in the picture, so attention cannot be drawn")
        cells, box = np.zeros(places.max(axis=0) + 1), EVERYWHERE
        np.maximum.at(cells, tuple(places.T), shares)
    return np.clip((cells - 1) / (SATURATED - 1), 0, 1), box


def _seen_by_cells(torso: Any, image: tuple[int, ...]) -> Box:
    """The part of a picture in which the cells of the torso's map have their middles, half a cell around them included."""
    first, stride = 0.0, 1  # the middle of the first cell, and from one to the next, in pixels
    for layer in torso.convolutions.modules():
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d):
            kernel, step, padding = (v[0] if isinstance(v, tuple) else v for v in _geometry(layer))
            first, stride = first + ((kernel - 1) / 2 - padding) * stride, stride * step
    low = [(first + 0.5 - stride / 2) / size for size in image[1:]]
    high = [
        (first + 0.5 + stride * (cells - 0.5)) / size
        for cells, size in zip(torso.map_shape[1:], image[1:], strict=True)
    ]
    return max(0, low[1]), max(0, low[0]), min(1, high[1]), min(1, high[0])


def _geometry(layer: nn.Conv2d | nn.MaxPool2d) -> tuple[Any, Any, Any]:
    return layer.kernel_size, layer.stride, layer.padding


def overlay(picture: np.ndarray, cells: np.ndarray, box: Box = EVERYWHERE, strength: float = 0.6) -> np.ndarray:
    """A picture [H,W,3] with a map [h,w] of values in [0,1] laid over a part of it: dimmed, and red where the map is high."""
    height, width = picture.shape[:2]
    left, top, right, bottom = (round(share * size) for share, size in zip(box, (width, height) * 2, strict=True))
    smooth = Image.fromarray(np.uint8(255 * cells)).resize((right - left, bottom - top), Image.Resampling.BICUBIC)
    heat = np.zeros((height, width, 1), np.float32)
    heat[top:bottom, left:right] = np.asarray(smooth, np.float32)[..., None] / 255
    red = np.array([255, 40, 0], np.float32)
    return (picture * (1 - strength * heat) + red * strength * heat).astype(np.uint8)


def check_output(out: str | Path, overwrite: bool) -> Path:
    path = Path(out).expanduser()
    if path.suffix not in SUFFIXES:
        raise UserError(f"--out {out}: movies are {' or '.join(SUFFIXES)}")
    if path.exists() and not overwrite:
        raise UserError(f"--out {out} exists; choose another name or add --overwrite")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {path.parent}")
    return path


def write_movie(path: Path, pictures: list[np.ndarray], fps: float) -> None:
    """Write RGB pictures [H,W,3]; small ones are enlarged by whole pixels, so that a person can see them."""
    height, width = pictures[0].shape[:2]
    scale = max(1, round(210 / height)) if max(height, width) < 100 else 1
    large = [np.repeat(np.repeat(p, scale, axis=0), scale, axis=1) for p in pictures] if scale > 1 else pictures
    if path.suffix == ".mp4":
        even = [np.pad(p, ((0, p.shape[0] % 2), (0, p.shape[1] % 2), (0, 0)), mode="edge") for p in large]
        imageio.imwrite(path, np.stack(even), fps=fps, codec="libx264", macro_block_size=1)
    else:
        imageio.imwrite(path, np.stack(large), duration=1000 / fps, loop=0)
