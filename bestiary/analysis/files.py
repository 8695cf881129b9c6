"""Files of pictures: what can be written, and writing it. Pictures are uint8 [H,W,3]."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from bestiary.analysis.paint import enlarge
from bestiary.errors import UserError

MOVIES = (".gif", ".mp4")
STILLS = (".png",)
FIGURES = (".png", ".svg", ".pdf")


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


def check_look(out: str | Path, overwrite: bool) -> Path:
    """Of pictures that have numbers of the same name beside them, as .npz."""
    path = check_output(out, overwrite, (*MOVIES, *STILLS), "can be")
    check_output(path.with_suffix(".npz"), overwrite, (".npz",))
    return path


def write_movie(path: Path, pictures: list[np.ndarray], fps: float) -> None:
    """Write RGB pictures [H,W,3]; small ones are enlarged by whole pixels, so that a person can see them."""
    large = [enlarge(picture) for picture in pictures]
    if path.suffix == ".mp4":
        even = [np.pad(p, ((0, p.shape[0] % 2), (0, p.shape[1] % 2), (0, 0)), mode="edge") for p in large]
        imageio.imwrite(path, np.stack(even), fps=fps, codec="libx264", macro_block_size=1)
    else:
        imageio.imwrite(path, np.stack(large), duration=1000 / fps, loop=0)


def write_pictures(path: Path, pictures: list[np.ndarray], fps: float, first: int = 0) -> None:
    """A movie; or PNGs, of several pictures one each: NAME-00200.png and so on."""
    if path.suffix in MOVIES:
        return write_movie(path, pictures, fps)
    if len(pictures) == 1:
        return imageio.imwrite(path, enlarge(pictures[0]))
    for t, picture in enumerate(pictures, first):
        imageio.imwrite(path.with_stem(f"{path.stem}-{t:05d}"), enlarge(picture))
