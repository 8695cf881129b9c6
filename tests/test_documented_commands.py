"""Commands in the documentation: `train`, `study` and `compat` resolve, and all other commands accept their options.

The slow tests run all commands that take seconds, and the Python programs of the pages.
"""

import contextlib
import glob
import io
import itertools
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


# --- commands that are run (slow) ---

# Commands that take minutes, open a window or a server, or need the network.
LONG = re.compile(
    r"^(bench|card|view|resume|look (interventions|probes|saliency.*--length 300)|video.*--show)"
    r"|scripted:.*--episodes 2000|--logger wandb|--cluster"
)
MAX_STEPS = 60_000  # trainings of toys with at most this number of steps are run


def takes_seconds(words: list[str]) -> bool:
    """Return whether a command can be run: it takes seconds, and the runs and files that it names exist."""
    text = " ".join(words)
    if words[0] not in COMMANDS or LONG.search(text):
        return False
    if words[0] == "train":
        steps = re.search(r"--steps (\d+)k\b", text)
        is_short = steps is not None and int(steps[1]) * 1_000 <= MAX_STEPS
        return "$" not in text and ("--preset hello --name" in text or (is_short and " toy/" in text))
    if words[0] in ("list", "doctor", "completion"):
        return True
    if words[0] in ("study", "compat", "import", "runs") or "latest" in text:
        return False
    if words[0] == "report":
        return bool(glob.glob("runs/*/config.toml"))
    names = itertools.takewhile(lambda word: not word.startswith("-"), words[2 if words[0] == "look" else 1 :])
    needed = [*names, *(word for word in words if word.endswith(".json"))]
    return all(
        name.startswith(("zoo/", "scripted:")) or glob.glob(name) or glob.glob(f"runs/{name}") for name in needed
    )


@pytest.fixture(scope="module")
def already_run() -> set[str]:
    """Return the commands that ran on an earlier page. They are not repeated."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_that_take_seconds_run(
    page: Path, already_run: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("minari").absolute()))
    names = set()
    for words in commands(page):
        command = shlex.join(words)
        if words[0] == "train":  # a second run with the same name is an example of an error
            is_repeated = command in names
            names.add(command)
        else:
            is_repeated = command in already_run
        if is_repeated or not takes_seconds(words):
            continue
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            status = run_command(words)
        assert status == 0, f"bestiary {command}: {errors.getvalue()}"
        already_run.add(command)


# For each Python program of these pages: a part of the program, and the commands that create the files that it reads.
# The program with Stable-Baselines3 is in tests/integration/test_python_api.py.
PROGRAMS: dict[str, dict[str, list[str] | None]] = {
    "python-api.md": {
        'bestiary.load("zoo/pong")': [],
        'bestiary.load("runs/hello")': ["train --preset hello --steps 20k --name hello"],
        "to_sb3": None,
    },
    "exports.md": {
        "onnxruntime": [
            "train gymnasium/CartPole-v1 --name cartpole --memory gru --steps 20k",
            "export cartpole --format onnx --out cartpole.onnx",
        ],
        "torch.export": ["export zoo/pong --format torch --out pong.pt2"],
        "minari": ["export zoo/pong --format minari --episodes 3 --dataset pong/expert-v0"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "part"),
    [(page, part) for page, parts in PROGRAMS.items() for part, needs in parts.items() if needs is not None],
)
def test_programs_of_a_page_run(page: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path("minari").absolute()))
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    assert len(blocks) == len(PROGRAMS[page])
    (program,) = (block for block in blocks if part in block)
    for command in PROGRAMS[page][part] or []:
        assert run_command(command.split()) == 0
    exec(program, {})
