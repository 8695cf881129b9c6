"""Project files agree with the package."""

import re
import tomllib
from pathlib import Path

import bestiary

ROOT = Path(__file__).parents[1]


def test_the_installation_page_lists_all_extras() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    section = (ROOT / "docs/installation.md").read_text().split("## Extras")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras


def test_citation_and_changelog_name_the_version_of_the_package() -> None:
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert citation[1] == bestiary.__version__
    assert re.search(rf"^## {re.escape(bestiary.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
