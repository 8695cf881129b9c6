"""Project files agree with the package."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
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


def test_editable_installation_does_not_import_modules_of_the_working_directory(tmp_path: Path) -> None:
    """An editable package with namespace packages adds a relative path to sys.path."""
    for name in ("bestiary", "README.md", "LICENSE", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, tmp_path / name)
    build = "import setuptools.build_meta as b; b.build_editable('wheel')"
    subprocess.run([sys.executable, "-P", "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "import os, site, sys; site.addsitedir('site'); print([p for p in sys.path if not os.path.isabs(p)])"
    result = subprocess.run([sys.executable, "-S", "-P", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    assert result.stdout == b"[]\n"
