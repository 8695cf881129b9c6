"""The output of the agents in the player: action probabilities, rewards, and curves of values and state norms."""

from collections.abc import Callable
from typing import Any

import numpy as np
from nicegui import ui

from bestiary.utils.console import format_number, printable
from bestiary.view.charts import DOWN_TRIANGLE, PALETTE, UP_TRIANGLE, Dots, bar_chart, line_chart
from bestiary.view.curves import Curve
from bestiary.view.game import WatchedGame
from bestiary.view.page_elements import add_chart, heading, set_chart


class StepOutput:
    """The action probabilities, the values and the rewards at one step."""

    def __init__(self, game: WatchedGame, names: list[str]):
        """Add the elements to the page. `names` are the names of the agents."""
        self.game = game
        self.names = names
        heading("Action probabilities")
        agents = [[0.0] * len(game.action_names)] * len(names)
        self.probabilities = add_chart(bar_chart(game.action_names, agents, names), "Action probabilities")
        self.probabilities.style(f"height: {60 + 22 * len(game.action_names) * len(names)}px; max-height: 420px")
        self.output = ui.label().classes("output")
        heading("Rewards", 3)
        self.rewards = ui.element("div").classes("reward-table")
        self.reward_labels: dict[str, tuple[ui.label, ui.label]] = {}
        with self.rewards:
            for text in ("", "at this step", "game so far"):
                ui.label(text).classes("muted")

    def draw(self, t: int) -> None:
        """Show step t."""
        game, step = self.game, self.game.steps[t]
        set_chart(
            self.probabilities, bar_chart(game.action_names, [agent.probabilities for agent in step.agents], self.names)
        )
        texts = [f"value {format_number(agent.value)}" for agent in step.agents]
        taken = step.action or step.choice
        choice = f" (the agent chose {step.choice})" if taken != step.choice else ""
        self.output.text = f"action {taken}{choice} · {' / '.join(texts)}"
        for name, (now, total) in self._measure_sums(t).items():
            if name not in self.reward_labels:
                with self.rewards:
                    ui.label(name)
                    self.reward_labels[name] = (ui.label().classes("number"), ui.label().classes("number"))
            self.reward_labels[name][0].text = now
            self.reward_labels[name][1].text = total

    def _measure_sums(self, t: int) -> dict[str, tuple[str, str]]:
        """Return {name: (at step t, sum of steps 1 to t)} of the reward and its components.

        The reward "at step t" is the one with which the environment reached step t. At the end of a game, it is the
        reward of the last action.
        """
        steps = self.game.steps[: t + 1]
        is_end = self.game.is_over and t == len(self.game.steps) - 1
        rewards = [step.reward or 0.0 for step in (steps if is_end else steps[:-1])]
        sums = {"reward": (format_number(rewards[-1] if rewards else 0.0), format_number(sum(rewards)))}
        for name in steps[-1].measures:
            values = [step.measures.get(name, 0.0) for step in steps[1:]]
            sums[printable(name)] = (format_number(values[-1] if values else 0.0), format_number(sum(values)))
        return sums


class GameCurves:
    """The values of the agents at all steps of the game and, for agents with memory, the norms of their states."""

    def __init__(self, game: WatchedGame, names: list[str], on_click: Callable[[Any], Any]):
        """Add the elements to the page. `names` are the names of the agents.

        `on_click` is called with the event of a click on the curves of the values.
        """
        self.game = game
        self.names = names
        self.value_chart = add_chart(line_chart([], x_name="step"), "Value at each step")
        self.value_chart.on("click", on_click, ["offsetX", "offsetY"])
        self.norm_chart = None
        if game.steps[0].agents[0].state_norm is not None:
            heading("Norm of the recurrent state", 3)
            self.norm_chart = add_chart(line_chart([], x_name="step"), "Norm of the recurrent state").classes("low")
        ui.label("Triangles are steps with a positive (up) or negative (down) reward. A click shows the step.").classes(
            "muted"
        )

    def draw(self, t: int) -> None:
        """Draw the curves of all steps, with a mark at step t."""
        steps = self.game.steps
        x = np.arange(len(steps), dtype=float)
        values = np.array([[agent.value for agent in step.agents] for step in steps])
        rewards = np.array([0.0, *(step.reward or 0.0 for step in steps[:-1])])
        dots = [
            Dots(name, x[rows], values[rows, 0], colour, 11, symbol)
            for name, rows, colour, symbol in (
                ("positive reward", rewards > 0, PALETTE[2], UP_TRIANGLE),
                ("negative reward", rewards < 0, PALETTE[3], DOWN_TRIANGLE),
            )
            if rows.any()
        ]
        curves = [Curve(name, x, values[:, k]) for k, name in enumerate(self.names)]
        marks = [(float(t), str(t))]
        options = line_chart(curves, x_name="step", marks=marks, dots=dots)
        set_chart(self.value_chart, options)
        if self.norm_chart is not None:
            norms = np.array([[agent.state_norm or 0.0 for agent in step.agents] for step in steps])
            curves = [Curve(name, x, norms[:, k]) for k, name in enumerate(self.names)]
            set_chart(self.norm_chart, line_chart(curves, x_name="step", marks=marks))
