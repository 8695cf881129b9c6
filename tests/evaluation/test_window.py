"""A game on the screen (`bestiary video --show`), with SDL's driver `dummy` in place of a screen."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bestiary.cli import evaluate
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.video import show_game
from bestiary.evaluation.window import Window, display_problem
from bestiary.runs.run import Run

DISPLAY_VARIABLES = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")


@pytest.fixture
def dummy_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DISPLAY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("dummy_display")
def test_the_window_shows_the_pixels_of_the_image() -> None:
    import pygame

    image = np.random.default_rng(0).integers(0, 256, (210, 160, 3)).astype(np.uint8)
    with Window("test", fps=1000) as window:
        assert window.show(image)
        assert window.screen.get_size() == (320, 420)
        shown = pygame.surfarray.array3d(window.screen).swapaxes(0, 1)
        np.testing.assert_array_equal(shown[::2, ::2], image)
        pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE))
        assert not window.show(image)
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        assert not window.show(image)
    assert not pygame.display.get_init()


@pytest.mark.usefixtures("dummy_display")
def test_a_game_is_shown_until_it_ends_and_written_only_if_wanted(
    catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = catch_runs[0]
    before = sorted(run.path.rglob("*.gif"))
    assert show_game(run, PlaybackOptions(length=7, fps=1000)) is None
    assert sorted(run.path.rglob("*.gif")) == before
    assert "the window showed 7 steps; return of each game: " in capsys.readouterr().err
    path = show_game(run, PlaybackOptions(length=7, fps=50), out="shown.gif")
    assert path == Path("shown.gif")
    assert path.stat().st_size > 0


@pytest.mark.usefixtures("no_display")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems always have a display")
def test_without_a_display_a_video_is_written(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    assert "no display" in str(display_problem())
    evaluate.video_command([str(catch_runs[0].path), "--show", "--length", "5", "--out", "instead.gif"])
    output = capsys.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("note: --show: this machine has no display")]
    assert len(lines) == 1
    assert output.out.strip() == "video: instead.gif"
    assert Path("instead.gif").stat().st_size > 0


def test_a_missing_package_and_a_display_that_cannot_be_opened_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "unknown-driver")
    assert "the display cannot be opened" in str(display_problem())
    code = (
        "import sys; sys.modules['pygame'] = None; from bestiary.evaluation import window; "
        "print(window.display_problem())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "the package pygame is not installed (pip install 'bestiary[window]')\n"
