"""The report: one file, no requests, links that lead somewhere, and what a browser makes of it."""

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
from bestiary.analysis.evaluate import evaluate
from bestiary.analysis.movie import film
from bestiary.analysis.report import report
from bestiary.cli import run_command
from bestiary.errors import UserError
from bestiary.runs.folder import Run

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.places, self.links, self.sources, self.tags = set(), [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.places |= {found["id"]} if "id" in found else set()
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found[key] for key in ("src", "srcset", "poster", "data", "action") if key in found]


@pytest.fixture(scope="module")
def page(catch_runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    evaluate(catch_runs[0], episodes=5)
    return report(catch_runs[0].path.parent, tmp_path_factory.mktemp("page") / "report.html")


def test_one_file_without_requests(page: Path, catch_runs: list[Run]) -> None:
    text = page.read_text()
    links = Links()
    links.feed(text)
    assert {link.removeprefix("#") for link in links.links} <= links.places
    assert len(links.links) == len(catch_runs)
    assert all(source.startswith("data:") for source in links.sources)
    assert not {"script", "link", "iframe", "object"} & set(links.tags)
    assert not re.findall(r"url\(|https?://|@import", text)
    assert "default-src 'none'" in text
    assert "width=device-width" in text
    for run in catch_runs:
        assert run.name in text
    assert text.count("data:image/gif") >= len(catch_runs)  # a movie each
    assert text.count("what would change its mind") >= len(catch_runs)  # a still each
    assert "Learning curves: catch" in text
    assert "Evaluations" in text
    assert str(catch_runs[0].path.resolve().parent) not in text  # nobody's folders


def test_what_is_there_is_not_drawn_again(page: Path, catch_runs: list[Run]) -> None:
    before = sorted(catch_runs[1].path.rglob("*"))
    report(catch_runs[1].path, Path("one.html"))
    assert sorted(catch_runs[1].path.rglob("*")) == before


def test_a_run_that_cannot_be_drawn_does_not_cost_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own world cannot be rendered; the other run is on the page, and this one says why it has no picture."""
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
    assert "dark: not drawn: " in (said := capsys.readouterr().err)
    assert "no display" in said
    assert 'id="run-1"' in (tmp_path / "page.html").read_text()


def test_every_task_of_a_run_is_seen_playing(capsys: pytest.CaptureFixture[str]) -> None:
    """A movie and a still of each, under names that say whose they are; of a subject the newest is shown."""
    small: dict[str, Any] = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
    run = bestiary.train("atari/Pong", "atari/Boxing", torso="shallow", run_dir="two", **small)
    text = report(run.path, Path("page.html")).read_text()
    assert text.count("<figcaption>playing") == text.count("<figcaption>what would change its mind") == 2
    assert "playing (Pong-" in text
    assert "playing (Boxing-" in text
    assert "saliency-Boxing-" in text
    film(run, env="atari/Pong", length=20)
    again = report(run.path, Path("again.html")).read_text()
    assert again.count("<figcaption>playing") == 2
    assert "playing (Pong-000000000080-sampled-2)" in again


@pytest.mark.parametrize("damage", [b"steps = \n", b"name = \xff\xfe", None])
def test_a_run_with_a_damaged_config_is_on_the_page_and_says_what_is_wrong(
    damage: bytes | None, catch_runs: list[Run]
) -> None:
    for run in catch_runs[:2]:
        shutil.copytree(run.path, Path("all") / run.name)
    broken = Path("all/a2/config.toml")
    whole = broken.read_bytes()
    broken.write_bytes(whole[: whole.index(b"[env]")] if damage is None else damage)  # as a full disk leaves it
    links = Links()
    text = report(Path("all"), Path("r.html")).read_text()
    links.feed(text)
    assert len(links.links) == 2
    assert {link.removeprefix("#") for link in links.links} <= links.places
    assert "Learning curves: catch" in text
    if damage is not None:
        assert "a2/config.toml: not readable as TOML" in "".join(text.split("<h2")[-2:])  # in its section


@pytest.mark.parametrize(
    ("words", "message"),
    [("r.pdf", "a page is .html"), ("no/such/r.html", "no folder"), ("there.html", "exists; choose another")],
)
def test_bad_pages(words: str, message: str, catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    Path("there.html").write_text("mine")
    assert run_command(["report", str(catch_runs[0].path), "--out", words]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no run below"):
        report(Path("nowhere"), Path("r.html"))


# The page in a frame of some width, which says as JSON what a browser made of it.
FRAME = """<iframe id="page" style="width: {width}px; height: 900px; border: 0"></iframe><pre id="found"></pre><script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, all = (what) => [...page.querySelectorAll(what)];
  document.getElementById("found").textContent = JSON.stringify({{
    "wide": page.documentElement.scrollWidth,
    "images": all("img").length,
    "drawn": all("img").filter((image) => image.complete && image.naturalWidth > 0).length,
    "lost": all("a").filter((link) => !page.getElementById(link.hash.slice(1))).length,
    "font": frame.contentWindow.getComputedStyle(page.body).fontSize,
  }});
}};
frame.srcdoc = {page};
</script>"""


def browse(*words: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here ({', '.join(BROWSERS)}): the page was checked as text only")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir=profile"]
    done = subprocess.run([browser, *flags, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [1200, 390])
def test_in_a_browser(page: Path, width: int, catch_runs: list[Run]) -> None:
    """Where there is one: every picture is drawn, every link leads somewhere, and nothing sticks out, also on a phone."""
    text = json.dumps(page.read_text()).replace("</", "<\\/")
    Path("frame.html").write_text(FRAME.format(width=width, page=text))
    dom = browse("--virtual-time-budget=10000", "--dump-dom", Path("frame.html").resolve().as_uri())
    match = re.search(r'id="found">(\{.*?\})<', dom)
    assert match is not None
    found = json.loads(match[1])
    assert found["wide"] <= width
    assert found["images"] == found["drawn"] >= 2 * len(catch_runs) + 1
    assert found["lost"] == 0
    assert found["font"] == "16px"  # the page's own style is not refused


def test_it_opens_from_the_disk(page: Path) -> None:
    browse("--window-size=800,600", "--screenshot=shot.png", page.as_uri())
    with PIL.Image.open("shot.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape == (600, 800, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
