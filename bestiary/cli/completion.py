"""Command `completion`: print a script with which a shell completes the commands, options and names of Bestiary.

The script is generated from the parsers of all commands and contains all names, so that the shell does not start Python
when it completes a word. The options of `train` depend on the chosen environment and components; the script contains
the options of all built-in environments and components.
"""

import argparse
import dataclasses
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bestiary import envs
from bestiary.cli.arguments import BOOLEAN_METAVAR, Parser, capture_parser
from bestiary.cli.listing import LISTS
from bestiary.cli.look import TOOLS
from bestiary.cli.main import COMMANDS
from bestiary.config.components import REGISTRIES
from bestiary.config.toml import preset_paths
from bestiary.config.training_options import Training
from bestiary.runs import zoo
from bestiary.runs.run import RunLocation
from bestiary.utils.errors import UserError
from bestiary.utils.options import flag_name, options_class, suggest

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


def completion(argv: list[str]) -> None:
    """Print the completion script of a shell."""
    parser = Parser(
        "completion", "Print a script with which a shell completes commands, options, names and paths of Bestiary."
    )
    parser.add_argument("shell", metavar="SHELL", help=f"name of the shell: {', '.join(SCRIPTS)}")
    shell = parser.parse_strictly(argv).shell
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: unknown shell; expected one of {', '.join(SCRIPTS)}{_nearest(shell)}")
    print(SCRIPTS[shell](_list_commands()), end="")


def _nearest(shell: str) -> str:
    """Return a hint with the most similar shell name. `shell` may also be a path such as /bin/bash."""
    return suggest(shell.rsplit("/", 1)[-1], SCRIPTS, count=1)


# --- arguments of the commands ---


def _list_commands() -> list[Command]:
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
            yield name, [capture_parser(run, words) for words in selections]
        elif name in ("eval", "video", "export"):
            yield name, [capture_parser(run, ["--env", env]) for env in FAMILY_EXAMPLES]
        else:
            yield name, [capture_parser(run, [])]


def _argument(command: str, action: argparse.Action, choices: dict[str, tuple[str, ...]]) -> Argument:
    """Convert an argument of a parser to an Argument with the values to suggest.

    `choices` has the allowed values of options, by flag (see `_choices_by_flag`).
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
    elif metavar == "SHELL":
        words = tuple(SCRIPTS)
    elif metavar == BOOLEAN_METAVAR:
        words = ("on", "off")
    elif command == "train" and flags == ("--preset",):
        words = tuple(preset_paths())
    elif command == "train" and flags and (kind := flags[0].removeprefix("--")) in REGISTRIES:
        words = (*(("auto",) if kind == "torso" else ()), *REGISTRIES[kind])
        paths = "file"  # the user's own component is written file.py:Name
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


# --- scripts ---

BASH = """\
# Completion of bestiary for bash, written by: bestiary completion bash
_bestiary() {
    local i=$COMP_CWORD
    local cur="${COMP_WORDS[i]}"
    local command="" options="" words="" paths="" value="" prefix=""
    # Bash splits words at colons; join the parts of names such as procgen/maze:easy.
    while [ "$i" -ge 2 ]; do
        case "$cur" in
            :*) ;;
            *) case "${COMP_WORDS[i-1]}" in *:) ;; *) break ;; esac ;;
        esac
        i=$((i - 1))
        cur="${COMP_WORDS[i]}$cur"
    done
    local prev="${COMP_WORDS[i-1]}"
    if [ "$cur" = "=" ]; then
        cur=""
    elif [ "$prev" = "=" ]; then
        prev="${COMP_WORDS[i-2]}"
    fi
    COMPREPLY=()
    if [ "$i" -le 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$cur"))
        return 0
    fi
    command="${COMP_WORDS[1]}"
    if [ "$command" = look ] && [ "$i" -gt 2 ]; then
        command="look ${COMP_WORDS[2]}"
    fi
    case "$command" in
@CASES@
    esac
    # If the previous word is an option whose values the script does not know (for example a number), suggest nothing.
    if [ "$value" = unknown ]; then
        return 0
    fi
    case "$cur" in
        -*) [ "$value" = required ] || words="$options" paths="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    local IFS=$'\\n'
    if [ "${#COMPREPLY[@]}" -eq 0 ] && [ -n "$paths" ]; then
        compopt -o filenames 2>/dev/null  # bash only: add a slash to folders
    fi
    case "$paths" in
        file) COMPREPLY=("${COMPREPLY[@]}" $(compgen -f -- "$cur")) ;;
        folder) COMPREPLY=("${COMPREPLY[@]}" $(compgen -d -- "$cur")) ;;
    esac
    # Bash replaces only the part after the last colon.
    case "$cur" in
        *:*)
            case "${COMP_WORDBREAKS-}" in
                *:*)
                    prefix="${cur%"${cur##*:}"}"
                    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
                    ;;
            esac
            ;;
    esac
    return 0
}
complete -F _bestiary bestiary
"""

ZSH = """\
# Completion of bestiary for zsh, written by: bestiary completion zsh
# zsh runs the completion function of bash.
(( $+functions[compdef] )) || { autoload -U compinit && compinit }
autoload -U bashcompinit && bashcompinit
"""


def _bash_script(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        options = " ".join(flag for option in command.options for flag in option.flags)
        cases += [
            f'        "{command.name}")',
            f'            options="{options}"',
            f'            words="{" ".join(command.positional.words)}"',
            f'            paths="{command.positional.paths}"',
            '            case "$prev" in',
            *(f"                {line}" for line in _bash_values(command.options)),
            "            esac",
            "            ;;",
        ]
    names = " ".join(_command_names())
    return BASH.replace("@COMMANDS@", names).replace("@CASES@", "\n".join(cases))


def _bash_values(options: Iterable[Argument]) -> Iterator[str]:
    """Yield one line of the case statement for each group of options that accept the same values."""
    groups: dict[tuple[tuple[str, ...], str, str], list[str]] = {}
    for option in options:
        if option.takes_value != "never":
            groups.setdefault((option.words, option.paths, option.takes_value), []).extend(option.flags)
    for (words, paths, takes_value), flags in groups.items():
        values = " ".join(words)
        if takes_value == "optional":
            effect = f'words="{values} $words"'
        elif words or paths:
            effect = f'words="{values}" paths="{paths}" value=required'
        else:
            effect = "value=unknown"
        yield f"{'|'.join(flags)}) {effect} ;;"


def _zsh_script(commands: list[Command]) -> str:
    return ZSH + _bash_script(commands).split("\n", 1)[1]


def _fish_script(commands: list[Command]) -> str:
    lines = [
        "# Completion of bestiary for fish, written by: bestiary completion fish",
        "complete -c bestiary -f",
        f"complete -c bestiary -n __fish_use_subcommand -a '{' '.join(_command_names())}'",
    ]
    for command in commands:
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.name.split())
        if command.name == "look":
            seen += f"; and not __fish_seen_subcommand_from {' '.join(TOOLS)}"
        prefix = f"complete -c bestiary -n '{seen}'"
        if command.positional.words or command.positional.paths:
            lines.append(f"{prefix}{_fish_values(command.positional)}")
        for option in command.options:
            names = " ".join(f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags)
            value = " -r" if option.takes_value == "always" else ""
            lines.append(f"{prefix} {names}{value}{_fish_values(option)}")
    return "\n".join(lines) + "\n"


def _fish_values(argument: Argument) -> str:
    """Return the flags of fish's command `complete` that suggest the values of an argument."""
    words = " ".join(argument.words)
    if argument.paths == "folder":
        words = f"{words} (__fish_complete_directories)".strip()
    files = " -F" if argument.paths == "file" else ""
    return files + (f" -a '{words}'" if words else "")


def _command_names() -> list[str]:
    return [*COMMANDS, "help", "version"]


SCRIPTS = {"bash": _bash_script, "zsh": _zsh_script, "fish": _fish_script}
