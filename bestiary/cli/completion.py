"""Command `completion`: print a script with which a shell completes the commands, options and names of Bestiary.

The script contains all options and names (see `completable.py`), so that the shell does not start Python when it
completes a word.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bestiary.cli.arguments import Parser
from bestiary.cli.look import TOOLS
from bestiary.cli.main import COMMANDS
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

if TYPE_CHECKING:
    from bestiary.cli.completable import Argument, Command


def completion(argv: list[str]) -> None:
    """Print the completion script of a shell."""
    parser = Parser(
        "completion", "Print a script with which a shell completes commands, options, names and paths of Bestiary."
    )
    parser.add_argument("shell", metavar="SHELL", help=f"name of the shell: {', '.join(SCRIPTS)}")
    shell = parser.parse_strictly(argv).shell
    if shell not in SCRIPTS:
        raise UserError(f"completion {shell}: unknown shell; expected one of {', '.join(SCRIPTS)}{_nearest(shell)}")

    from bestiary.cli.completable import list_commands

    print(SCRIPTS[shell](list_commands()), end="")


def _nearest(shell: str) -> str:
    """Return a hint with the most similar shell name. `shell` may also be a path such as /bin/bash."""
    return suggest(shell.rsplit("/", 1)[-1], SCRIPTS, count=1)


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


def _bash_script(commands: "list[Command]") -> str:
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


def _bash_values(options: "Iterable[Argument]") -> Iterator[str]:
    """Group options that accept the same values. Yield one line of the case statement in BASH for each group."""
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


def _zsh_script(commands: "list[Command]") -> str:
    return ZSH + _bash_script(commands).split("\n", 1)[1]


def _fish_script(commands: "list[Command]") -> str:
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


def _fish_values(argument: "Argument") -> str:
    """Return flags for the command `complete` of fish: they make fish suggest the values of an argument."""
    words = " ".join(argument.words)
    if argument.paths == "folder":
        words = f"{words} (__fish_complete_directories)".strip()
    files = " -F" if argument.paths == "file" else ""
    return files + (f" -a '{words}'" if words else "")


def _command_names() -> list[str]:
    return [*COMMANDS, "help", "version"]


SCRIPTS = {"bash": _bash_script, "zsh": _zsh_script, "fish": _fish_script}
