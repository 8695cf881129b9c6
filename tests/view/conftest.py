"""Fixtures of the tests of `bestiary view`: a folder with runs and a study, the server, and a browser."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from bestiary.runs.run import Run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HOSTILE_NAMES = (
    "<img src=x onerror=alert(1)>",
    "`${alert(1)}`",
    "{{ constructor.constructor('alert(1)')() }}",
    ":a';alert(1);'",
    "</script><script>alert(1)</script>".replace("/", "\u2044"),
    "\x1b[2Jtab\tnew",
)


@dataclass
class Server:
    """A running `bestiary view` process."""

    process: subprocess.Popen[str]
    url: str  # with the token
    folder: Path

    @property
    def base(self) -> str:
        """The URL without path and token."""
        return self.url.split("/?")[0]

    @property
    def token(self) -> str:
        """The secret token."""
        return self.url.split("token=")[1]

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self.base.rpartition(":")[2])


def start_server(*words: str, cwd: Path, output: Path) -> Server:
    """Start the command in a process and wait until it answers."""
    command = [sys.executable, "-m", "bestiary", "view", *words]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=output.open("w"), text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, output.read_text()
    return Server(process, found[0], cwd)


@pytest.fixture(scope="session")
def view_folder(catch_runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs, runs with hostile names and a study."""
    folder = tmp_path_factory.mktemp("view")
    for run in catch_runs:
        shutil.copytree(run.path, folder / run.name)
        shutil.copytree(run.path, folder / "lr-study" / f"lr={run.name[0]}-s{run.name[1]}")
    for name in HOSTILE_NAMES:
        shutil.copytree(catch_runs[0].path, folder / name)
    (folder / "lr-study" / "study.toml").write_text(
        'name = "lr-study"\nseeds = [1, 2, 3]\n[base]\nenv = "toy/catch"\n[[variant]]\nname = "lr=a"\nlr = 1\n'
    )
    return folder


@pytest.fixture(scope="session")
def server(view_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run `bestiary view` for the folder and the agents of the zoo."""
    output = tmp_path_factory.mktemp("server") / "errors.txt"
    running = start_server(str(view_folder), "zoo/pong", "zoo/warehouse-iam", cwd=view_folder, output=output)
    running.folder = view_folder
    yield running
    running.process.terminate()
    running.process.wait(timeout=20)
    assert "Traceback" not in output.read_text(), output.read_text()


@dataclass
class Tab:
    """A tab of the browser, with everything that must not happen in it."""

    page: Any
    server: Server
    problems: list[str] = field(default_factory=list)

    def open(self, path: str) -> Any:
        """Open a page of the server and wait until it is connected."""
        separator = "&" if "?" in path else "?"
        self.page.goto(f"{self.server.base}{path}{separator}token={self.server.token}")
        self.page.wait_for_selector(".page-body")
        return self.page


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Start a browser, or skip the test if no browser is installed."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser installed ({', '.join(BROWSERS)})")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Any, server: Server) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a tab. At the end of the test, no tab may have had a problem."""
    tabs: list[Tab] = []

    def open_tab(width: int = 1200, theme: str = "light") -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        context.set_default_timeout(120_000)  # other tests may use all cores at the same time
        tab = Tab(context.new_page(), server)
        page = tab.page

        def note_request(request: Any) -> None:
            if not request.url.startswith((server.base, server.base.replace("http", "ws"), "data:", "blob:")):
                tab.problems.append(f"request to {request.url}")

        def note_message(message: Any) -> None:
            if message.type == "error":
                tab.problems.append(f"message in the console: {message.text}")

        def note_dialog(dialog: Any) -> None:
            tab.problems.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("request", note_request)
        page.on("console", note_message)
        page.on("dialog", note_dialog)
        page.on("pageerror", lambda error: tab.problems.append(f"error of a script: {error}"))
        tabs.append(tab)
        return tab

    yield open_tab
    for tab in tabs:
        tab.page.context.close()
        assert tab.problems == []


def run_path(key: str) -> str:
    """Return the path of the page of a run."""
    return f"/run?run={quote(key)}"
