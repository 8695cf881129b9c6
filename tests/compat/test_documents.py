"""Each command line of the documents is translated to the expected configuration or command."""

import pytest

from bestiary.cli.train_parser import parse_train
from bestiary.compat.translate import translate
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.config.toml import flatten
from bestiary.runs.option_sources import merge_sources
from tests.compat.documents import OTHERS, TRAININGS, Other, Training, program_and_arguments


@pytest.fixture(autouse=True)
def use_home_of_me(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BESTIARY_CORES", "10")


def resolve_words(words: tuple[str, ...]) -> Config:
    """Return the configuration of a training command."""
    assert words[0] == "train"
    given, _, _, _ = parse_train(list(words[1:]))
    return resolve(*merge_sources(given))


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: " ".join(training.text.split())[:150])
def test_training_commands_resolve_to_the_expected_configuration(training: Training) -> None:
    translation = translate(*program_and_arguments(training.text))
    (words,) = translation.commands
    assert training.words in " ".join(words)
    settings = flatten(resolve_words(words).tables())
    found = {key: settings.get(key) for key in training.config}
    assert found == training.config


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: " ".join(command.text.split())[:150])
def test_other_commands_are_translated(command: Other) -> None:
    translation = translate(*program_and_arguments(command.text))
    assert [" ".join(words) for words in translation.commands] == command.commands
    assert translation.starts


@pytest.mark.parametrize(
    ("preset", "command"),
    [
        ("fnn1-bislip", "--env-name warehouse --num-steps 1 --recurrent-policy"),
        ("fnn8-bislip", "--env-name warehouse --num-steps 8 --recurrent-policy"),
        ("gru-bislip", "--env-name warehouse --num-steps 8"),
        ("iam-bislip", "--env-name warehouse --num-steps 8 --IAM"),
        ("iam-breakout", "--env-name BreakoutNoFrameskip-v4 --num-processes 8 --num-env-steps 50000000 --IAM"),
    ],
)
def test_presets_have_the_configuration_of_the_commands(preset: str, command: str) -> None:
    # The time limit is listed in docs/migration.md; the other two options have no effect on learning.
    differs = ("log_every", "save_every", "env.time_limit")
    (words,) = translate("iam.main", command.split()).commands
    expected = flatten(resolve_words(words).tables())
    found = flatten(resolve_words(("train", "--preset", preset)).tables())
    assert {k: v for k, v in found.items() if k not in differs} == {
        k: v for k, v in expected.items() if k not in differs
    }
