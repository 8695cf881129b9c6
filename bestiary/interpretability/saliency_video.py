"""Draw the saliency of an agent on the images of a game (`bestiary look saliency`), and write the scores to a file.

Saliency of the policy is drawn in red and saliency of the value in green. A palette for colour-blind people uses orange
and blue. With the absolute scale (default), a score has the same colour in all frames. The quantile scale colours the
highest 10 % of the scores of each frame, even if all scores are close to zero. Published videos use the quantile scale.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bestiary.agents.agent import Output
from bestiary.evaluation.media import check_frames_output, save_step_data, write_images
from bestiary.evaluation.playback import PlaybackOptions, Viewer, note_screen_differs, open_playback
from bestiary.interpretability.overlays import Colour, overlay_colours, resize_map
from bestiary.interpretability.saliency import (
    Saliency,
    SaliencyMaps,
    SaliencyOptions,
    absolute_scale,
    default_full_score,
    interpolate_grid,
    quantile_scale,
)
from bestiary.runs.run import Run
from bestiary.utils.console import note, progress_bar
from bestiary.utils.errors import UserError

PALETTES: dict[str, dict[str, Colour]] = {
    "red-green": {"policy": (255, 0, 0), "value": (0, 255, 0)},
    "orange-blue": {"policy": (255, 140, 0), "value": (40, 130, 255)},
}
OUTPUTS = {"policy": ("policy",), "value": ("value",), "both": ("policy", "value")}


@dataclass(frozen=True)
class SaliencyStyle:
    """Options that say how saliency scores are drawn."""

    output: str = "both"  # which scores are drawn, a key of OUTPUTS
    scale: str = "absolute"  # absolute or quantile, see the module docstring
    palette: str = "red-green"  # colours, a key of PALETTES
    # (policy, value): the scores from which the colours are saturated. None: computed by `default_full_score`.
    full: tuple[float | None, float | None] = (None, None)


def render_saliency(
    run: Run,
    options: PlaybackOptions = PlaybackOptions(),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    saliency_options: SaliencyOptions = SaliencyOptions(),
    style: SaliencyStyle = SaliencyStyle(),
) -> list[Path]:
    """Play a game, draw the saliency on its images, and write the scores to an .npz file.

    Return the path of the video or, if `out` is a .png file, the paths of the images. If `out` is None, the files are
    written into the run folder.
    """
    path = check_frames_output(out, overwrite, options.length, options.fps)
    playback = open_playback(run, options)
    (viewer,) = playback.viewers
    (saliency,) = make_saliencies([viewer], saliency_options)
    path = path or run.new_output_path("interpretability", f"saliency-{viewer.file_stem}-{options.start}", ".gif")
    note_screen_differs([viewer])
    images, maps, taken = list[np.ndarray](), list[SaliencyMaps](), list[tuple[str, Output]]()
    for (frame,) in progress_bar(playback, "saliency", options.length):
        images.append(frame.canvas)
        maps.append(saliency(frame.record.inputs, frame.record.state))
        taken.append((frame.action, frame.record.output))
    full = full_colour_scores(maps, style)
    drawn = [draw_saliency(image, m, saliency, style, full) for image, m in zip(images, maps, strict=True)]
    written = write_images(path, drawn, options.fps or playback.fps, first=options.start)
    protocol = {
        **playback.protocol(),
        **asdict(saliency_options),
        "density": saliency.density,
        "radius": saliency.radius,
        "blur": saliency.blur,
        **asdict(style),
        "full": full,
    }
    scores = {name: np.stack([getattr(m, name) for m in maps]) for name in ("policy", "value")}  # [T,h,w]
    arrays_path = path.with_suffix(".npz")
    save_step_data(arrays_path, taken, options.start, protocol, **scores)
    scale = "the highest 10 % of the scores of each frame are coloured"
    if style.scale == "absolute":
        scale = f"full colour means {', '.join(f'{name} {full[name]:.3g}' for name in OUTPUTS[style.output])}"
    note(f"{len(maps)} steps are drawn, {scale}; the scores are in {arrays_path}")
    return written


def make_saliencies(viewers: Sequence[Viewer], options: SaliencyOptions) -> list[Saliency]:
    """Return a Saliency object for the agent of each viewer.

    If an agent observes no images, close the environments of all viewers and raise UserError.
    """
    saliencies = []
    for viewer in viewers:
        try:
            saliencies.append(Saliency(viewer.agent, viewer.pool.observation_spec, options))
        except UserError as error:
            for opened in viewers:
                opened.pool.close()
            raise UserError(*(f"{viewer.run.path}: {problem}" for problem in error.problems)) from None
    return saliencies


def full_colour_scores(maps: Sequence[SaliencyMaps], style: SaliencyStyle) -> dict[str, float]:
    """Return {"policy": ..., "value": ...}: the scores at which the two colours are saturated in all frames of a game.

    If `style` does not set a score, `default_full_score` computes the score from `maps`, the saliency maps of all
    frames.
    """
    scores = {}
    for name, requested in zip(("policy", "value"), style.full, strict=True):
        if requested is None:
            scores[name] = default_full_score([getattr(m, name) for m in maps])
        else:
            scores[name] = float(requested)
    return scores


def draw_saliency(
    image: np.ndarray, maps: SaliencyMaps, saliency: Saliency, style: SaliencyStyle, full: dict[str, float]
) -> np.ndarray:
    """Draw the scores of one step on an image and return the result.

    The image must show the same area as the agent's observation, but may have another size. `full` has the scores at
    which the colours are saturated.
    """
    coloured = []
    for name in OUTPUTS[style.output]:
        scores = interpolate_grid(getattr(maps, name), saliency.density, (saliency.height, saliency.width))
        heat = quantile_scale(scores) if style.scale == "quantile" else absolute_scale(scores, full[name])
        coloured.append((np.clip(resize_map(heat, image.shape[:2]), 0, 1), PALETTES[style.palette][name]))
    return overlay_colours(image, coloured)
