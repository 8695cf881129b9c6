"""The elements that the pages consist of: the frame (header with navigation and theme), boxes, tables and charts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import events, ui

THEME_COOKIE = "bestiary-theme"
THEMES = {"light": False, "dark": True, "auto": None}  # auto: the setting of the operating system
THEME_ICONS = {"light": "light_mode", "dark": "dark_mode", "auto": "contrast"}
SHORT_CRUMB = 8  # links in the header with at most this number of characters are never shortened
STYLE_SHEET = Path(__file__).with_name("style.css")
# The theme is stored in the browser, because each browser has its own. The name comes from THEMES, never from a
# request, so it cannot insert other JavaScript.
STORE_THEME = f"document.cookie = '{THEME_COOKIE}={{name}}; path=/; SameSite=Strict; max-age=31536000'"


@contextmanager
def page_frame(title: str, *crumbs: tuple[str, str]) -> Iterator[None]:
    """Context in which the body of a page is built. `crumbs` are links (text, URL) in the header, after "Runs"."""
    ui.add_css(STYLE_SHEET.read_text())
    ui.page_title(f"{title} · Bestiary")
    ui.colors(primary="#0072B2", secondary="#56B4E9", accent="#CC79A7", positive="#007A5A", negative="#C24400")
    theme = _chosen_theme()
    dark = ui.dark_mode(THEMES[theme])
    with ui.header().classes("page-header"), ui.element("nav").props('aria-label="main"').classes("breadcrumbs"):
        ui.link("Bestiary", "/").classes("brand")
        for text, url in (("Runs", "/"), *crumbs):
            ui.label("/").classes("crumb-separator").props('aria-hidden="true"')
            ui.link(text, url).classes("crumb" if len(text) > SHORT_CRUMB else "crumb crumb-short")
        ui.space()
        button = ui.button(icon=THEME_ICONS[theme]).props('flat round dense aria-label="Change the theme"')
        button.classes("theme-button")

        def change_theme() -> None:
            nonlocal theme
            names = list(THEMES)
            theme = names[(names.index(theme) + 1) % len(names)]
            dark.set_value(THEMES[theme])
            button.props(f"icon={THEME_ICONS[theme]}")
            ui.notify(f"theme: {theme}", timeout=1000)
            ui.run_javascript(STORE_THEME.format(name=theme))

        button.on_click(change_theme)
    with ui.element("main").classes("page-body"):
        yield


def _chosen_theme() -> str:
    name = ui.context.client.request.cookies.get(THEME_COOKIE, "auto")
    return name if name in THEMES else "auto"


def page_url(page: str, **parameters: object) -> str:
    """Return the URL of a page. Parameters that are None are left out."""
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    return f"/{page}?{query}" if query else f"/{page}"


def show_missing(what: str, key: str) -> None:
    """Add a message that a run or study does not exist."""
    with page_frame("Not found"):
        ui.label(f"There is no {what} {key} here.").classes("page-title")
        ui.link("Show all runs", "/")


@contextmanager
def section(title: str, *, classes: str = "") -> Iterator[ui.element]:
    """Context in which the content of a titled box is built. `classes` are CSS classes of the box."""
    with ui.element("section").classes(f"box {classes}") as box:
        heading(title)
        yield box


def heading(text: str, level: int = 2) -> None:
    """Add a heading."""
    with ui.element(f"h{level}").classes("box-title"):
        ui.label(text)


LINK_CELL = """
<q-td :props="props">
  <a v-if="props.row.url" :href="props.row.url">{{ props.value }}</a><span v-else>{{ props.value }}</span>
</q-td>
"""


def text_table(
    columns: list[str],
    rows: list[list[str]],
    *,
    urls: list[str | None] | None = None,
    wrap: bool = False,
    empty: str = "There are no values yet.",
) -> ui.table:
    """Add a table of texts. The first cell of row k is a link if `urls[k]` is given. `empty` is the text without rows.

    The names of the fields are numbers, because names that begin with a colon would be evaluated as JavaScript.
    """
    table = ui.table(columns=_columns(columns, wrap), rows=table_rows(rows, urls), row_key="id")
    table.classes("table-wrap").props("flat dense")
    table.add_slot("body-cell-c0", LINK_CELL)
    table.props["no-data-label"] = empty
    table.props["hide-no-data-icon"] = True
    return table


def table_rows(rows: list[list[str]], urls: list[str | None] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a `text_table`."""
    links = urls or [None] * len(rows)
    return [
        {"id": k, "url": links[k], **{f"c{column}": cell for column, cell in enumerate(row)}}
        for k, row in enumerate(rows)
    ]


def _columns(names: list[str], wrap: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": f"c{k}",
            "label": name,
            "field": f"c{k}",
            "align": "left",
            "sortable": True,
            "classes": "cell-wrap" if wrap else "",
        }
        for k, name in enumerate(names)
    ]


def set_chart(chart: ui.echart, options: dict[str, Any]) -> None:
    """Replace the options of a chart."""
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def add_chart(options: dict[str, Any], label: str) -> ui.echart:
    """Add a chart. `label` describes it for screen readers."""
    chart = ui.echart(options, renderer="svg").classes("chart")
    chart.props["role"] = "img"
    chart.props["aria-label"] = label
    return chart


async def clicked_x(chart: ui.echart, event: events.GenericEventArguments) -> float | None:
    """Return the x coordinate of a click on a chart, or None for a click outside of the axes, such as on the legend."""
    position = [event.args["offsetX"], event.args["offsetY"]]
    if not await chart.run_chart_method("containPixel", "grid", position):
        return None
    point = await chart.run_chart_method("convertFromPixel", "grid", position)
    return float(point[0]) if isinstance(point, list) and isinstance(point[0], int | float) else None
