"""Completion scripts: bash completes words; the scripts of zsh and fish contain the same names."""

import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from bestiary.cli.look import TOOLS
from bestiary.cli.main import COMMANDS, run_command
from bestiary.config.components import REGISTRIES
from bestiary.config.toml import preset_paths

# The words are the arguments; the last one is completed. Words are split at colons, as bash does it.
BASH = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _bestiary; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert run_command(["completion", shell]) == 0
        (folder / shell).write_text(output.getvalue())
    return {path.name: path for path in folder.iterdir()}


def complete(scripts: dict[str, Path], *words: str) -> set[str]:
    result = subprocess.run(
        ["bash", "-c", BASH, "bash", str(scripts["bash"]), "bestiary", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not result.stderr
    return set(result.stdout.split("\n")) - {""}


def test_bash_completes_commands(scripts: dict[str, Path]) -> None:
    assert complete(scripts, "") >= set(COMMANDS)
    assert complete(scripts, "re") == {"resume", "report"}
    assert complete(scripts, "look", "") == set(TOOLS)
    assert complete(scripts, "completion", "f") == {"fish"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--memory.hid"), {"--memory.hidden"}),
        (("train", "--stick"), {"--sticky"}),
        (("train", "--algo.cl"), {"--algo.clip", "--algo.clip-schedule"}),
        (("train", "--lr", "0.1", "--if-ex"), {"--if-exists"}),
        (("resume", "--ste"), {"--steps"}),
        (("eval", "runs/latest", "--episo"), {"--episodes"}),
        (("eval", "runs/latest", "--noop-ma"), {"--noop-max"}),
        (("look", "saliency", "runs/latest", "--dist"), {"--distance"}),
        (("study", "--if"), {"--if-changed"}),
    ],
)
def test_bash_completes_options(scripts: dict[str, Path], words: tuple[str, ...], expected: set[str]) -> None:
    assert complete(scripts, *words) >= expected
    assert all(word.startswith(words[-1]) for word in complete(scripts, *words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--preset", "popart"), {"popart-six"}),
        (("train", "atari/Pong", "--memory", "sr"), {"srwm", "sr-delta", "srwm-no-carry"}),
        (("train", "--torso", "a"), {"auto"}),
        (("train", "atari/Pon"), {"atari/Pong"}),
        (("train", "--seed", "3", "atari/Pon"), {"atari/Pong"}),
        (("train", "--runtime", ""), {"local", "serial", "cluster"}),
        (("train", "--runtime", "="), {"local", "serial", "cluster"}),
        (("train", "--runtime", "=", "se"), {"serial"}),
        (("train", "procgen/maze", ":", "ea"), {"easy"}),
        (("train", "procgen/maze", ":"), {"easy", "hard", "memory", "exploration"}),
        (("train", "--seed", ""), set()),
        (("eval", "runs/latest", "--env", "toy/ca"), {"toy/catch"}),
        (("list", "pre"), {"presets"}),
        (("look", "saliency", "runs/latest", "--distance", ""), {"logits", "kl"}),
    ],
)
def test_bash_completes_values(scripts: dict[str, Path], words: tuple[str, ...], expected: set[str]) -> None:
    assert complete(scripts, *words) == expected


def test_bash_completes_paths(scripts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my runs").mkdir()
    Path("my.toml").touch()
    assert complete(scripts, "train", "--config", "m") == {"my runs", "my.toml"}
    assert complete(scripts, "train", "--run-dir", "m") == {"my runs"}
    assert complete(scripts, "report", "m") == {"my runs"}
    assert complete(scripts, "study", "m") == {"my runs", "my.toml"}
    assert complete(scripts, "eval", "m") == {"my runs", "my.toml"}
    assert complete(scripts, "train", "--torso", "my") == {"my runs", "my.toml"}
    assert complete(scripts, "train", "--seed", "m") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_other_shells(scripts: dict[str, Path], shell: str) -> None:
    """If the shell is installed, it also checks the syntax."""
    text = scripts[shell].read_text()
    names = [*COMMANDS, *preset_paths(), *(name for registry in REGISTRIES.values() for name in registry)]
    words = set(text.replace('"', " ").replace("'", " ").split())
    assert {*names, "atari/Pong", "procgen/maze:easy"} <= words
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(scripts[shell])], check=True)


@pytest.mark.parametrize(("shell", "nearest"), [("bsh", "bash"), ("/bin/zsh", "zsh"), ("Fish", "fish")])
def test_unknown_shell(shell: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["completion", shell]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert shell in line
    assert f"did you mean {nearest}?" in line
