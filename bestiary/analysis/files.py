"""Files of pictures, and of the numbers behind them: what can be written, and writing it. Pictures are uint8 [H,W,3]."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np

from bestiary import __version__
from bestiary.agents.agent import Output
from bestiary.analysis.paint import enlarge
from bestiary.errors import UserError

MOVIES = (".gif", ".mp4")
STILLS = (".png",)
FIGURES = (".png", ".svg", ".pdf")
FASTEST = 50  # pictures a second of a GIF, which counts hundredths of a second; browsers slow down what is faster


def check_output(out: str | Path, overwrite: bool, suffixes: Sequence[str] = MOVIES, what: str = "movies are") -> Path:
    """Where something goes; refuses what cannot be written, or is there."""
    path = Path(out).expanduser()
    if path.suffix not in suffixes:
        raise UserError(f"--out {out}: {what} {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"--out {out} is a folder; name a file")
    if path.exists() and not overwrite:
        raise UserError(f"--out {path} exists; choose another name or add --overwrite")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {path.parent}")
    return path


def check_look(out: str | Path, overwrite: bool, length: int) -> Path:
    """Of `length` pictures that have numbers of the same name beside them, as .npz."""
    path = check_output(out, overwrite, (*MOVIES, *STILLS), "can be")
    check_output(path.with_suffix(".npz"), overwrite, (".npz",))
    if path.suffix in STILLS and length > 1 and not overwrite:
        numbered = re.compile(re.escape(path.stem) + r"-\d{5,}" + re.escape(path.suffix))
        if there := sorted(other.name for other in path.resolve().parent.iterdir() if numbered.fullmatch(other.name)):
            raise UserError(f"--out {path}: {path.with_name(there[0])} exists; choose another name or add --overwrite")
    return path


def check_rate(fps: float, out: str | Path | None) -> None:
    """Of a movie, which is a GIF where nothing else is asked for."""
    if fps > FASTEST and (out is None or Path(out).suffix == ".gif"):
        raise UserError(
            f"--fps {fps:g}: a GIF plays at most {FASTEST} pictures a second; choose fewer, or --out NAME.mp4"
        )


def write_movie(path: Path, pictures: list[np.ndarray], fps: float) -> None:
    """Write RGB pictures [H,W,3]; small ones are enlarged by whole pixels, so that a person can see them."""
    large = [enlarge(picture) for picture in pictures]
    if path.suffix == ".mp4":
        even = [np.pad(p, ((0, p.shape[0] % 2), (0, p.shape[1] % 2), (0, 0)), mode="edge") for p in large]
        imageio.imwrite(path, np.stack(even), fps=fps, codec="libx264", macro_block_size=1)
    else:
        imageio.imwrite(path, np.stack(large), duration=1000 / fps, loop=0)


def write_pictures(path: Path, pictures: list[np.ndarray], fps: float, first: int = 0) -> list[Path]:
    """A movie; or PNGs, of several pictures one each: NAME-00200.png and so on. Returns what was written."""
    if path.suffix in MOVIES:
        write_movie(path, pictures, fps)
        return [path]
    numbers = range(first, first + len(pictures))
    paths = [path.with_stem(f"{path.stem}-{t:05d}") for t in numbers] if len(pictures) > 1 else [path]
    for each, picture in zip(paths, pictures, strict=True):
        imageio.imwrite(each, enlarge(picture))
    return paths


def save_numbers(
    path: Path, answers: Sequence[tuple[str, Output]], start: int, protocol: dict[str, Any], **arrays: Any
) -> None:
    """Arrays [T,...] of a game from step `start` on, and what the agent did and thought at each step; `protocol` is JSON."""
    actions, outputs = zip(*answers, strict=True)
    np.savez_compressed(
        path,
        **arrays,
        step=np.arange(start, start + len(answers)),
        action=np.array(actions),
        logits=np.stack([output.distribution.logits[0, 0].numpy() for output in outputs]),
        worth=np.array([float(output.value[0, 0]) for output in outputs]),
        protocol=np.array(json.dumps({**protocol, "bestiary": __version__})),
    )
