"""The documentation site: it builds without warnings, and its reference pages are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import bestiary.api
from bestiary.cli.main import COMMANDS
from bestiary.config.components import REGISTRIES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def headings(page: Path) -> set[str]:
    found = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", page.read_text(), re.S)
    return {re.sub(r"<[^>]+>|&para;|¶", "", heading).strip() for heading in found}


def test_reference_pages_contain_all_commands_components_and_functions(site: Path) -> None:
    commands = headings(site / "reference/cli.html")
    assert {name for name in COMMANDS if name != "look"} <= commands
    assert "look saliency" in commands
    options = headings(site / "reference/options.html")
    assert {f"{kind} {name}" for kind, registry in REGISTRIES.items() for name in registry} <= options
    functions = set(re.findall(r'<h3 id="bestiary\.api\.(\w+)"', (site / "reference/python.html").read_text()))
    assert functions == set(bestiary.api.__all__)


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not loaded, (page, loaded)


def test_links_between_pages_are_links_to_files(site: Path) -> None:
    """The site can be opened without a web server, which would replace the link to a folder by its index.html."""
    for page in site.rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"#?]+)', page.read_text()):
            if page.name != "404.html" and not re.match(r"\w+:", link):
                assert (page.parent / unquote(link)).is_file(), (page, link)


def test_pages_of_algorithms_and_components_have_all_sections() -> None:
    """Each algorithm, agent and other component has a page with equations, metrics, implementation details, results."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("Algorithms and agents:")[1].split("Results:")[0]
    texts = {name: (ROOT / "docs" / name).read_text() for name in re.findall(r": (\S+\.md)", navigation)}
    for name, text in texts.items():
        headings = re.findall(r"^## (.+)", text, re.M)
        expected = ["Options", "Equations", "Implementation details", "Logged metrics", "Results", "References"]
        assert [heading for heading in headings if heading in expected] == [
            heading for heading in expected if heading != "References" or heading in headings
        ], name
        assert "bestiary train" in text.split("## Options")[0], name
    for kind in ("algo", "agent"):
        for component in REGISTRIES[kind]:
            assert any(f"`--{kind} {component}`" in text.split("## Options")[0] for text in texts.values()), component
    for kind in ("torso", "memory", "critic"):
        for component in REGISTRIES[kind]:
            assert any(re.search(rf"^\|.*`{component}`", text, re.M) for text in texts.values()), component
