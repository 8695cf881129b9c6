"""Help texts of the command line."""

import dataclasses

import pytest

from bestiary.cli.main import COMMANDS, USAGE, run_command
from bestiary.config.training_options import Training


def command(*words: str) -> int:
    return run_command(list(words))


def test_train_help_has_groups_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command("train", "atari/Pong", "--memory", "lstm", "--help")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())  # the help text is wrapped at the width of the terminal
    for group in ("training:", "algo impala:", "memory lstm:", "torso shallow:", "environment atari/Pong:"):
        assert group in text
    assert "--lr X" in text
    assert "(default: 0.0005)" in text
    assert command("--help") == 0
    assert command() == 2


def train_help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        command("train", *words, "--help")
    return " ".join(capsys.readouterr().out.split())


def test_train_help_shows_the_defaults_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    def shown_discount(text: str) -> str:
        return text.partition("--algo.discount")[2].partition("default: ")[2].partition(")")[0]

    assert shown_discount(train_help(capsys, "toy/catch", "--algo", "ppo")) == "0.99"
    assert shown_discount(train_help(capsys, "warehouse", "--algo", "ppo")) == "0.95"


def test_train_help_lists_only_components_of_the_agent(capsys: pytest.CaptureFixture[str]) -> None:
    assert "torso shallow:" in train_help(capsys, "atari/Pong")
    text = train_help(capsys, "atari/Pong", "--agent", "aaa")
    assert "agent aaa:" in text
    assert "torso shallow:" not in text


def test_train_help_lists_the_torso_if_a_flag_of_the_environment_has_no_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "torso mlp:" in train_help(capsys, "warehouse", "--legacy")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_is_in_the_overview(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"\n  {name} " in USAGE
    try:
        status = command(name, "--help")
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 0
    assert f"usage: bestiary {name}" in capsys.readouterr().out


@pytest.mark.parametrize("tool", ["saliency", "attention", "filters", "actions"])
def test_each_interpretability_tool_has_help(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command("look", tool, "--help")
    assert stop.value.code == 0
    assert f"usage: bestiary look {tool}" in capsys.readouterr().out


def test_each_training_option_is_in_a_help_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(field.metadata["group"] for field in dataclasses.fields(Training))
    with pytest.raises(SystemExit):
        command("train", "--help")
    text = capsys.readouterr().out
    assert all(f"{field.metadata['group']}:" in text for field in dataclasses.fields(Training))


def test_help_names_the_runtimes_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("train", "--help")
    help_of_option = capsys.readouterr().out.partition("--actor-threads")[2].partition("--actor-device")[0]
    assert "only with --runtime local" in " ".join(help_of_option.split())
