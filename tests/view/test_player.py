"""The player in a real browser: playing, stepping, overlays, one intervention, taking over, and two tabs."""

import base64
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest

from bestiary.evaluation.playback import PlaybackOptions, open_playback
from bestiary.runs.run import open_run
from tests.view.conftest import Server, Tab

pytestmark = pytest.mark.xdist_group("browser")

STEP = "parseInt((document.querySelector('.step-text')?.innerText || '').split(' ')[1])"  # the step that is shown


def step_of(page: Any) -> int:
    """Return the number of the step that the player shows."""
    found = re.match(r"step (\d+)", page.inner_text(".step-text"))
    assert found is not None
    return int(found[1])


def picture(page: Any) -> np.ndarray:
    """Return the picture of the player."""
    source = page.locator(".picture img").first.get_attribute("src")
    content = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    return np.asarray(PIL.Image.open(io.BytesIO(content)).convert("RGB"))


def wait_for_step(page: Any, step: int) -> None:
    page.wait_for_function(f"n => {STEP} === n", arg=step)


def check_picture(page: Any, frame: np.ndarray) -> None:
    """Check that the player shows a frame. The browser may show the number of the step before its picture."""
    for _ in range(600):
        if np.array_equal(picture(page), frame):
            break
        page.wait_for_timeout(100)
    np.testing.assert_array_equal(picture(page), frame)


def test_a_game_of_pong(server: Server, open_tab: Callable[..., Tab]) -> None:
    """Play, step, show saliency, measure an intervention and take over. The frames are those of the video."""
    tab = open_tab()
    page = tab.open("/player?run=zoo/pong&seed=3&step=30")
    wait_for_step(page, 30)
    frames = [
        frame.display_image for (frame,) in open_playback(open_run("zoo/pong"), PlaybackOptions(length=31, seed=3))
    ]
    check_picture(page, frames[30])
    page.keyboard.press("ArrowLeft")
    wait_for_step(page, 29)
    check_picture(page, frames[29])
    page.keyboard.press("Home")
    wait_for_step(page, 0)
    check_picture(page, frames[0])
    page.keyboard.press("End")
    wait_for_step(page, 30)

    page.get_by_label("Play", exact=True).click()
    page.wait_for_function(f"{STEP} > 36")
    page.keyboard.press("p")
    page.get_by_label("Play", exact=True).wait_for()
    page.wait_for_timeout(500)  # the picture of the last step may arrive after its number
    stopped = step_of(page)

    plain = picture(page)
    source = "document.querySelector('.picture img').src"
    before = page.evaluate(source)
    page.get_by_label("Overlay").click()
    page.get_by_role("option", name="saliency: both").click()
    page.wait_for_function(f"before => {source} !== before", arg=before)  # other tests may use all cores
    coloured = picture(page)
    assert coloured.shape == plain.shape
    assert not np.array_equal(coloured, plain)
    page.keyboard.press("ArrowLeft")  # the keys belong to the player again after the choice of an overlay
    wait_for_step(page, stopped - 1)
    page.keyboard.press("ArrowRight")
    wait_for_step(page, stopped)

    box = page.locator(".observation")
    box.scroll_into_view_if_needed()
    corner = box.bounding_box()
    page.mouse.move(corner["x"] + 10, corner["y"] + corner["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(corner["x"] + corner["width"] - 10, corner["y"] + corner["height"] * 0.9, steps=4)
    page.mouse.up()
    page.wait_for_function("parseInt(document.querySelector('[aria-label=width]').value) > 60")
    page.get_by_role("button", name="Measure").click()
    page.get_by_text(re.compile(rf"Step {stopped}: the most probable action")).wait_for()
    command = page.inner_text(".command")
    assert re.fullmatch(rf"bestiary intervene zoo/pong --seed 3 --step {stopped} --erase \d+,\d+,\d+,\d+", command)
    width = int(command.split(",")[2])
    assert 60 < width <= 84

    page.get_by_role("button", name="Take over").click()
    page.get_by_role("button", name="Hand back to the agent").wait_for()
    page.wait_for_function(  # the whole picture is visible, and stays visible while keys are pressed
        "() => { const box = document.querySelector('.picture').getBoundingClientRect();"
        " return box.top >= 0 && box.bottom <= innerHeight; }"
    )
    place = page.evaluate("scrollY")
    for key in ("ArrowUp", " ", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") == place
    page.keyboard.down("ArrowLeft")
    page.wait_for_function("/^action LEFT( |$)/.test(document.querySelector('.output').innerText)")
    page.get_by_text(re.compile("changed game")).wait_for()
    page.keyboard.up("ArrowLeft")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Take over").wait_for()
    page.keyboard.press("p")
    page.get_by_label("Play", exact=True).wait_for()
    page.get_by_role("button", name="Measure").click()
    page.wait_for_function("document.querySelector('.command').innerText.includes(' --earlier-actions ')")


def test_rewards_are_found_with_the_keyboard(open_tab: Callable[..., Tab]) -> None:
    """The key R goes to the steps with a reward, and plays the game on if necessary."""
    page = open_tab().open("/player?run=zoo/warehouse-iam&seed=3")
    wait_for_step(page, 0)
    game = open_playback(open_run("zoo/warehouse-iam"), PlaybackOptions(length=40, seed=3))
    rewards = [float(frame.record.step.reward[0]) for (frame,) in game]
    rewarded = [t for t, reward in enumerate(rewards) if t and reward]
    assert len(rewarded) > 2
    for t in rewarded[:3]:
        page.keyboard.press("r")
        wait_for_step(page, t)
    page.get_by_text("positive reward").wait_for()
    page.keyboard.press("Shift+R")
    wait_for_step(page, rewarded[1])
    page.evaluate("scrollTo(0, 200)")
    page.keyboard.press("Home")  # it belongs to the player and does not scroll the page
    wait_for_step(page, 0)
    assert page.evaluate("scrollY") == 200


def test_a_click_beside_a_curve_does_nothing(open_tab: Callable[..., Tab]) -> None:
    """A click on the legend hides a curve. It must not go to another step or page."""
    tab = open_tab()
    page = tab.open("/player?run=a1&seed=1&step=5&second=b1")
    wait_for_step(page, 5)
    chart = page.get_by_role("img", name="Value at each step")
    name = chart.get_by_text("b1", exact=True)
    shown = name.get_attribute("fill")
    name.click()
    page.wait_for_function("([text, fill]) => text.getAttribute('fill') !== fill", arg=[name.element_handle(), shown])
    assert step_of(page) == 5
    page = tab.open("/run?run=a1")
    chart = page.locator(".returns .chart").first
    name = chart.get_by_text("one game", exact=True)
    shown = name.get_attribute("fill")
    name.click()
    page.wait_for_function("([text, fill]) => text.getAttribute('fill') !== fill", arg=[name.element_handle(), shown])
    page.wait_for_timeout(500)
    assert "/run?run=a1" in page.url


def test_two_checkpoints_of_one_run_are_compared(open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open("/player?run=a1&seed=1&second=a1&second_checkpoint=2240&step=2")
    wait_for_step(page, 2)
    captions = page.locator(".player-pictures figcaption").all_inner_texts()
    assert [re.sub(r"\D", "", caption) for caption in captions] == ["6400", "2240"]
    assert page.get_by_label("Its checkpoint").input_value() == "2,240"


def test_two_tabs_have_two_games(server: Server, open_tab: Callable[..., Tab]) -> None:
    first, second = open_tab(), open_tab(width=390)
    one = first.open("/player?run=a1&seed=1&step=3")
    two = second.open("/player?run=a1&seed=2&second=b1")
    wait_for_step(one, 3)
    wait_for_step(two, 0)
    assert two.locator(".picture").count() == 2
    two.keyboard.press("ArrowRight")
    wait_for_step(two, 1)
    assert step_of(one) == 3
    assert two.evaluate("document.documentElement.scrollWidth") <= 390
    second.page.close()
    one.keyboard.press("ArrowRight")
    wait_for_step(one, 4)


def test_a_click_on_a_curve_opens_the_nearest_checkpoint(open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open("/run?run=a1")
    chart = page.locator(".returns .chart").first
    page.wait_for_function("document.querySelectorAll('.returns .chart svg path').length > 3")
    chart.scroll_into_view_if_needed()
    size = chart.bounding_box()
    chart.click(position={"x": size["width"] * 0.4, "y": size["height"] * 0.5})
    page.wait_for_url("**/player?*")
    assert re.search(r"checkpoint=(2240|4160)\b", page.url)
    wait_for_step(page, 0)


def test_problems_of_a_game_are_shown(open_tab: Callable[..., Tab]) -> None:
    page = open_tab().open("/player?run=zoo/pong&second=a1")
    page.get_by_role("alert").get_by_text(re.compile("zoo/pong|a1")).wait_for()
