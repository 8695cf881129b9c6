"""Record videos that show several agents side by side, optionally with their saliency maps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bestiary.evaluation.media import check_fps, check_output, write_video
from bestiary.evaluation.playback import Playback, PlaybackOptions, note_screen_differs, open_game
from bestiary.interpretability.saliency import Saliency, SaliencyOptions
from bestiary.interpretability.saliency_video import (
    SaliencyStyle,
    draw_saliency,
    full_colour_scores,
    make_saliencies,
)
from bestiary.runs.run import Run, run_labels
from bestiary.utils.console import note, progress_bar
from bestiary.utils.errors import UserError
from bestiary.utils.images import join_panels

DEFAULT_LENGTH = 2_000  # maximum number of steps of a video
DEFAULT_LENGTH_WITH_SALIENCY = 200  # shorter, because saliency maps take long to compute


@dataclass
class Panel:
    """One column of the video. It has a caption, and an image for each step."""

    caption: str
    images: list[np.ndarray]


def record_side_by_side(
    runs: Sequence[Run],
    options: PlaybackOptions | None = None,
    *,
    out: str | Path,
    overwrite: bool = False,
    same_actions: bool = False,
    saliency: bool = False,
    density: int | None = None,
    checkpoints: Sequence[int | None] = (),
) -> Path:
    """Record a video with one panel for the agent of each run, and return the path of the video.

    By default, each agent plays its own game. If a game ends early, its panel keeps showing the last image. If
    `same_actions` is True, only the agent of the first run plays; the other agents process the same observations. If
    `options` contain a recorded game, all agents process the observations of this game.

    If `saliency` is True, each panel shows the saliency map of its agent. If all panels show the same game, or if there
    is only one run, an additional first panel shows the game without saliency.

    Args:
        options: which games are played, and which steps are drawn. The field `checkpoint` is ignored. By default there
            are 2,000 steps, or 200 steps with `saliency`.
        density: distance between the centres of saliency patches, in pixels. The default is 4 for images of 84x84
            pixels, and is scaled for images of other sizes.
        checkpoints: for each run, the step count of its checkpoint, or None for the newest. If the sequence is empty,
            the newest checkpoint of each run is used.
    """
    options = options or PlaybackOptions(length=DEFAULT_LENGTH_WITH_SALIENCY if saliency else DEFAULT_LENGTH)
    check_fps(options.fps, out)
    path = check_output(out, overwrite)
    same_game = same_actions or options.replay is not None
    if same_game and not saliency:
        raise UserError("--same-actions or --replay: all panels would show the same images; add --saliency")
    playbacks = _open_playbacks(runs, options, checkpoints or [None] * len(runs), same_game)
    viewers = [viewer for playback in playbacks for viewer in playback.viewers]
    saliencies: list[Saliency] = []
    if saliency:
        saliencies = make_saliencies(viewers, SaliencyOptions(density, default_density=4.0))
        note_screen_differs(viewers)
    show_plain_game = same_game or len(runs) == 1
    labels = run_labels(runs)
    panels: list[Panel] = []
    for playback in playbacks:
        count = len(playback.viewers)
        if saliency:
            panels += _saliency_panels(playback, labels[:count], saliencies[:count], show_plain_game)
        else:
            panels.append(_plain_panel(playback, labels[0]))
        labels, saliencies = labels[count:], saliencies[count:]
    longest = max(len(panel.images) for panel in panels)
    for panel in panels:
        panel.images += [panel.images[-1]] * (longest - len(panel.images))
    captions = [panel.caption for panel in panels]
    rows = [join_panels(images, captions) for images in zip(*(panel.images for panel in panels), strict=True)]
    write_video(path, rows, options.fps or playbacks[0].fps)
    returns = ", ".join(f"{sum(playback.returns):g}" for playback in playbacks)
    note(f"the video shows {longest} steps; return of each agent that plays: {returns}")
    return path


def _open_playbacks(
    runs: Sequence[Run], options: PlaybackOptions, checkpoints: Sequence[int | None], same_game: bool
) -> list[Playback]:
    """Return one playback per run. If `same_game` is True, return a single playback with the agents of all runs."""
    playbacks: list[Playback] = []
    for run, checkpoint in zip(runs, checkpoints, strict=True):
        own_options = replace(options, checkpoint=checkpoint)
        viewer, actions = open_game(run, own_options, like=runs[0] if same_game else None)
        if playbacks and same_game:
            playbacks[0].viewers = [*playbacks[0].viewers, viewer]
        else:
            playbacks.append(
                Playback([viewer], start=options.start, length=options.length, greedy=options.greedy, actions=actions)
            )
    return playbacks


def _plain_panel(playback: Playback, label: str) -> Panel:
    frames = progress_bar(playback, "recording", playback.length)
    return Panel(label, [frame.display_image for frame, *_ in frames])


def _saliency_panels(
    playback: Playback, labels: list[str], saliencies: list[Saliency], show_plain_game: bool
) -> list[Panel]:
    """Play one game and return its panels: one panel per agent, with the agent's saliency.

    One agent plays; the other agents only process the same observations. If `show_plain_game` is True, an additional
    first panel shows the game without saliency.
    """
    style = SaliencyStyle()
    steps = []  # for each step, a list with the frame of each agent
    maps_by_step = []
    for frames in progress_bar(playback, "saliency", playback.length):
        steps.append(frames)
        maps_by_step.append(
            [saliency(f.record.inputs, f.record.state) for saliency, f in zip(saliencies, frames, strict=True)]
        )
    panels = [Panel("the game", [frames[0].display_image for frames in steps])] if show_plain_game else []
    for k, (label, saliency) in enumerate(zip(labels, saliencies, strict=True)):
        own_maps = [maps[k] for maps in maps_by_step]
        # Each agent has its own colour scale, because the logits of different agents are not comparable.
        full = full_colour_scores(own_maps, style)
        images = [
            draw_saliency(frames[k].canvas, maps, saliency, style, full)
            for frames, maps in zip(steps, own_maps, strict=True)
        ]
        panels.append(Panel(label, images))
    return panels
