"""The pages in a real browser: content, live updates of a training, several tabs, themes and narrow screens."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.view.conftest import Server, Tab, run_path

pytestmark = pytest.mark.xdist_group("browser")


def test_selected_runs_are_compared(server: Server, open_tab: Callable[..., Tab]) -> None:
    """Two runs of one configuration become one curve with a band; a third run is another curve."""
    page = open_tab().open("/")
    page.get_by_label("Search runs").fill("a")
    for name in ("a1", "a2", "b1"):
        row = page.locator(".run-table tbody tr", has=page.get_by_role("link", name=name, exact=True))
        if row.get_by_role("checkbox").get_attribute("aria-checked") == "false":
            row.get_by_role("checkbox").click()
    page.get_by_text(re.compile(r"with a band from lowest to highest")).wait_for()
    page.get_by_text("algo.lr", exact=True).wait_for()
    has_legend = "[...document.querySelectorAll('.chart svg text')].some(text => text.textContent.includes('2 seeds'))"
    page.wait_for_function(has_legend)
    page.get_by_text("Bands over seeds").click()
    page.wait_for_function(f"!{has_legend}")
    page.get_by_text("Logarithmic y").click()
    page.get_by_text(re.compile("logarithmic axis cannot show")).wait_for()


def test_the_page_of_a_run(server: Server, open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open(run_path("a1"))
    for title in ("Returns", "Training", "Checkpoints", "Configuration"):
        page.get_by_role("heading", name=title, exact=True).wait_for()
    page.get_by_text("6.4k of 6.4k").wait_for()
    page.wait_for_function("document.querySelectorAll('.chart svg path').length > 20")
    page.get_by_label("Search options").fill("algo.lr")
    page.get_by_role("cell", name="0.002").wait_for()
    assert page.get_by_role("cell", name="given").count() >= 1


def test_the_page_of_a_study(server: Server, open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open("/study?study=lr-study")
    page.get_by_text("3 of 4 trials are finished").wait_for()
    page.get_by_role("cell", name="not started").wait_for()
    page.get_by_role("link", name="lr=a-s2").click()
    page.wait_for_url("**/run?run=lr-study*")


def test_a_missing_run_is_reported(server: Server, open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open("/run?run=nothing")
    page.get_by_text("There is no run nothing here.").wait_for()


@pytest.mark.parametrize("path", ["/", run_path("a1"), "/study?study=lr-study"])
def test_pages_fit_a_phone(path: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(width=390).open(path)
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_phone_shows_the_state_and_the_return(open_tab: Callable[..., Tab]) -> None:
    """On a phone, the table of runs has no columns that can only be seen after scrolling."""
    page = open_tab(width=390).open("/")
    page.locator(".run-table tbody tr").first.wait_for()
    edges = {}
    for header in page.locator(".run-table th:visible").all():
        name = header.inner_text().replace("arrow_upward", "")  # the symbol with which the table is sorted
        edges[name.strip()] = header.bounding_box()["x"] + header.bounding_box()["width"]
    assert {"run", "state", "steps", "return"} <= {name for name, edge in edges.items() if edge <= 390}, edges
    assert "seed" not in edges


CONTRAST = """
element => {
  const channels = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = rgb => rgb.map(c => c / 255).map(c => c <= 0.04 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const pair = [getComputedStyle(element).color, getComputedStyle(element.closest('.box')).backgroundColor]
    .map(channels).map(light).sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_buttons_are_readable_and_show_the_focus(theme: str, open_tab: Callable[..., Tab]) -> None:
    """The text has the contrast that WCAG 2 demands (4.5), and the keyboard focus is marked."""
    page = open_tab(theme=theme).open("/player?run=a1")
    button = page.get_by_role("button", name="New game")
    button.wait_for()
    assert button.evaluate(CONTRAST) >= 4.5
    assert button.evaluate("element => getComputedStyle(element).boxShadow") == "none"
    page.get_by_label("Second agent").first.focus()
    page.keyboard.press("Tab")
    assert button.evaluate("element => element === document.activeElement")
    page.wait_for_function("e => getComputedStyle(e).boxShadow !== 'none'", arg=button.element_handle())


def test_the_theme_is_kept(open_tab: Callable[..., Tab]) -> None:
    """The page follows the operating system first; the choice of the user is kept in the browser."""
    tab = open_tab(theme="dark")
    page = tab.open("/")
    page.wait_for_selector("body.body--dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Change the theme").click()
    page.wait_for_selector("body.body--light")
    page.wait_for_function("document.cookie.includes('bestiary-theme=light')")
    page = tab.open("/")
    page.wait_for_selector("body.body--light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark


def test_a_running_training_is_followed_in_two_tabs(server: Server, open_tab: Callable[..., Tab]) -> None:
    """A new run appears in the table, and its steps and curve change while it is trained."""
    first, second = open_tab(), open_tab()
    runs = first.open("/")
    options = [
        "--steps",
        "100M",
        "--runtime",
        "serial",
        "--num-envs",
        "16",
        "--batch-size",
        "16",
        "--log-every",
        "1600",
    ]
    command = [sys.executable, "-m", "bestiary", "train", "toy/catch", *options]
    with Path("train.log").open("w") as log:
        training = subprocess.Popen([*command, "--run-dir", str(server.folder / "live")], stdout=log, stderr=log)
    try:
        row = runs.locator(".run-table tbody tr", has=runs.get_by_role("link", name="live", exact=True))
        row.get_by_text("running").wait_for()
        page = second.open(run_path("live"))
        page.wait_for_function("document.querySelectorAll('.returns .chart svg path').length > 3")
        for tab, place in ((runs, row), (page, page.locator(".facts"))):
            before = place.inner_text()
            tab.wait_for_function("([e, text]) => e.innerText !== text", arg=[place.element_handle(), before])
    finally:
        training.kill()
        training.wait()
    row.get_by_text("crashed").wait_for()
