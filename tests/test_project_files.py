"""Project files agree with the package."""

import re
from pathlib import Path

import bestiary

ROOT = Path(__file__).parents[1]


def test_citation_and_changelog_name_the_version_of_the_package() -> None:
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert citation[1] == bestiary.__version__
    assert re.search(rf"^## {re.escape(bestiary.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
