"""Hints about flags of other programs."""

import contextlib
import io
import re

import pytest

from bestiary.cli.main import run_command
from bestiary.compat.flag_types import OPTION, Flag
from bestiary.compat.programs import PROGRAMS
from bestiary.config.foreign_flags import FOREIGN_FLAGS, foreign_flag_hint

TRANSLATED = {
    (flag.name.replace("-", "_").lower(), flag.option)
    for program in PROGRAMS.values()
    for flag in program.flags
    if flag.status == OPTION
}


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Return the options of all commands, which the completion script contains."""
    with contextlib.redirect_stdout(io.StringIO()) as script:
        assert run_command(["completion", "bash"]) == 0
    return set(re.findall(r"--[a-z][a-z0-9.-]*", script.getvalue()))


@pytest.mark.parametrize(("name", "option"), sorted(TRANSLATED), ids=lambda text: text)
def test_hints_agree_with_the_tables_of_the_original_programs(name: str, option: str, options: set[str]) -> None:
    if f"--{name.replace('_', '-')}" in options:
        return  # an option of the same name; there is no hint
    assert option.split()[0] in [known.split()[0] for known in FOREIGN_FLAGS[name].split(" | ")]


def test_hints_name_existing_options(options: set[str]) -> None:
    named = {text.split()[0] for texts in FOREIGN_FLAGS.values() for text in texts.split(" | ")}
    assert {option for option in named if option.startswith("--")} <= options


def test_a_hint_prefers_options_that_are_valid() -> None:
    assert foreign_flag_hint("--hidden_size", ["--memory.hidden"]) == "; did you mean --memory.hidden?"
    assert "--torso.width or --memory.hidden" in foreign_flag_hint("--hidden-size=3", ["--lr"])
    assert foreign_flag_hint("--frobnicate", ["--lr"]) == ""


def test_the_tables_have_each_flag_once() -> None:
    for program in PROGRAMS.values():
        names = [_normalised(flag) for flag in program.flags]
        assert len(names) == len(set(names))


def _normalised(flag: Flag) -> str:
    return flag.name.replace("-", "_").lower()
