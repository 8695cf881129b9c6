"""Page "Runs": the table of all runs, and the learning curves and differences of the selected runs."""

import time
from typing import Any

import numpy as np
from nicegui import events, ui

from bestiary.utils.console import format_count, format_number
from bestiary.view.catalogue import Catalogue, RunSummary
from bestiary.view.charts import line_chart
from bestiary.view.curves import X_AXES, Curve, band, differing_options, group_by_config, read_curve
from bestiary.view.page_elements import (
    add_chart,
    heading,
    page_frame,
    page_url,
    section,
    set_chart,
    table_rows,
    text_table,
)

REFRESH_SECONDS = 1.5
MAX_SELECTED = 24  # maximum number of runs that are selected and drawn at once
FIRST_SELECTED = 4  # maximum number of runs that are selected when the page opens
COLUMNS = (
    # name, label, alignment
    ("name", "run", "left"),
    ("envs", "environment", "left"),
    ("seed", "seed", "right"),
    ("state", "state", "left"),
    ("steps", "steps", "right"),
    ("rate", "steps/s", "right"),
    ("returns", "return", "right"),
    ("age", "changed", "right"),
)
WIDE_COLUMNS = ("envs", "seed", "rate", "age")  # columns that are hidden on a phone
NAME_CELL = '<q-td :props="props"><a :href="props.row.url">{{ props.row.name }}</a></q-td>'
STATE_CELL = """
<q-td :props="props"><span :class="'state state-' + props.row.state_class">{{ props.row.state }}</span></q-td>
"""
TEXT_CELL = '<q-td :props="props" class="only-wide">{{ props.row.%s }}</q-td>'
# Columns that are sorted by a number and shown as text.
NUMBER_CELL = '<q-td :props="props" class="%s">{{ props.row.%s_text }}</q-td>'


def table_row(run: RunSummary, now: float) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "key": run.key,
        "url": page_url("run", run=run.key),
        "name": run.key,
        "envs": run.envs,
        "seed": run.seed,
        "state": run.state,
        "state_class": run.state.split(":")[0].split(" ")[0],
        "steps": run.steps,
        "steps_text": f"{format_count(run.steps)} of {format_count(run.total_steps)}",
        "rate": run.rate,
        "rate_text": "" if run.rate is None else format_number(round(run.rate)),
        "returns": run.sort_return,
        "returns_text": run.returns,
        "age": -run.changed // 60,
        "age_text": format_age(now - run.changed) if run.changed else "",
    }


def format_age(seconds: float) -> str:
    """Return a duration as text, in one unit: "just now", "5 min ago", "3 h ago" or "2 d ago"."""
    if seconds < 60:
        return "just now"
    for size, unit in ((86_400, "d"), (3_600, "h")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 60:.0f} min ago"


def runs_page(catalogue: Catalogue) -> None:
    """Build the page."""
    with page_frame("Runs"):
        RunsPage(catalogue)


class RunsPage:
    """The elements of the page and the selection of one browser tab."""

    def __init__(self, catalogue: Catalogue):
        self.catalogue = catalogue
        self.rows: list[dict[str, Any]] = []
        self.drawn: Any = None  # the user's choices and the versions of the tables, of which the chart is drawn
        self.studies: dict[str, Any] = {}
        with section("Runs"):
            self.search = ui.input(label="Search", placeholder="name, environment, state").props("dense clearable")
            self.search.props('aria-label="Search runs"')
            self.table = self._add_table()
            self.empty = ui.label().classes("muted")
        self.study_box = ui.element("section").classes("box")
        with section("Curves of the selected runs"):
            self._add_chart()
        with section("Differences of the configurations"):
            self.difference_note = ui.label().classes("muted")
            self.differences = text_table([], [], wrap=True)
        self.update_table()
        self.table.selected = [row for row in self.rows if row["state"] == "running"][:FIRST_SELECTED] or self.rows[:1]
        self.update_selection()
        ui.timer(REFRESH_SECONDS, self.refresh)

    def _add_table(self) -> ui.table:
        columns = [
            {
                "name": name,
                "label": label,
                "field": name,
                "align": align,
                "sortable": True,
                "headerClasses": "only-wide" if name in WIDE_COLUMNS else "",
            }
            for name, label, align in COLUMNS
        ]
        table = ui.table(
            columns=columns,
            rows=[],
            row_key="key",
            selection="multiple",
            pagination={"rowsPerPage": 25},
            on_select=self._on_select,
        )
        table.classes("run-table").props("flat dense")
        table.add_slot("body-cell-name", NAME_CELL)
        table.add_slot("body-cell-state", STATE_CELL)
        for name in ("envs", "seed"):
            table.add_slot(f"body-cell-{name}", TEXT_CELL % name)
        for name in ("steps", "rate", "returns", "age"):
            table.add_slot(f"body-cell-{name}", NUMBER_CELL % ("only-wide" if name in WIDE_COLUMNS else "", name))
        self.search.bind_value_to(table, "filter", forward=lambda text: text or "")
        return table

    def _add_chart(self) -> None:
        with ui.element("div").classes("controls"):
            self.metric = ui.select(["return"], value="return", label="Metric", with_input=True).props("dense")
            self.x_axis = ui.select(list(X_AXES), value="steps", label="x axis").props("dense")
            with ui.element("label").classes("slider-label"):
                ui.label("Smoothing").classes("muted")
                self.smoothing = ui.slider(min=0, max=0.98, step=0.02, value=0).props('aria-label="Smoothing"')
            self.bands = ui.checkbox("Bands over seeds", value=True)
            self.log_x = ui.checkbox("Logarithmic x")
            self.log_y = ui.checkbox("Logarithmic y")
        self.chart = add_chart(line_chart([], x_name="steps"), "Curves of the selected runs")
        self.chart_note = ui.label().classes("muted")
        for element in (self.metric, self.x_axis, self.smoothing, self.bands, self.log_x, self.log_y):
            element.on_value_change(self.update_chart)

    @property
    def selected(self) -> list[str]:
        """The keys of the selected runs, in the order of the table."""
        chosen = {row["key"] for row in self.table.selected}
        return [row["key"] for row in self.rows if row["key"] in chosen][:MAX_SELECTED]

    def refresh(self) -> None:
        """Show the newest state of the run folders."""
        self.update_table()
        self.update_chart()

    def update_table(self) -> None:
        """Update the rows of the table, if they have changed."""
        now = time.time()
        rows = [table_row(run, now) for run in self.catalogue.summaries()]
        if rows != self.rows:
            self.rows = rows
            self.table.rows = rows
            self.empty.text = "" if rows else "There is no run yet. Create one with: bestiary train --preset hello"
        if self.catalogue.studies != self.studies or not self.studies:
            self._show_studies()

    def _show_studies(self) -> None:
        self.studies = dict(self.catalogue.studies)
        self.study_box.set_visibility(bool(self.studies))
        self.study_box.clear()
        with self.study_box:
            heading("Studies")
            with ui.element("div").classes("facts"):
                for key in sorted(self.studies):
                    ui.link(key, page_url("study", study=key))

    def _on_select(self, _: events.TableSelectionEventArguments) -> None:
        self.update_selection()

    def update_selection(self) -> None:
        """Show the curves and the differences of the selected runs."""
        names: dict[str, None] = {}
        for key in self.selected:
            names |= dict.fromkeys(self.catalogue.metrics(key).number_names)
        metrics = [name for name in names if name not in X_AXES.values()] or ["return"]
        returns = [name for name in metrics if name == "return" or name.endswith("/return")]
        value = self.metric.value if self.metric.value in metrics else (returns or metrics)[0]
        self.metric.set_options(metrics, value=value)
        self._show_differences()
        self.update_chart()

    def _show_differences(self) -> None:
        keys = self.selected
        differing = differing_options({key: self.catalogue.options(key) for key in keys})
        rows = [[name, *(values[key] for key in keys)] for name, values in sorted(differing.items())]
        columns = ["option", *keys] if rows else []
        self.differences.set_visibility(bool(rows))
        self.differences.columns = [
            {"name": f"c{k}", "label": name, "field": f"c{k}", "align": "left", "classes": "cell-wrap"}
            for k, name in enumerate(columns)
        ]
        self.differences.rows = table_rows(rows)
        if rows:
            self.difference_note.text = ""
        elif len(keys) < 2:
            self.difference_note.text = "Select at least two runs in the table."
        else:
            self.difference_note.text = "The configurations are equal."

    def update_chart(self) -> None:
        """Draw the curves of the selected runs, if they have changed."""
        keys = [key for key in self.selected if key in self.catalogue.runs]
        tables = {key: self.catalogue.metrics(key) for key in keys}
        choices = [element.value for element in (self.metric, self.x_axis, self.smoothing, self.bands)]
        choices += [self.log_x.value, self.log_y.value]
        shown = (choices, {key: (id(table), table.version) for key, table in tables.items()})
        if shown == self.drawn:
            return
        self.drawn = shown
        read = {
            key: read_curve(table, str(self.metric.value), self.x_axis.value, self.smoothing.value, key)
            for key, table in tables.items()
        }
        curves = list(read.values())
        if self.bands.value:
            groups = group_by_config({key: self.catalogue.options(key) for key in keys})
            curves = [band([read[key] for key in members], label) for label, members in groups.items()]
        drawn = [curve for curve in curves if len(curve.x)]
        options = line_chart(
            drawn,
            x_name=self.x_axis.value,
            y_name=str(self.metric.value),
            log_x=self.log_x.value,
            log_y=self.log_y.value,
        )
        set_chart(self.chart, options)
        self.chart_note.text = self._describe_chart(drawn, keys)

    def _describe_chart(self, curves: list[Curve], keys: list[str]) -> str:
        if not keys:
            return "Select runs in the table to see their curves."
        if not curves:
            return "The selected runs have no values of this metric yet."
        texts = []
        if any(curve.low is not None for curve in curves):
            texts.append(
                "Runs that differ only in their seed are drawn as their mean, with a band from lowest to highest."
            )
        if self.log_y.value and any((curve.y <= 0).any() for curve in curves):
            texts.append("A logarithmic axis cannot show values that are not positive.")
        ends = [f"{curve.name}: {format_number(float(curve.y[np.isfinite(curve.y)][-1]))}" for curve in curves[:6]]
        return " ".join([*texts, f"Last values: {'; '.join(ends)}."])
