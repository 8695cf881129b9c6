"""What a shell can complete: the options of each command, and the values to suggest for them.

Options and values are read from the parsers of the commands. The options of `train` depend on the chosen environment
and components. Therefore this module builds parsers for one environment of each family and for all built-in components,
and combines their options. For this, it imports all component classes.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from bestiary import envs
from bestiary.cli.arguments import Parser, capture_parser
from bestiary.cli.completion import SCRIPTS
from bestiary.cli.listing import LISTS
from bestiary.cli.look import TOOLS
from bestiary.cli.main import COMMANDS
from bestiary.cli.option_flags import BOOLEAN_METAVAR
from bestiary.compat.programs import PROGRAMS
from bestiary.config.components import REGISTRIES
from bestiary.config.toml import preset_paths
from bestiary.config.training_options import Training
from bestiary.loggers import LOGGERS
from bestiary.runs import zoo
from bestiary.runs.run import RunLocation
from bestiary.utils.options import flag_name, options_class

# One environment of each family. All environments of a family have the same options.
FAMILY_EXAMPLES = ("atari/Pong", "procgen/maze", "gymnasium/CartPole-v1", "toy/catch", "warehouse")
FILE_METAVARS = ("FILE", "ENV", "RUN")
FOLDER_METAVARS = ("FOLDER", "DIR")


@dataclass(frozen=True)
class Argument:
    """The values that a shell can suggest for an option or a positional argument."""

    flags: tuple[str, ...] = ()  # all spellings of the option; empty for a positional argument
    words: tuple[str, ...] = ()  # known values
    paths: str = ""  # whether to suggest paths: "file", "folder" or "" (no paths)
    takes_value: str = "always"  # "always", "optional" or "never"


@dataclass(frozen=True)
class Command:
    """The arguments of a command, for example "train" or "look saliency"."""

    name: str
    options: tuple[Argument, ...]
    positional: Argument


def list_commands() -> list[Command]:
    """Return all commands with their arguments, which are read from the parsers of the commands."""
    commands = []
    choices = _choices_by_flag()
    for name, parsers in _parsers_by_command():
        options: dict[tuple[str, ...], Argument] = {}
        positional = Argument()
        for action in (action for parser in parsers for action in parser._actions):
            if action.help == argparse.SUPPRESS:
                continue
            argument = _argument(name, action, choices)
            if argument.flags:
                options.setdefault(argument.flags, argument)
            else:
                words = tuple(dict.fromkeys((*positional.words, *argument.words)))
                positional = Argument((), words, positional.paths or argument.paths)
        commands.append(Command(name, tuple(options.values()), positional))
    tools = Argument(words=tuple(TOOLS))
    return [*commands, Command("look", (Argument(("--help",), takes_value="never"),), tools)]


def _parsers_by_command() -> Iterator[tuple[str, list[Parser]]]:
    """Yield each command and its parsers. A command may build different parsers for different environments."""
    for name, (module, function) in COMMANDS.items():
        run = getattr(importlib.import_module(f"bestiary.cli.{module}"), function)
        if name == "look":
            for tool, (run_tool, _) in TOOLS.items():
                selections = [[]] if tool == "filters" else [["--env", env] for env in FAMILY_EXAMPLES]
                yield f"look {tool}", [capture_parser(run_tool, words) for words in selections]
        elif name == "train":
            selections = [[env, "--torso", "mlp"] for env in FAMILY_EXAMPLES]
            selections += [[f"--{kind}", key] for kind, registry in REGISTRIES.items() for key in registry]
            selections += [["--logger", name] for name in LOGGERS]
            yield name, [capture_parser(run, words) for words in selections]
        elif name in ("eval", "video", "export", "intervene"):
            yield name, [capture_parser(run, ["--env", env]) for env in FAMILY_EXAMPLES]
        else:
            yield name, [capture_parser(run, [])]


def _argument(command: str, action: argparse.Action, choices: dict[str, tuple[str, ...]]) -> Argument:
    """Convert an argument of a parser to an Argument. Its values are the values that a shell suggests.

    `choices` maps flags to the allowed values of their options (see `_choices_by_flag`).
    """
    flags = tuple(action.option_strings)
    words = tuple(map(str, action.choices or ()))
    for flag in flags:
        words = words or choices.get(flag, ())
    metavar = str(action.metavar)
    paths = ""
    if metavar in FILE_METAVARS:
        paths = "file"
    elif metavar in FOLDER_METAVARS:
        paths = "folder"
    if metavar == "ENV":
        words = tuple(name for name in LISTS["envs"]() if ".py:" not in name)
    elif metavar == "RUN":
        words = tuple(zoo.agent_names())
    elif metavar == "PROGRAM":
        words = tuple(PROGRAMS)
    elif metavar == "SHELL":
        words = tuple(SCRIPTS)
    elif metavar == BOOLEAN_METAVAR:
        words = ("on", "off")
    elif command == "train" and flags == ("--preset",):
        words = tuple(preset_paths())
    elif command == "train" and flags and (kind := flags[0].removeprefix("--")) in REGISTRIES:
        words = (*(("auto",) if kind == "torso" else ()), *REGISTRIES[kind])
        paths = "file"  # for components in users' files, written path/to/file.py:Name
    elif flags == ("--logger",):
        words, paths = tuple(LOGGERS), "file"
    takes_value = "always"
    if action.nargs == 0:
        takes_value = "never"
    elif flags and action.nargs == "?":
        takes_value = "optional"
    return Argument(flags, words, paths, takes_value)


def _choices_by_flag() -> dict[str, tuple[str, ...]]:
    """Return {flag: allowed values} for all options whose dataclass declares the allowed values."""
    schemas: list[tuple[str, type]] = [("", Training), ("", RunLocation)]
    schemas += [("env", envs.lookup_env(name).options) for name in FAMILY_EXAMPLES]
    schemas += [(kind, options_class(component)) for kind, names in REGISTRIES.items() for component in names.values()]
    found: dict[str, tuple[str, ...]] = {}
    for kind, schema in schemas:
        for field in dataclasses.fields(schema):
            flag = flag_name(kind, field)
            found[flag] = tuple(dict.fromkeys((*found.get(flag, ()), *field.metadata.get("choices", ()))))
    return found
