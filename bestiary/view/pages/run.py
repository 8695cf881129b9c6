"""Page "Run": curves, checkpoints, evaluations, videos and the configuration of one run."""

from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import events, ui

from bestiary.evaluation.run_outputs import EVALUATION_COLUMNS, evaluation_rows
from bestiary.runs.config_changes import FILE_NAME as CHANGES_FILE
from bestiary.runs.csv_tables import read_rows
from bestiary.utils.console import format_count, format_duration, format_number, printable
from bestiary.utils.errors import UserError
from bestiary.utils.html import MIME_TYPES
from bestiary.view import run_data
from bestiary.view.catalogue import Catalogue
from bestiary.view.charts import Dots, line_chart
from bestiary.view.curves import X_AXES, option_text, read_curve
from bestiary.view.page_elements import (
    add_chart,
    clicked_x,
    page_frame,
    page_url,
    section,
    set_chart,
    table_rows,
    text_table,
)

REFRESH_SECONDS = 1.5
SLOW_REFRESH_SECONDS = 10.0  # for checkpoints, evaluations and videos
MEDIA_FOLDERS = ("videos", "interpretability")
MAX_MEDIA = 12  # maximum number of images and videos on the page
SMALL_POINTS = 240  # maximum number of points of a curve in a small chart


def run_page(catalogue: Catalogue, key: str) -> None:
    """Build the page."""
    with page_frame(key, (key, page_url("run", run=key))):
        RunPage(catalogue, key)


class RunPage:
    """The elements of the page of one browser tab."""

    def __init__(self, catalogue: Catalogue, key: str):
        self.catalogue = catalogue
        self.key = key
        self.run = catalogue.run(key)
        self.drawn: Any = None
        self.charts: dict[str, tuple[ui.echart, list[str]]] = {}  # title -> chart and its columns
        self.dot_rows: dict[int, np.ndarray] = {}  # for each chart of returns, the rows of its dots in episodes.csv
        self.has_opened_game = False  # whether the last click has opened a recorded game
        self.return_charts: list[tuple[ui.echart, str]] = []  # charts of returns, and their columns of metrics.csv
        with section(key) as box:
            box.props('aria-label="Summary"')
            self.facts = ui.element("div").classes("facts")
            with ui.element("div").classes("controls"):
                ui.link("Open in the player", page_url("player", run=key)).classes("strong-link")
        with section("Returns"):
            with ui.element("div").classes("controls"):
                self.x_axis = ui.select(list(X_AXES), value="steps", label="x axis").props("dense")
                with ui.element("label").classes("slider-label"):
                    ui.label("Smoothing").classes("muted")
                    self.smoothing = ui.slider(min=0, max=0.98, step=0.02, value=0).props('aria-label="Smoothing"')
                self.show_games = ui.checkbox("Single games", value=True)
                self.log_y = ui.checkbox("Logarithmic y")
            self.returns_box = ui.element("div").classes("chart-grid returns")
            ui.label(
                "A click on a chart opens the nearest checkpoint in the player. A click on the dot of a recorded game "
                "opens this game."
            ).classes("muted")
            self.alert_note = ui.label().classes("warning")
        with section("Training"):
            self.chart_box = ui.element("div").classes("chart-grid")
            with ui.element("div").classes("controls"):
                self.other = ui.select([], label="Other metrics", multiple=True).props("dense use-chips")
            self.other_box = ui.element("div").classes("chart-grid")
        with section("Checkpoints"):
            self.checkpoints = text_table(["steps", "names"], [], empty="The run has no checkpoint yet.")
        self.evaluation_box = ui.element("section").classes("box")
        self.media_box = ui.element("section").classes("box")
        self._add_config()
        for element in (self.x_axis, self.smoothing, self.show_games, self.log_y):
            element.on_value_change(self.update_charts)
        self.other.on_value_change(self._choose_other)
        self.update_facts()
        self.update_charts()
        self.update_files()
        ui.timer(REFRESH_SECONDS, self.refresh)
        ui.timer(SLOW_REFRESH_SECONDS, self.update_files)

    def refresh(self) -> None:
        """Show the newest rows of the tables."""
        if self.key in self.catalogue.runs:
            self.update_facts()
            self.update_charts()

    # --- facts ---

    def update_facts(self) -> None:
        """Show the state of the run, if it has changed."""
        run = self.catalogue.summary(self.key)
        metrics = self.catalogue.metrics(self.key)
        seconds = float(metrics["seconds"][-1]) if "seconds" in metrics and metrics.num_rows else 0.0
        facts = {
            "state": run.state,
            "environment": run.envs,
            "seed": run.seed,
            "steps": f"{format_count(run.steps)} of {format_count(run.total_steps)}",
            "return": run.returns,
            "steps/s": "" if run.rate is None else format_number(round(run.rate)),
            "training time": format_duration(seconds) if seconds else "",
        }
        if run.is_running and run.rate:
            facts["time left"] = format_duration((run.total_steps - run.steps) / run.rate)
        if facts == getattr(self, "shown_facts", None):
            return
        self.shown_facts = facts
        self.facts.clear()
        with self.facts:
            for name, value in facts.items():
                if value:
                    with ui.element("div").classes("fact"):
                        ui.label(name).classes("fact-name")
                        label = ui.label(value).classes("fact-value")
                        if name == "state":
                            label.classes(f"state state-{value.split(':')[0].split(' ')[0]}")

    # --- charts ---

    def _make_charts(self, names: list[str]) -> None:
        """Add the charts of columns that have appeared in metrics.csv."""
        known = [column for _, column in self.return_charts]
        for column in run_data.task_columns(names, "return"):
            if column not in known:
                with self.returns_box:
                    chart = add_chart(line_chart([], x_name=""), f"{column} over the training")
                    chart.on("click", lambda e, c=chart: self._open_nearest(c, e), ["offsetX", "offsetY"])
                    chart.on_point_click(lambda e, k=len(self.return_charts): self._open_game(k, e))
                self.return_charts.append((chart, column))
        true_columns = run_data.true_return_columns(names)
        charts = [("Training and true return", true_columns)] if true_columns else []
        for title, columns in [*charts, *run_data.existing_charts(names)]:
            if title not in self.charts:
                with self.returns_box if true_columns == columns else self.chart_box:
                    self.charts[title] = (add_chart(line_chart([], x_name=""), title), columns)
            self.charts[title] = (self.charts[title][0], columns)
        others = run_data.other_columns(names)
        if others != self.other.options:
            self.other.set_options(others)

    def _choose_other(self) -> None:
        chosen = list(self.other.value or [])
        for title in [title for title in self.charts if title.startswith("other: ")]:
            if title.removeprefix("other: ") not in chosen:
                self.charts.pop(title)[0].delete()
        for name in chosen:
            if f"other: {name}" not in self.charts:
                with self.other_box:
                    self.charts[f"other: {name}"] = (add_chart(line_chart([], x_name=""), name), [name])
        self.update_charts()

    def update_charts(self) -> None:
        """Draw the curves, if the tables or the choices have changed."""
        metrics = self.catalogue.metrics(self.key)
        episodes = self.catalogue.table(self.run.path / "episodes.csv", self.run.path)
        choices = [element.value for element in (self.x_axis, self.smoothing, self.show_games, self.log_y)]
        shown = (metrics.version, episodes.version, choices, list(self.charts))
        if shown == self.drawn:
            return
        names = metrics.number_names
        self._make_charts(names)
        self.drawn = (metrics.version, episodes.version, choices, list(self.charts))
        for number, (chart, column) in enumerate(self.return_charts):
            self._draw_returns(number, chart, column, metrics, episodes)
        alerts = run_data.alert_steps(metrics, names)
        for title, (chart, columns) in self.charts.items():
            is_returns = title == "Training and true return"
            curves = [read_curve(metrics, c, self.x_axis.value, self.smoothing.value, c) for c in columns]
            marks = [(step, "alert") for step in alerts] if is_returns and self.x_axis.value == "steps" else []
            options = line_chart(curves, x_name=self.x_axis.value, marks=marks, max_points=SMALL_POINTS)
            options["title"] = chart_title(title.removeprefix("other: "))
            options["grid"]["top"] = 56 if len(curves) > 1 else 34
            options["legend"]["top"] = 22
            set_chart(chart, options)
        if alerts:
            text = ", ".join(format_count(step) for step in alerts[:5])
            self.alert_note.text = (
                f"The reward-hacking monitor raised alerts at step {text}{' ...' if len(alerts) > 5 else ''}: the "
                "training return rose while the true return fell."
            )

    def _draw_returns(self, number: int, chart: ui.echart, column: str, metrics: Any, episodes: Any) -> None:
        task = column.rpartition("/")[0] or None
        dots = []
        if self.show_games.value and self.x_axis.value == "steps":
            steps, returns, self.dot_rows[number] = run_data.game_dots(episodes, task)
            dots = [Dots("one game", steps, returns)]
        curve = read_curve(metrics, column, self.x_axis.value, self.smoothing.value, "mean of 100 games")
        options = line_chart([curve], x_name=self.x_axis.value, log_y=self.log_y.value, dots=dots)
        options["title"] = chart_title(column)
        options["grid"]["top"] = 56
        options["legend"]["top"] = 22
        set_chart(chart, options)

    # --- links to the player ---

    async def _open_nearest(self, chart: ui.echart, event: events.GenericEventArguments) -> None:
        """Open the checkpoint that is nearest to the place of a click, unless the click has opened a recorded game."""
        x = await clicked_x(chart, event)
        if self.has_opened_game:
            self.has_opened_game = False
        elif x is not None:
            self._open_player(self._to_steps(x))

    def _to_steps(self, x: float) -> float:
        metrics = self.catalogue.metrics(self.key)
        column = X_AXES[self.x_axis.value]
        values = metrics[column] / 60 if self.x_axis.value == "minutes" else metrics[column]
        return float(np.interp(x, values, metrics["step"]))

    def _open_game(self, number: int, event: events.EChartPointClickEventArguments) -> None:
        """Open the recorded game of a dot, if there is one."""
        if event.series_type != "scatter" or event.data_index is None:
            return
        episodes = self.catalogue.table(self.run.path / "episodes.csv", self.run.path)
        rows = self.dot_rows[number]
        if event.data_index >= len(rows):
            return
        row = rows[event.data_index]
        game = run_data.find_recorded_game(
            run_data.recorded_games(self.run),
            float(episodes["game_length"][row]),
            float(episodes["game_return"][row]),
            float(episodes["step"][row]) / max(1.0, float(episodes["step"][-1])),
        )
        if game is not None:
            self.has_opened_game = True
            self._open_player(float(episodes["step"][row]), recording=game.recording, game=game.number)

    def _open_player(self, step: float, **parameters: object) -> None:
        checkpoint = run_data.nearest_checkpoint(self.run, step)
        if checkpoint is None:
            ui.notify("The run has no checkpoint yet.")
        else:
            ui.navigate.to(page_url("player", run=self.key, checkpoint=checkpoint, **parameters))

    # --- files ---

    def update_files(self) -> None:
        """Show the checkpoints, evaluations and videos, if they have changed."""
        try:
            saved = run_data.checkpoint_rows(self.run)
            evaluations = [[printable(cell) for cell in row] for row in evaluation_rows(self.run)]
            media = run_data.media_files(self.run, MEDIA_FOLDERS, tuple(MIME_TYPES), MAX_MEDIA)
        except OSError:  # a file was removed at this moment
            return
        if (saved, evaluations, media) == getattr(self, "shown_files", None):
            return
        self.shown_files = (saved, evaluations, media)
        urls = [page_url("player", run=self.key, checkpoint=row[0].replace(",", "")) for row in saved]
        self.checkpoints.rows = table_rows(saved, list(urls))
        self.evaluation_box.set_visibility(bool(evaluations))
        self.evaluation_box.clear()
        with self.evaluation_box, section("Evaluations", classes="inner"):
            text_table(EVALUATION_COLUMNS, evaluations)
        self.media_box.set_visibility(bool(media))
        self.media_box.clear()
        with self.media_box, section("Videos and figures", classes="inner"), ui.element("div").classes("media"):
            for folder, path in media:
                self._add_media(folder, path.name)

    def _add_media(self, folder: str, name: str) -> None:
        url = f"/media?{urlencode({'run': self.key, 'folder': folder, 'file': name})}"
        with ui.element("figure"):
            is_video = name.endswith(".mp4")
            element = ui.element("video" if is_video else "img")
            element.props["src"] = url
            if is_video:
                element.props("controls loop muted playsinline")
            else:
                element.props["alt"] = printable(name)
                element.props("loading=lazy")
            with ui.element("figcaption"):
                ui.label(printable(name))

    # --- configuration ---

    def _add_config(self) -> None:
        with section("Configuration"):
            search = ui.input(label="Search options").props("dense clearable")
            options = self.catalogue.options(self.key)
            origins = run_data.read_origins(self.run)
            rows = [
                [printable(name), printable(option_text(value)), printable(origins.get(name, ""))]
                for name, value in options.items()
            ]
            columns = ["option", "value", "origin"] if origins else ["option", "value"]
            table = text_table(columns, [row[: len(columns)] for row in rows], wrap=True)
            table.props["pagination"] = {"rowsPerPage": 20}
            table.props("hide-pagination=false")
            search.bind_value_to(table, "filter", forward=lambda text: text or "")
            if not origins:
                ui.label("The run folder does not state the origin of the values.").classes("muted")
            for change in self._config_changes():
                ui.label(change).classes("muted")

    def _config_changes(self) -> list[str]:
        try:
            rows = read_rows(self.run.path / CHANGES_FILE)
        except UserError:
            return []
        return [
            printable(
                f"from step {row.get('step', '')} on: {row.get('option')} = {row.get('new')} (before: {row.get('old')})"
            )
            for row in rows
        ]


def chart_title(text: str) -> dict[str, Any]:
    """Return the options of the title of a small chart."""
    return {"text": text, "left": 4, "top": 0, "textStyle": {"fontSize": 13, "fontWeight": 600}}
