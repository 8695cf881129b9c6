"""Progress bars: lines with the time left, and a bar on a terminal."""

import os
import pty
import re
import select
import sys
import time

import pytest

from bestiary.cli.main import run_command
from bestiary.runs.run import Run
from bestiary.utils import console
from bestiary.utils.console import progress_bar

SALIENCY = ["--length", "4", "--density", "5", "--out", "catch.gif"]


def test_lines_have_the_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of four items takes 20 s, so 60 s are left after the first one."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in progress_bar(range(4), "work", 4):
        now[0] += 20
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"work: {done} of 4 · {left} left" for done, left in ((1, "1m00s"), (2, "0m40s"), (3, "0m20s"))]


def test_no_lines_within_the_first_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress_bar(range(4), "work", 4)) == [0, 1, 2, 3]
    assert capsys.readouterr().err == ""


def test_saliency_shows_the_time_left(
    catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)
    assert run_command(["look", "saliency", str(catch_runs[0].path), *SALIENCY]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("saliency: ")]
    assert len(lines) == 4
    assert re.fullmatch(r"saliency: 3 of 4 · \d+m\d\ds left", lines[3])


def test_bar_on_a_terminal_has_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    shown = ""
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setattr(sys, "stderr", terminal)
        patch.setattr(console, "stderr", console.MessageConsole(file=terminal))
        for done in progress_bar(range(4), "work", 4):
            # The time left is known after two items. The bar is drawn by a thread, so wait for its next output.
            while done == 2 and not re.search(r"work .* 50%.* \S*\d:\d\d:\d\d", shown):
                assert select.select([leader], [], [], 60)[0], f"no bar with the time left: {shown}"
                shown += os.read(leader, 4096).decode()
    os.close(leader)
