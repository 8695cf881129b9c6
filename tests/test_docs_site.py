"""The documentation site: it builds without warnings, and its reference pages are complete."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    commands = headings(site / "reference/cli/index.html")
    assert {name for name in COMMANDS if name != "look"} <= commands
    assert "look saliency" in commands
    options = headings(site / "reference/options/index.html")
    assert {f"{kind} {name}" for kind, registry in REGISTRIES.items() for name in registry} <= options
    functions = set(re.findall(r'<h3 id="bestiary\.api\.(\w+)"', (site / "reference/python/index.html").read_text()))
    assert functions == set(bestiary.api.__all__)


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"?(https?://[^\s\">]+)", page.read_text())
        assert not loaded, (page, loaded)
