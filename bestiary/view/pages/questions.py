"""Part "Questions" of the player: effects of another action, another observation or another state of the game."""

import base64
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from nicegui import events, ui

from bestiary.interpretability.game_branch import format_earlier_actions
from bestiary.interpretability.image_edits import Rectangle
from bestiary.interpretability.interventions import (
    Intervention,
    observed_size,
)
from bestiary.utils.console import format_number, printable
from bestiary.utils.errors import RunError, UserError
from bestiary.view.answers import Answer, answer_question, observed_picture
from bestiary.view.charts import bar_chart, line_chart
from bestiary.view.curves import Curve
from bestiary.view.game import WatchedGame
from bestiary.view.page_elements import add_chart, heading, section, set_chart

if TYPE_CHECKING:
    from bestiary.view.pages.player import PlayerPage

EDITS = ("erase", "blur", "move", "copy")
HORIZONS = (25, 50, 100, 200)


class Questions:
    """The elements of this part of the page."""

    def __init__(self, player: "PlayerPage"):
        assert player.game is not None
        self.player = player
        self.game: WatchedGame = player.game
        self.interface = self.game.main.interface
        self.size = observed_size(self.interface)
        self.start: tuple[float, float] | None = None  # where the user has started to draw a rectangle
        self.scale = 1.0  # pixels of the picture per pixel of the observation
        self.picture_size = (1, 1)  # width and height of the picture
        with section("Questions", classes="questions"):
            self.where = ui.label().classes("muted")
            with ui.element("div").classes("question-grid"):
                with ui.element("div"):
                    self._add_action_question()
                    self._add_label_question()
                if self.size is not None:
                    with ui.element("div"):
                        self._add_edit_question()
                with ui.element("div").classes("answer"):
                    self._add_answer()

    # --- elements ---

    def _add_action_question(self) -> None:
        names = list(self.game.action_names)
        heading("What if another action is taken?", 3)
        with ui.element("div").classes("controls"):
            self.action = ui.select(names, value=names[0], label="Action").props("dense")
            self.horizon = ui.select(list(HORIZONS), value=50, label="Steps").props("dense")
        with ui.element("div").classes("controls"):
            ui.button("Compare the games", on_click=self._ask_action).props("dense no-caps outline")
            ui.button("Go on with this action", on_click=self._take_action).props("dense no-caps flat")
        heading("What if you play?", 3)
        with ui.element("div").classes("controls"):
            self.control = ui.button("Take over", on_click=self._toggle_control).props("dense no-caps outline")
        digits = ", ".join(f"{number} {name}" for number, name in enumerate(names[:10]))
        ui.label(f"Arrow keys or W A S D; space: FIRE; Esc: hand back; digits: {digits}.").classes("muted")

    def _add_edit_question(self) -> None:
        assert self.size is not None
        height, width = self.size
        unit = "pixels" if "image" in self.interface.observation_spec else "cells"
        kinds = EDITS if unit == "pixels" else ("erase",)
        heading("What if the agent sees something else?", 3)
        self.observation = ui.interactive_image(
            on_mouse=self._on_mouse, events=["mousedown", "mousemove", "mouseup"]
        ).classes("observation")
        ui.label(f"Draw a rectangle on what the agent sees, or enter it in {unit}.").classes("muted")
        with ui.element("div").classes("controls"):
            self.edit = ui.select(list(kinds), value="erase", label="Change", on_change=self._mark).props("dense")
            values = {"x": width // 2, "y": height // 2, "width": max(1, width // 10), "height": max(1, height // 10)}
            self.fields = {
                name: ui.number(name, value=value, min=0, precision=0, on_change=self._mark)
                .props("dense")
                .classes("short")
                for name, value in values.items()
            }
            self.targets = {
                name: ui.number(f"to {name}", value=0, min=0, precision=0, on_change=self._mark)
                .props("dense")
                .classes("short")
                for name in ("x", "y")
            }
        with ui.element("div").classes("controls"):
            ui.button("Measure", on_click=self._ask_edit).props("dense no-caps outline")
            self.play_on = ui.checkbox("and compare the games")

    def _add_label_question(self) -> None:
        settable = [name for name, label in self.interface.labels.items() if label.settable]
        self.label = None
        if not settable:
            return
        heading("What if the game were different?", 3)
        with ui.element("div").classes("controls"):
            self.label = ui.select(settable, value=settable[0], label="Quantity", on_change=self._choose_label)
            self.label.props("dense")
            self.label_value = ui.number("Value", precision=0).props("dense")
            ui.button("Set and compare", on_click=self._ask_label).props("dense no-caps outline")
        self.label_note = ui.label().classes("muted")

    def _add_answer(self) -> None:
        heading("Answer", 3)
        self.answer_text = ui.label("No question was asked yet.").classes("answer-text")
        self.answer_box = ui.element("div").classes("answer-box")
        self.answer_box.set_visibility(False)
        with self.answer_box:
            self.answer_chart = add_chart(bar_chart([], []), "Action probabilities before and after the change")
            self.answer_chart.style(f"height: {60 + 40 * len(self.game.action_names)}px")
            self.answer_pictures = ui.element("div").classes("pictures")
            self.value_chart = add_chart(line_chart([], x_name="step"), "Value in both games").classes("low")
            ui.label("Command that repeats this without the browser:").classes("muted")
            self.command = ui.label().classes("command")

    # --- state of the page ---

    def show_step(self) -> None:
        """Show the observation of the step that the player shows."""
        t = self.player.shown
        self.where.text = f"Questions about step {t}."
        is_known = t in self.game.records
        if self.size is not None:
            self.observation.set_visibility(is_known)
        if not is_known:
            self.where.text += " Its observation is not in memory any more; an answer plays the game again."
        if self.size is not None and is_known:
            record = self.game.records[t][0]
            png = observed_picture(record.inputs.observation) or self.game.steps[t].png
            self.picture_size = _png_size(png)
            self.scale = self.picture_size[0] / self.size[1]
            self.observation.set_source(f"data:image/png;base64,{base64.b64encode(png).decode()}")
            self._mark()
        self._show_label()

    def show_control(self, has_control: bool) -> None:
        """Show who chooses the actions."""
        self.control.text = "Hand back to the agent" if has_control else "Take over"

    def _show_label(self) -> None:
        if self.label is None:
            return
        name = str(self.label.value)
        label = self.interface.labels[name]
        now = self.game.steps[self.player.shown].labels.get(name, 0.0)
        self.label_note.text = f"{name} is {now:g} now; possible: {label.low:g} to {label.high:g}"
        if self.label_value.value is None:
            self.label_value.value = now

    def _choose_label(self) -> None:
        self.label_value.value = None  # replaced by the present value of the quantity
        self._show_label()

    def _mark(self) -> None:
        """Draw the rectangle on the observation."""
        if self.size is None:
            return
        s = self.scale
        x, y, width, height = (float(field.value or 0) * s for field in self.fields.values())
        has_target = self.edit.value in ("move", "copy")
        for field in self.targets.values():
            field.set_visibility(has_target)
        shapes = [
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#E69F00" stroke-width="3"/>'
        ]
        if has_target:
            to_x, to_y = (float(field.value or 0) * s for field in self.targets.values())
            shapes.append(
                f'<rect x="{to_x}" y="{to_y}" width="{width}" height="{height}" fill="none" stroke="#56B4E9" '
                'stroke-width="3" stroke-dasharray="6 4"/>'
            )
        self.observation.content = "".join(shapes)

    def _on_mouse(self, event: events.MouseEventArguments) -> None:
        assert self.size is not None
        height, width = self.size
        x = min(max(event.image_x / self.scale, 0), width)
        y = min(max(event.image_y / self.scale, 0), height)
        if event.type == "mousedown":
            self.start = (x, y)
        if self.start is None:
            return
        left, top = int(min(x, self.start[0])), int(min(y, self.start[1]))
        right, bottom = int(np.ceil(max(x, self.start[0]))), int(np.ceil(max(y, self.start[1])))
        found = {"x": left, "y": top, "width": max(1, right - left), "height": max(1, bottom - top)}
        for name, value in found.items():
            self.fields[name].value = value
        if event.type == "mouseup":
            self.start = None

    # --- questions ---

    async def _toggle_control(self) -> None:
        keyboard = self.player.keyboard
        assert keyboard is not None
        if keyboard.has_control:
            keyboard.hand_back()
        else:
            await keyboard.take_over()

    async def _take_action(self) -> None:
        """Continue the game with the chosen action."""
        action = str(self.action.value)
        if await self.player.rewind(self.player.shown) and await self.player.guarded(
            partial(self.game.advance, action)
        ):
            await self.player.show(len(self.game.steps) - 1)

    async def _ask_action(self) -> None:
        await self._ask([Intervention("action", action=str(self.action.value))], int(self.horizon.value))

    async def _ask_edit(self) -> None:
        x, y, width, height = (int(field.value or 0) for field in self.fields.values())
        to_x, to_y = (int(field.value or 0) for field in self.targets.values())
        kind = str(self.edit.value)
        target = (to_x, to_y) if kind in ("move", "copy") else None
        horizon = int(self.horizon.value) if self.play_on.value else 0
        await self._ask([Intervention(kind, Rectangle(x, y, width, height), target)], horizon)

    async def _ask_label(self) -> None:
        assert self.label is not None
        one = Intervention("set", label=str(self.label.value), value=float(self.label_value.value or 0))
        await self._ask([one], int(self.horizon.value))

    async def _ask(self, interventions: list[Intervention], horizon: int) -> None:
        """Compute and show the answer for the step that is shown."""
        t, overlays = self.player.shown, self.player.overlays
        assert overlays is not None
        self.player.is_playing = False
        self.answer_text.text = "The answer is computed ..."

        def saliency(step: int) -> Any:
            return overlays.saliency_maps(step), overlays.saliencies[0].density

        uses_saliency = "image" in self.interface.observation_spec
        try:
            answer = await self.player.compute(
                lambda: answer_question(self.game, t, interventions, horizon, saliency if uses_saliency else None)
            )
        except (UserError, RunError) as error:
            self.answer_box.set_visibility(False)
            self.answer_text.text = printable(str(error))
            return
        self._show_answer(t, interventions, horizon, answer)

    def _show_answer(self, t: int, interventions: list[Intervention], horizon: int, answer: Answer) -> None:
        effect, names = answer.effect, self.game.action_names
        before, after = names[int(effect.before.argmax())], names[int(effect.after.argmax())]
        same = f"stays {before}" if before == after else f"changes from {before} to {after}"
        texts = [
            f"Step {t}: the most probable action {same}.",
            f"The value changes from {format_number(effect.value_before)} to {format_number(effect.value_after)}.",
            f"KL divergence of the policy: {format_number(effect.kl)} nats.",
        ]
        is_action = all(one.kind == "action" for one in interventions)
        if is_action:
            texts = [f"Step {t}: the action {interventions[0].action} is taken instead of {self.game.steps[t].choice}."]
        elif not np.isclose(effect.value_before, self.game.steps[t].agents[0].value):
            texts.append("Both values are measured on a screen that is drawn again, without and with the change.")
        if answer.saliency is not None:
            policy, value = map(format_number, answer.saliency)
            texts.append(
                f"Measured effect: policy {format_number(effect.policy_score)}, value "
                f"{format_number(effect.value_score)}; highest saliency in the rectangle: policy {policy}, value "
                f"{value} (in the same units: half the squared change of the logits and of the value)."
            )
        if answer.as_played is not None and answer.changed is not None:
            changed, as_played = answer.changed.game_return, answer.as_played.game_return
            found = f"is {format_number(changed)} instead of" if changed != as_played else "stays"
            steps = len(answer.changed.rewards)
            texts.append(f"In the next {steps} steps, the return {found} {format_number(as_played)}.")
        self.answer_text.text = " ".join(texts)
        self.answer_box.set_visibility(True)
        # Another action does not change the output of the agent at this step.
        self.answer_chart.set_visibility(not is_action)
        self.answer_pictures.set_visibility(not is_action)
        if not is_action:
            probabilities = [effect.before.tolist(), effect.after.tolist()]
            set_chart(self.answer_chart, bar_chart(names, probabilities, ["before", "after"]))
            self._show_pictures(t, answer)
        self._show_continuations(t, answer)
        self.command.text = self.command_line(t, interventions, horizon)

    def _show_pictures(self, t: int, answer: Answer) -> None:
        self.answer_pictures.clear()
        overlays = self.player.overlays
        if answer.picture is None or overlays is None:
            return
        pictures = [("changed", answer.picture)]
        if answer.saliency is not None:
            pictures.append(("saliency (policy orange, value blue)", overlays.picture("saliency: both", t)))
        with self.answer_pictures:
            for caption, png in pictures:
                with ui.element("figure"):
                    image = ui.image(f"data:image/png;base64,{base64.b64encode(png).decode()}")
                    image.classes("picture small").props("no-spinner no-transition fit=contain")
                    image.props["alt"] = caption
                    with ui.element("figcaption"):
                        ui.label(caption)

    def _show_continuations(self, t: int, answer: Answer) -> None:
        self.value_chart.set_visibility(answer.changed is not None)
        curves = [
            Curve(name, t + np.arange(len(game.values), dtype=float), np.array(game.values))
            for name, game in (("as before", answer.as_played), ("changed", answer.changed))
            if game is not None
        ]
        options = line_chart(curves, x_name="step")
        options["title"] = {"text": "Value", "left": 4, "top": 0, "textStyle": {"fontSize": 12}}
        options["legend"]["left"] = 60
        set_chart(self.value_chart, options)

    def command_line(self, t: int, interventions: list[Intervention], horizon: int) -> str:
        """Return the `bestiary intervene` command with the same game and interventions."""
        setup = self.game.setup
        words = ["bestiary", "intervene", f"zoo/{setup.run.name}" if setup.run.in_zoo else str(setup.run.path)]
        options = setup.options
        if options.checkpoint is not None:
            words += ["--checkpoint", str(options.checkpoint)]
        if options.env is not None:
            words += ["--env", options.env]
        words += ["--levels", self.player.query.levels] if self.player.query.levels else []
        if options.replay is not None:
            words += ["--replay", str(options.replay[0].path), "--game", str(self.player.query.game)]
        else:
            words += ["--greedy"] if options.greedy else []
            words += ["--seed", str(options.seed)]
        words += ["--step", str(t)]
        changes = self.game.changed_actions(t)
        words += ["--earlier-actions", format_earlier_actions(changes)] if changes else []
        words += [word for one in interventions for word in one.option.split(" ", 1)]
        words += ["--continue", str(horizon)] if horizon else []
        return printable(shlex.join(words))


def _png_size(png: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a PNG file."""
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
