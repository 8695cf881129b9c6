"""Hints about flags of other programs."""

import contextlib
import io
import re

import pytest

from bestiary.cli.main import run_command
from bestiary.compat.flag_types import OPTION, Flag
from bestiary.compat.programs import PROGRAMS
from bestiary.config.components import REGISTRIES
from bestiary.config.foreign_components import FOREIGN_COMPONENTS, foreign_component_hint
from bestiary.config.foreign_flags import FOREIGN_FLAGS, foreign_flag_hint
from bestiary.config.toml import preset_paths

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


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        # Flags of Stable-Baselines3, CleanRL and RLlib, and words that users try.
        ("--buffer-size", "it corresponds to --algo.buffer-size"),
        ("--checkpoint-freq", "did you mean --save-every?"),
        ("--frameskip", "did you mean --frame-skip?"),
        ("--lstm", "did you mean --memory lstm?"),
        ("--popart", "did you mean --critic popart?"),
        ("--resume", "did you mean the command resume RUN?"),
        ("--repeat-action-probability", "did you mean --sticky?"),
        ("--timesteps", "did you mean --steps?"),
        ("--weight-decay", "no such option: the optimizers have no weight decay"),
        ("--algo.gamma", "did you mean --algo.discount?"),
        ("--memory.hidden_size", "did you mean --memory.hidden?"),
    ],
)
def test_flags_of_other_programs(flag: str, hint: str, options: set[str]) -> None:
    assert hint in foreign_flag_hint(flag, options - {"--algo.buffer-size", "--checkpoint"})


def test_a_hint_names_a_command_only_if_no_option_fits() -> None:
    assert foreign_flag_hint("--render", ["--show"]) == "; did you mean --show?"
    assert foreign_flag_hint("--render", ["--lr"]) == "; did you mean the command video RUN --show?"


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("torso", "impala", "--torso resnet"),
        ("agent", "lstm", "--memory lstm"),
        ("algo", "A2C", "--preset a2c"),
        ("algo", "dqn", "Bestiary has no dqn"),
        ("memory", "rnn", "--memory lstm or --memory gru"),
        ("memory", "lstn", ""),
    ],
)
def test_names_of_components_of_other_programs(kind: str, name: str, hint: str) -> None:
    found = foreign_component_hint(kind, name)
    assert hint in found
    assert bool(hint) == bool(found)


def test_hints_name_existing_components() -> None:
    for hints in FOREIGN_COMPONENTS.values():
        for hint in hints.values():
            for kind, name in re.findall(r"--(\w+) ([\w-]+)", hint):
                known = preset_paths() if kind == "preset" else REGISTRIES[kind]
                assert name in known, hint


def test_the_tables_have_each_flag_once() -> None:
    for program in PROGRAMS.values():
        names = [_normalised(flag) for flag in program.flags]
        assert len(names) == len(set(names))


def _normalised(flag: Flag) -> str:
    return flag.name.replace("-", "_").lower()
