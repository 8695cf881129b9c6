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
