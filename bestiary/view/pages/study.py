"""Page "Study": progress, learning curves and results of a study."""

from typing import Any

from nicegui import ui

from bestiary.utils.console import format_count
from bestiary.view.catalogue import Catalogue
from bestiary.view.charts import line_chart
from bestiary.view.curves import X_AXES, Curve, band, read_curve
from bestiary.view.page_elements import add_chart, page_frame, page_url, section, set_chart, table_rows, text_table
from bestiary.view.study_data import TrialRow, read_trials, result_tables, variant_rows

REFRESH_SECONDS = 2.0
SLOW_REFRESH_SECONDS = 10.0
STATISTICS = ["variant", "metric", "runs", "mean", "95% interval", "lowest", "highest"]


def study_page(catalogue: Catalogue, key: str) -> None:
    """Build the page."""
    with page_frame(key, (key, page_url("study", study=key))):
        StudyPage(catalogue, key)


class StudyPage:
    """The elements of the page of one browser tab."""

    def __init__(self, catalogue: Catalogue, key: str):
        self.catalogue = catalogue
        self.key = key
        self.trials: list[TrialRow] = []
        self.drawn: Any = None
        with section(key):
            self.progress_text = ui.label()
            self.progress = ui.linear_progress(value=0, show_value=False).props('aria-label="Progress"')
            self.problem = ui.label().classes("warning")
        with section("Learning curves"):
            with ui.element("div").classes("controls"):
                self.metric = ui.select(["return"], value="return", label="Metric", with_input=True).props("dense")
                self.x_axis = ui.select(list(X_AXES), value="steps", label="x axis").props("dense")
                with ui.element("label").classes("slider-label"):
                    ui.label("Smoothing").classes("muted")
                    self.smoothing = ui.slider(min=0, max=0.98, step=0.02, value=0).props('aria-label="Smoothing"')
            self.chart = add_chart(line_chart([], x_name="steps"), "Learning curves of the variants")
            ui.label(
                "Each curve is the mean over the seeds of a variant; its band is from the lowest to the highest seed."
            ).classes("muted")
        with section("Newest returns"):
            self.statistics = text_table(STATISTICS, [], wrap=True)
            ui.label(
                "The return of a run is the mean of its last 100 games. The 95% interval is that of the mean over runs "
                "(Student's t). Until the study ends, runs may have different numbers of steps."
            ).classes("muted")
        self.result_box = ui.element("div").classes("results")
        with section("Trials"):
            self.table = text_table(["trial", "state", "steps", "return"], [], wrap=True)
        for element in (self.metric, self.x_axis, self.smoothing):
            element.on_value_change(self.update_chart)
        self.refresh()
        self.update_results()
        ui.timer(REFRESH_SECONDS, self.refresh)
        ui.timer(SLOW_REFRESH_SECONDS, self.update_results)

    def refresh(self) -> None:
        """Show the newest state of the trials."""
        self.catalogue.refresh()
        if self.key not in self.catalogue.studies:
            return
        self.trials, problem = read_trials(self.catalogue, self.key)
        self.problem.text = problem
        runs = [trial.run for trial in self.trials if trial.run is not None]
        finished = sum(run.state == "finished" for run in runs)
        total = max(1, len(self.trials))
        shares = [min(1.0, run.steps / run.total_steps) if run.total_steps else 0.0 for run in runs]
        self.progress.value = sum(shares) / total
        running = sum(run.is_running for run in runs)
        failed = sum(trial.state.startswith("failed") for trial in self.trials)
        texts = [f"{finished} of {len(self.trials)} trials are finished", f"{running} running"]
        texts += [f"{failed} failed"] if failed else []
        self.progress_text.text = ", ".join(texts)
        rows = [
            [
                trial.name,
                trial.state,
                f"{format_count(trial.run.steps)} of {format_count(trial.run.total_steps)}" if trial.run else "",
                trial.run.returns if trial.run else "",
            ]
            for trial in self.trials
        ]
        urls = [page_url("run", run=trial.run.key) if trial.run else None for trial in self.trials]
        self.table.rows = table_rows(rows, urls)
        self.statistics.rows = table_rows(variant_rows(self.catalogue, self.trials))
        self.update_chart()

    def update_chart(self) -> None:
        """Draw the learning curves, if they have changed."""
        tables = {t.run.key: self.catalogue.metrics(t.run.key) for t in self.trials if t.run is not None}
        names = list(dict.fromkeys(name for table in tables.values() for name in table.number_names))
        metrics = [name for name in names if name not in X_AXES.values()] or ["return"]
        if metrics != self.metric.options:
            returns = [name for name in metrics if name == "return" or name.endswith("/return")]
            self.metric.set_options(
                metrics, value=self.metric.value if self.metric.value in metrics else (returns or metrics)[0]
            )
        choices = [element.value for element in (self.metric, self.x_axis, self.smoothing)]
        shown = (choices, {key: table.version for key, table in tables.items()})
        if shown == self.drawn:
            return
        self.drawn = shown
        metric, x_axis, smoothing = choices
        curves: list[Curve] = []
        for variant in dict.fromkeys(trial.variant for trial in self.trials):
            members = [t.run.key for t in self.trials if t.variant == variant and t.run is not None]
            curves.append(band([read_curve(tables[key], metric, x_axis, smoothing) for key in members], variant))
        drawn = [curve for curve in curves if len(curve.x)]
        set_chart(self.chart, line_chart(drawn, x_name=x_axis, y_name=metric))

    def update_results(self) -> None:
        """Show the tables that `bestiary study` has written, if they have changed."""
        tables = result_tables(self.catalogue.studies[self.key])
        if tables == getattr(self, "shown_results", None):
            return
        self.shown_results = tables
        self.result_box.clear()
        with self.result_box:
            for name, columns, rows in tables:
                with section(f"Results of the study ({name})"):
                    text_table(columns, rows, wrap=True)
