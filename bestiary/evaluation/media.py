"""Write videos, images, and files with the data of the steps that they show. Check the paths of output files.

Images are uint8 [H,W,3].
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary import __version__
from bestiary.utils.errors import UserError
from bestiary.utils.images import enlarge

if TYPE_CHECKING:
    from bestiary.agents.agent import Output

VIDEO_SUFFIXES = (".gif", ".mp4")
IMAGE_SUFFIXES = (".png",)
FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
MAX_GIF_FPS = 50  # browsers slow down GIFs whose frames last less than 20 ms


def check_output(
    out: str | Path, overwrite: bool, suffixes: Sequence[str] = VIDEO_SUFFIXES, kind: str = "videos"
) -> Path:
    """Return the path of an output file. Raise UserError if the path is not valid.

    The path is not valid if its suffix is not one of `suffixes`, if its folder does not exist, or if the file exists
    and `overwrite` is False. `kind` is the word for such files in the error message, for example "videos".
    """
    path = Path(out).expanduser()
    if path.suffix not in suffixes:
        raise UserError(f"--out {out}: {kind} are {' or '.join(suffixes)} files; choose one of these suffixes")
    if path.is_dir():
        raise UserError(f"--out {out} is a folder; give the name of a file")
    if os.path.lexists(path) and not overwrite:  # also a link to a file that does not exist
        raise UserError(f"--out {path} exists; choose another name or add --overwrite")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {path.parent}; create it first")
    return path


def check_frames_output(out: str | Path | None, overwrite: bool, length: int, fps: float) -> Path | None:
    """Check the output path `out` of a video or of `length` images, and return it. Return None if `out` is None.

    Raise UserError if the path is not valid (see `check_output`), or if the frame rate is too high for a GIF. If
    `overwrite` is False, also raise UserError if an output file exists. Output files are the video or image, numbered
    images such as NAME-00200.png, and the .npz file with the same name.
    """
    check_fps(fps, out)
    if out is None:
        return None
    path = check_output(out, overwrite, (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES), "output files")
    check_output(path.with_suffix(".npz"), overwrite, (".npz",))
    if path.suffix in IMAGE_SUFFIXES and length > 1 and not overwrite:
        numbered = re.compile(re.escape(path.stem) + r"-\d{5,}" + re.escape(path.suffix))
        existing = sorted(other.name for other in path.resolve().parent.iterdir() if numbered.fullmatch(other.name))
        if existing:
            raise UserError(
                f"--out {path}: {path.with_name(existing[0])} exists; choose another name or add --overwrite"
            )
    return path


def check_fps(fps: float, out: str | Path | None) -> None:
    """Raise UserError if the output is a GIF and the frame rate is too high for a GIF.

    If `out` is None, the output is a GIF.
    """
    if fps > MAX_GIF_FPS and (out is None or Path(out).suffix == ".gif"):
        raise UserError(
            f"--fps {fps:g}: a GIF plays at most {MAX_GIF_FPS} frames per second; choose a lower rate or --out NAME.mp4"
        )


def write_video(path: Path, images: list[np.ndarray], fps: float) -> None:
    """Write images [H,W,3] as a GIF or MP4 file. Small images are enlarged by an integer factor."""
    import imageio.v3 as imageio

    large = [enlarge(image) for image in images]
    if path.suffix == ".mp4":
        # The codec needs an even width and height.
        even = [np.pad(i, ((0, i.shape[0] % 2), (0, i.shape[1] % 2), (0, 0)), mode="edge") for i in large]
        imageio.imwrite(path, np.stack(even), fps=fps, codec="libx264", macro_block_size=1)
    else:
        imageio.imwrite(path, np.stack(large), duration=1000 / fps, loop=0)


def write_images(path: Path, images: list[np.ndarray], fps: float, first: int = 0) -> list[Path]:
    """Write images as one video or as PNG files, depending on the suffix of `path`, and return the paths.

    If there are several PNG files, they are numbered from `first` on: NAME-00200.png, NAME-00201.png ...
    """
    if path.suffix in VIDEO_SUFFIXES:
        write_video(path, images, fps)
        return [path]

    import imageio.v3 as imageio

    numbers = range(first, first + len(images))
    paths = [path.with_stem(f"{path.stem}-{t:05d}") for t in numbers] if len(images) > 1 else [path]
    for image_path, image in zip(paths, images, strict=True):
        imageio.imwrite(image_path, enlarge(image))
    return paths


def save_step_data(
    path: Path, steps: "Sequence[tuple[str, Output]]", start: int, protocol: dict[str, Any], **arrays: Any
) -> None:
    """Write an .npz file with the action, logits and value of each step.

    `steps` has (name of the action, output of the agent) for each of T steps, starting at step `start` of the game.
    `arrays` are further arrays [T,...] to store. `protocol` describes how the game was played and is stored as JSON.
    """
    actions, outputs = zip(*steps, strict=True)
    np.savez_compressed(
        path,
        **arrays,
        step=np.arange(start, start + len(steps)),
        action=np.array(actions),
        logits=np.stack([output.distribution.logits[0, 0].numpy() for output in outputs]),
        value_estimate=np.array([float(output.value[0, 0]) for output in outputs]),
        protocol=np.array(json.dumps({**protocol, "bestiary": __version__})),
    )
