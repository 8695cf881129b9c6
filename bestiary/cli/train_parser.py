"""Parser of `bestiary train`.

The available flags depend on the chosen environment and components, so the command line is read twice. The first pass
finds the names of the environment, preset, config file and components. Then their options are added to the parser, and
the second pass reads all flags. `config/resolve.py` checks the values later and reports all problems together.
"""

import argparse
import dataclasses
import re
from typing import Any

from bestiary.cli.arguments import Parser, add_trust_code
from bestiary.cli.option_flags import BOOLEAN_METAVAR, add_option_flags
from bestiary.config.component_kinds import COMPONENT_TITLES
from bestiary.config.components import REGISTRIES
from bestiary.config.logger_options import merged_options
from bestiary.config.resolve import look_up
from bestiary.config.training_options import Training
from bestiary.envs.registry import ENV_FAMILIES, STANDALONE_ENVS
from bestiary.runs.option_sources import merge_sources
from bestiary.runs.run import RunLocation
from bestiary.utils.errors import UserError
from bestiary.utils.options import BOOLEANS, options_class, parse_options


def parse_train(argv: list[str]) -> tuple[dict[str, Any], dict[str, Any], bool, bool]:
    """Parse the command line of `train`.

    Return the options of the run as a flat dict, the fields of its RunLocation, and whether --dry-run and --trust-code
    are given. The options of the run are not checked yet.
    """
    parser = _full_parser(argv)
    if not {"-h", "--help"}.isdisjoint(argv):
        parser.print_help()
        raise SystemExit(0)
    given = read_flags(argv, parser)
    dry_run = given.pop("dry_run", False)
    trust_code = given.pop("trust_code", False)
    problems: list[str] = []
    location = {f.name: given.pop(f.name) for f in dataclasses.fields(RunLocation) if f.name in given}
    parse_options(RunLocation, location, "", problems)
    if problems:
        raise UserError(*problems)
    return given, location, dry_run, trust_code


def read_flags(argv: list[str], parser: Parser) -> dict[str, Any]:
    """Return {option: value as the user wrote it} for all flags. The key "env" contains the names of the environments.

    Unknown flags are included. `resolve` later reports them together with all other problems.
    """
    given: dict[str, Any] = {}
    env_names: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            continue
        if word.startswith("-") and not word.startswith("--"):
            raise UserError(f"unknown option {word}; options start with two hyphens, for example --seed 3")
        if not word.startswith("--"):
            env_names.append(word)
            continue
        name, equals, value = word.partition("=")
        if name == "--env":  # the names of environments may follow this flag, as in other commands
            env_names += [value] if equals else []
            continue
        action = parser._option_string_actions.get(name)
        key = name.removeprefix("--").replace("-", "_") if action is None else action.dest
        earlier = given.get(key)
        if equals:
            given[key] = value
        elif words and _takes_value(action, words[0]):
            given[key] = words.pop(0)
        elif action is None:
            given[key] = True  # in the first pass, all flags of components are unknown
        elif action.const is not None:
            given[key] = action.const
        else:
            raise UserError(f"{name} needs a value")
        if earlier is not None and isinstance(action, argparse._AppendAction):
            given[key] = f"{earlier},{given[key]}"
    return {**given, "env": env_names} if env_names else given


def _takes_value(action: argparse.Action | None, word: str) -> bool:
    """Return whether `word`, the next word of the command line, is the value of a flag.

    `action` describes the flag; None: the flag is unknown.
    """
    if word.startswith("--"):
        return False
    if action is None:
        return not _looks_like_env(word)
    if action.nargs == "?":
        return word in BOOLEANS if action.metavar == BOOLEAN_METAVAR else not _looks_like_env(word)
    return action.nargs != 0


def _looks_like_env(word: str) -> bool:
    """Return whether a word of the command line is the name of an environment, not the value of a flag."""
    return ".py:" in word or re.split("[/:]", word)[0] in {**ENV_FAMILIES, **STANDALONE_ENVS}


def _base_parser() -> Parser:
    """Return a parser without the options of environments and components, which depend on the command line."""
    parser = Parser(
        "train",
        "Train a new agent and write a run folder. To list the options of an environment and of components, give their "
        "names together with --help, for example: bestiary train atari/Pong --memory lstm --help",
        usage="bestiary train ENV [ENV ...] [options]",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not train; print the complete config, with the origin of each value, and the size of the network",
    )
    add_trust_code(parser)
    group = parser.add_argument_group("environment and components")
    group.add_argument(
        "env",
        nargs="*",
        metavar="ENV",
        help="environment, for example atari/Pong, procgen/maze:easy, warehouse, gymnasium/CartPole-v1, toy/recall or "
        "your own my_env.py:Maze; if several are given, one agent is trained on all of them",
    )
    group.add_argument(
        "--preset",
        metavar="NAME",
        help="use the options of a preset, usually a published experiment (bestiary list presets)",
    )
    group.add_argument(
        "--config", metavar="FILE", help="use the options in a TOML file, for example config.toml of another run"
    )
    for kind, registry in REGISTRIES.items():
        names = ", ".join(["auto", *registry] if kind == "torso" else registry)
        group.add_argument(
            f"--{kind}", metavar="NAME", help=f"{COMPONENT_TITLES[kind]}: {names}, or your own file.py:Name"
        )
    by_group: dict[str, list[str]] = {}
    for field in dataclasses.fields(Training):
        by_group.setdefault(field.metadata["group"], []).append(field.name)
    for title, options in by_group.items():
        add_option_flags(parser.add_argument_group(title), Training, "", only=options)
    add_option_flags(parser.add_argument_group("location of the run"), RunLocation, "")
    return parser


def _full_parser(argv: list[str]) -> Parser:
    """Return a parser that also has the options of the environment and components chosen on the command line.

    If an environment or component is unknown, no options are added for it, and `resolve` reports its name later.
    """
    parser = _base_parser()
    given = read_flags(argv, parser)
    chosen, sources = merge_sources(given, trust_code=given.pop("trust_code", False))
    choices = look_up(chosen, sources, [])
    if choices.env_spec is not None:
        group = parser.add_argument_group(f"environment {choices.env_names[0]}")
        add_option_flags(group, choices.env_spec.options, "env")
    for kind, component in choices.classes.items():
        group = parser.add_argument_group(f"{kind} {choices.names[kind]}")
        add_option_flags(group, options_class(component), kind, defaults=choices.defaults)
    if choices.loggers:
        group = parser.add_argument_group(f"logger {', '.join(choices.loggers)}")
        add_option_flags(group, merged_options(choices.loggers.values()), "logger")
    return parser
