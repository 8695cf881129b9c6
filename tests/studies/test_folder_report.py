"""Report of runs: one self-contained file, valid links, missing media, damaged runs, and rendering in a browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.evaluation.evaluate import evaluate
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.video import record_video
from bestiary.runs.run import Run
from bestiary.studies.folder_report import write_folder_report
from bestiary.utils.errors import UserError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Links(HTMLParser):
    """Collects the tags, anchors, links and sources of a page."""

    def __init__(self):
        super().__init__()
        self.anchors = set()
        self.links = []
        self.sources = []
        self.tags = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.anchors |= {attributes["id"]} if "id" in attributes else set()
        self.links += [attributes["href"]] if "href" in attributes else []
        self.sources += [attributes[key] for key in ("src", "srcset", "poster", "data", "action") if key in attributes]


@pytest.fixture(scope="module")
def page(catch_runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    evaluate(catch_runs[0], episodes=5)
    return write_folder_report(catch_runs[0].path.parent, tmp_path_factory.mktemp("page") / "report.html")


def test_page_is_self_contained_and_has_all_runs(page: Path, catch_runs: list[Run]) -> None:
    text = page.read_text()
    links = Links()
    links.feed(text)
    assert {link.removeprefix("#") for link in links.links} <= links.anchors
    assert len(links.links) == len(catch_runs)
    assert all(source.startswith("data:") for source in links.sources)
    assert not {"script", "link", "iframe", "object"} & set(links.tags)
    assert not re.findall(r"url\(|https?://|@import", text)
    assert "default-src 'none'" in text
    assert "width=device-width" in text
    for run in catch_runs:
        assert run.name in text
    assert text.count("data:image/gif") >= len(catch_runs)  # one video per run
    assert text.count("<figcaption>Saliency") >= len(catch_runs)  # one image per run
    assert "Learning curves: catch" in text
    assert "Evaluations" in text
    assert str(catch_runs[0].path.resolve().parent) not in text  # absolute paths are not published


def test_existing_media_are_not_drawn_again(page: Path, catch_runs: list[Run]) -> None:
    before = sorted(catch_runs[1].path.rglob("*"))
    write_folder_report(catch_runs[1].path, Path("one.html"))
    assert sorted(catch_runs[1].path.rglob("*")) == before


def test_run_that_cannot_be_rendered_does_not_prevent_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment of one run raises an error in render(); the error is printed and the page has both runs."""
    (tmp_path / "dark.py").write_text(
        "import gymnasium\n"
        "import numpy as np\n\n"
        "class Dark(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    metadata = {'render_modes': ['rgb_array']}\n\n"
        "    def __init__(self, render_mode=None):\n"
        "        self.render_mode = render_mode\n\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(2, np.float32), {}\n\n"
        "    def step(self, action):\n"
        "        return np.zeros(2, np.float32), 0.0, True, False, {}\n\n"
        "    def render(self):\n"
        "        raise RuntimeError('no display')\n"
    )
    small: dict[str, Any] = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
    bestiary.train(f"{tmp_path / 'dark.py'}:Dark", run_dir=str(tmp_path / "runs" / "dark"), **small)
    bestiary.train("toy/catch", run_dir=str(tmp_path / "runs" / "light"), **small)
    assert run_command(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0
    errors = capsys.readouterr().err
    assert "dark: a video or saliency image is missing and could not be created: " in errors
    assert "no display" in errors
    assert 'id="run-1"' in (tmp_path / "page.html").read_text()


def test_each_task_of_a_run_has_a_video_and_a_saliency_image(capsys: pytest.CaptureFixture[str]) -> None:
    """File names contain the task, and only the newest video of a task is shown."""
    small: dict[str, Any] = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
    run = bestiary.train("atari/Pong", "atari/Boxing", torso="shallow", run_dir="two", **small)
    text = write_folder_report(run.path, Path("page.html")).read_text()
    assert text.count("<figcaption>Game") == text.count("<figcaption>Saliency") == 2
    assert "Game (Pong-" in text
    assert "Game (Boxing-" in text
    assert "saliency-Boxing-" in text
    record_video(run, PlaybackOptions(env="atari/Pong", length=20))
    again = write_folder_report(run.path, Path("again.html")).read_text()
    assert again.count("<figcaption>Game") == 2
    assert "Game (Pong-000000000080-sampled-2)" in again


@pytest.mark.parametrize("damage", [b"steps = \n", b"name = \xff\xfe", None])
def test_run_with_a_damaged_config_is_on_the_page_with_its_error(damage: bytes | None, catch_runs: list[Run]) -> None:
    for run in catch_runs[:2]:
        shutil.copytree(run.path, Path("all") / run.name)
    broken = Path("all/a2/config.toml")
    complete = broken.read_bytes()
    # None: the file is cut off, as by a full disk.
    broken.write_bytes(complete[: complete.index(b"[env]")] if damage is None else damage)
    links = Links()
    text = write_folder_report(Path("all"), Path("r.html")).read_text()
    links.feed(text)
    assert len(links.links) == 2
    assert {link.removeprefix("#") for link in links.links} <= links.anchors
    assert "Learning curves: catch" in text
    if damage is not None:
        assert "a2/config.toml: not a valid TOML file" in "".join(text.split("<h2")[-2:])  # in its section


@pytest.mark.parametrize(
    ("words", "message"),
    [("r.pdf", ".html"), ("no/such/r.html", "no folder"), ("there.html", "exists; choose another")],
)
def test_wrong_output_paths_are_refused(
    words: str, message: str, catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.html").write_text("mine")
    assert run_command(["report", str(catch_runs[0].path), "--out", words]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no run below"):
        write_folder_report(Path("nowhere"), Path("r.html"))


# Shows the page in a frame of the given width, and reports its layout as JSON.
FRAME = """<iframe id="page" style="width: {width}px; height: 900px; border: 0"></iframe><pre id="found"></pre><script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, all = (what) => [...page.querySelectorAll(what)];
  document.getElementById("found").textContent = JSON.stringify({{
    "width": page.documentElement.scrollWidth,
    "images": all("img").length,
    "drawn": all("img").filter((image) => image.complete && image.naturalWidth > 0).length,
    "broken_links": all("a").filter((link) => !page.getElementById(link.hash.slice(1))).length,
    "font": frame.contentWindow.getComputedStyle(page.body).fontSize,
  }});
}};
frame.srcdoc = {page};
</script>"""


def browse(*words: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser installed ({', '.join(BROWSERS)})")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir=profile"]
    result = subprocess.run([browser, *flags, *words], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("width", [1200, 390])
def test_layout_in_a_browser(page: Path, width: int, catch_runs: list[Run]) -> None:
    """All images are drawn, all links work, and the page is not wider than the screen, also on a phone."""
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    Path("frame.html").write_text(FRAME.format(width=width, page=text))
    dom = browse("--virtual-time-budget=10000", "--dump-dom", Path("frame.html").resolve().as_uri())
    match = re.search(r'id="found">(\{.*?\})<', dom)
    assert match is not None
    found = json.loads(match[1])
    assert found["width"] <= width
    assert found["images"] == found["drawn"] >= 2 * len(catch_runs) + 1
    assert found["broken_links"] == 0
    assert found["font"] == "16px"  # the page's own style is applied


def test_page_opens_from_a_file(page: Path) -> None:
    browse("--window-size=800,600", "--screenshot=shot.png", page.as_uri())
    with PIL.Image.open("shot.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (600, 800, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
