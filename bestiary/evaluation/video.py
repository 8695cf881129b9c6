"""Record videos (GIF or MP4) of trained agents from the images that the environment renders."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bestiary.evaluation.media import check_fps, check_output, write_video
from bestiary.evaluation.playback import Frame, PlaybackOptions, Viewer, open_playback
from bestiary.runs.run import Run
from bestiary.utils.console import note, progress_bar


def record_video(
    run: Run,
    options: PlaybackOptions = PlaybackOptions(length=2_000),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    make_overlay: Callable[[Viewer], Callable[[Frame], np.ndarray]] | None = None,
) -> Path:
    """Record a video of one game and return its path. If the game is very short, the video also shows another game.

    The image is darkened at steps at which flicker hides the screen from the agent. `make_overlay(viewer)` returns a
    function that draws the image of each frame; the default draws the rendered screen. If `out` is None, the video is
    written into the run folder.
    """
    check_fps(options.fps, out)
    path = check_output(out, overwrite) if out is not None else None
    playback = open_playback(run, options)
    (viewer,) = playback.viewers
    draw = make_overlay(viewer) if make_overlay is not None else _display_image
    if path is None:
        policy = "greedy" if options.greedy else "sampled"
        path = run.new_output_path("videos", f"{viewer.file_stem}-{policy}", ".gif")
    images = [draw(frame) for (frame,) in progress_bar(playback, "recording", options.length)]
    write_video(path, images, options.fps or playback.fps)
    note(f"the video shows {len(images)} steps; return of each game: {', '.join(f'{r:g}' for r in playback.returns)}")
    return path


def _display_image(frame: Frame) -> np.ndarray:
    return frame.display_image
