"""Commands in the documentation: `train`, `study` and `compat` resolve, and all other commands accept their options."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from bestiary.cli.completable import list_commands
from bestiary.cli.main import COMMANDS, run_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that can be resolved without training, and whose other arguments need not exist.
RESOLVABLE = ("train", "study", "compat")
# Runs and files that only exist in the text around a command.
MISSING_FILES = re.compile(r"\.py:|\.toml|runs/|RUN|FILE|FOLDER|\.\.\.|\$|<|NAME|other-machine")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each `bestiary` command in the code blocks of a page."""
    for block in re.findall(r"^ *```(?:sh|bash)?\n(.*?)^ *```", page.read_text(), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if line.startswith("bestiary ") and "[" not in line.split("#")[0]:
                with contextlib.suppress(ValueError):  # a line whose quotes continue on the next line
                    yield shlex.split(line, comments=True)[1:]


def resolves(words: list[str]) -> None:
    """Check that a command that trains is valid, without training."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        options = [words[0], "--dry-run", *words[1:]] if "--dry-run" not in words else words
        status = run_command(options)
    assert status == 0, f"bestiary {shlex.join(words)}: {errors.getvalue()}"


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    """Return {command: its flags, for all environments and components}."""
    return {c.name: {flag for option in c.options for flag in option.flags} for c in list_commands()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_are_valid(page: Path, flags: dict[str, set[str]]) -> None:
    (Path.cwd() / "studies").symlink_to(ROOT / "studies")
    for words in commands(page):
        assert words[0] in COMMANDS or words[0].isupper() or words[0].startswith("-"), words
        if words[0] not in COMMANDS or "--help" in words:
            continue
        if words[0] in RESOLVABLE and not MISSING_FILES.search(" ".join(words).replace("studies/", "")):
            resolves(words)
        elif words[0] not in RESOLVABLE:
            name = " ".join(words[:2]) if words[0] == "look" else words[0]
            unknown = {word.split("=")[0] for word in words if word.startswith("--")} - flags[name]
            assert not unknown, f"bestiary {shlex.join(words)}: unknown {unknown}"


def test_the_documentation_contains_many_commands() -> None:
    """Check that the pages are found and their code blocks are read."""
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 200
    assert {words[0] for words in found} >= set(COMMANDS) - {"import"}
