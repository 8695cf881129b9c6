"""Answers to the questions of the player: the effect of interventions on the agent's output and on the game."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.evaluation.playback import newest_frame
from bestiary.interpretability.game_branch import Continuation
from bestiary.interpretability.image_edits import Rectangle
from bestiary.interpretability.interventions import (
    Effect,
    Intervention,
    apply_to_inputs,
    check_interventions,
    measure_effect,
)
from bestiary.view.game import WatchedGame, encode_png

MIN_PICTURE = 320  # width in pixels to which small observations are enlarged


@dataclass
class Answer:
    """The effect of interventions at one step, and how the game goes on without and with them."""

    effect: Effect
    picture: bytes | None  # the changed observation, or the redrawn screen
    saliency: tuple[float, float] | None  # highest saliency of policy and value inside the rectangle
    as_played: Continuation | None = None
    changed: Continuation | None = None


def answer_question(
    game: WatchedGame, t: int, interventions: list[Intervention], horizon: int, saliency: Any
) -> Answer:
    """Apply interventions at step `t` and measure their effect.

    Args:
        horizon: number of steps for which the game is continued, once without and once with the interventions. 0: only
            the effect on the agent's output is measured.
        saliency: function of a step that returns its saliency maps and the distance of their patches, or None.
    """
    record = game.records_at(t)[0]
    agent, interface = game.main.viewer.agent, game.main.interface
    check_interventions(interventions, interface)
    needs_game = any(not one.changes_observation for one in interventions)
    changed_inputs = apply_to_inputs(interventions, record.inputs, interface)
    effect = measure_effect(agent, record.inputs, changed_inputs, record.state)
    picture = observed_picture(changed_inputs.observation)
    as_played = changed = None
    if needs_game or horizon:
        settable = any(one.kind == "set" for one in interventions)
        branch = game.branch_at(t, settable)
        try:
            effect = branch.intervene(interventions)
            if settable:
                picture = encode_png(branch.screen)
            changed = branch.play_on(horizon) if horizon else None
        finally:
            branch.close()
        if horizon:
            branch = game.branch_at(t)
            try:
                as_played = branch.play_on(horizon)
            finally:
                branch.close()
    rectangle = next((one.rectangle for one in interventions if one.rectangle is not None), None)
    inside = None
    if rectangle is not None and saliency is not None:
        maps, density = saliency(t)
        inside = saliency_inside(maps, density, rectangle)
    return Answer(effect, picture, inside, as_played, changed)


def saliency_inside(maps: Any, density: int, rectangle: Rectangle) -> tuple[float, float]:
    """Return the highest saliency of the policy and of the value among the patches centred inside a rectangle.

    If no patch is centred inside, the patch nearest to the centre of the rectangle is used.
    """
    height, width = maps.policy.shape
    rows, columns = np.arange(height) * density, np.arange(width) * density
    row_inside = (rows >= rectangle.y) & (rows < rectangle.y + rectangle.height)
    column_inside = (columns >= rectangle.x) & (columns < rectangle.x + rectangle.width)
    if not row_inside.any():
        row_inside[np.argmin(np.abs(rows - rectangle.y - rectangle.height / 2))] = True
    if not column_inside.any():
        column_inside[np.argmin(np.abs(columns - rectangle.x - rectangle.width / 2))] = True
    inside = np.ix_(row_inside, column_inside)
    return float(maps.policy[inside].max()), float(maps.value[inside].max())


def observed_picture(observation: Any) -> bytes | None:
    """Return the newest frame of an observed image [1,1,C,H,W] as a PNG file, or None without an image."""
    if "image" not in observation:
        return None
    frame = newest_frame(observation["image"][0, 0].numpy().astype(np.uint8))
    scale = max(1, round(MIN_PICTURE / frame.shape[1]))
    return encode_png(np.repeat(np.repeat(frame, scale, axis=0), scale, axis=1))
