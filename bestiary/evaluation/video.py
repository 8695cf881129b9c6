"""Record videos (GIF or MP4) of games of trained agents, or show games in a window."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bestiary.agents.agent import Agent
from bestiary.evaluation.media import check_fps, check_output, write_video
from bestiary.evaluation.playback import Frame, Playback, PlaybackOptions, Viewer, make_viewer, open_playback
from bestiary.evaluation.window import Window
from bestiary.runs.run import Run
from bestiary.utils.console import note, plural, progress_bar

DEFAULT_OPTIONS = PlaybackOptions(length=2_000)


def record_video(
    run: Run,
    options: PlaybackOptions = DEFAULT_OPTIONS,
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
    _note_returns("the video shows", len(images), playback)
    return path


def show_game(
    run: Run,
    options: PlaybackOptions = DEFAULT_OPTIONS,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    make_overlay: Callable[[Viewer], Callable[[Frame], np.ndarray]] | None = None,
) -> Path | None:
    """Show a game in a window while the agent plays it, until the game ends or the user closes the window.

    The arguments are those of `record_video`, but a video is written only if `out` is given. Return the path of the
    video, or None. Call `window.display_problem` first, to check that a window can be opened.
    """
    if out is not None:
        check_fps(options.fps, out)
    path = check_output(out, overwrite) if out is not None else None
    playback = open_playback(run, options)
    (viewer,) = playback.viewers
    draw = make_overlay(viewer) if make_overlay is not None else _display_image
    fps = options.fps or playback.fps
    images = []
    with Window(f"{run.name}: {viewer.pool.tasks[0]}", fps) as window:
        for (frame,) in playback:
            image = draw(frame)
            if path is not None:
                images.append(image)
            if not window.show(image):
                break
    _note_returns("the window showed", window.num_shown, playback)
    if path is not None:
        write_video(path, images, fps)
    return path


def _note_returns(shown: str, num_steps: int, playback: Playback) -> None:
    returns = ", ".join(f"{value:g}" for value in playback.returns)
    note(f"{shown} {plural(num_steps, 'step')}; return of each game: {returns}")


def record_agent(
    run: Run,
    agent: Agent,
    steps: int,
    *,
    task: int,
    seed: int,
    should_stop: Callable[[], bool],
) -> Path | None:
    """Record a video of an agent that is being trained, and return its path; None if `should_stop` became true.

    The agent is copied, and the game is played in an environment of its own. It is the game that `record_video` would
    record of a checkpoint with these weights.
    """
    frozen_agent = copy.deepcopy(agent).to(torch.device("cpu"))
    viewer = make_viewer(run, frozen_agent, steps, task, seed, run.config.training.seed)
    playback = Playback([viewer], length=DEFAULT_OPTIONS.length)
    images = []
    for (frame,) in playback:
        if should_stop():
            return None
        images.append(frame.display_image)
    path = run.new_output_path("videos", f"{viewer.file_stem}-sampled", ".gif")
    write_video(path, images, playback.fps)
    _note_returns("the video shows", len(images), playback)
    return path


def _display_image(frame: Frame) -> np.ndarray:
    return frame.display_image
