"""Translate the command line of an original program to Bestiary commands, by means of the tables in PROGRAMS."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bestiary.compat.flag_types import IGNORED, OPTION, REFUSED, Flag, Mode, Program, Values, Words
from bestiary.compat.programs import PROGRAMS
from bestiary.utils.errors import UserError
from bestiary.utils.options import check_limits, convert, suggest

LINE_WIDTH = 110  # maximum width of a printed command, in characters


@dataclass(frozen=True)
class Translation:
    """The result of a translation."""

    commands: tuple[tuple[str, ...], ...]  # words of each Bestiary command, without the word "bestiary"
    differences: tuple[str, ...]  # messages about how Bestiary differs from the original
    starts: bool  # False: the commands are only printed


def translate(name: str, argv: Sequence[str], cluster: str | None = None) -> Translation:
    """Translate the arguments of an original program to Bestiary commands.

    Args:
        name: name of the program, for example torchbeast.monobeast.
        argv: its arguments.
        cluster: value of --cluster for the training, or None to train without a cluster.

    Raises:
        UserError: the program, a flag or a value is unknown, or Bestiary has nothing that corresponds to a flag.
    """
    program = find_program(name)
    if cluster is not None and not program.supports_cluster:
        raise UserError(f"--cluster {cluster}: {name} trains no agent or uses only one process; remove --cluster")
    given, ignored = parse_flags(program, argv)
    mode = _find_mode(program, given)
    values = _with_defaults(program, given, mode, cluster)
    shared = Words((), tuple(ignored))
    for rule in mode.rules:
        shared += rule(values)
    shared += Words(tuple(word for words, _ in mode.fixed for word in shlex.split(words)))
    command = " ".join(mode.command)
    for flag in program.flags:
        shared += _translate_flag(flag, values, command)
    shared += _unused_flags(program, values, command)
    shared += Words((), mode.differences)
    each = mode.each(values) if mode.each is not None else (Words(),)
    commands = tuple((*mode.command, *extra.words, *shared.words) for extra in each) if mode.command else ()
    differences = (*(line for extra in each for line in extra.differences), *shared.differences)
    starts = mode.starts or (cluster is not None and mode.runs_with_cluster)
    return Translation(commands, tuple(dict.fromkeys(differences)), starts)


def find_program(name: str) -> Program:
    """Return the table of a program. Raise UserError if the program is unknown."""
    if name not in PROGRAMS:
        # `name` may be the last part of a module name (polybeast) or a path (torchbeast/monobeast.py).
        text = name.removesuffix(".py").replace("/", ".")
        ends = [known for known in PROGRAMS if f".{known}".endswith(f".{text}") or f".{text}".endswith(f".{known}")]
        hint = f"; did you mean {' or '.join(ends)}?" if ends else suggest(text, PROGRAMS)
        if text.startswith("python"):
            hint = "; leave out the words before the program, for example python -m"
        raise UserError(f"compat {name}: unknown program; expected one of {', '.join(PROGRAMS)}{hint}")
    return PROGRAMS[name]


def format_command(words: Sequence[str]) -> str:
    """Return a command that can be copied to a shell. Long commands are continued on the next line."""
    lines = ["bestiary"]
    pieces: list[str] = []
    for word in words:
        # A flag and its value stay on one line.
        if pieces and not word.startswith("--") and pieces[-1].startswith("--") and " " not in pieces[-1]:
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    for piece in pieces:
        if len(lines[-1]) + len(piece) + 3 > LINE_WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {piece}"
    return "\n".join(lines)


# --- reading the command line of the original ---


def parse_flags(program: Program, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the converted values of the given flags, and the messages about ignored words (none or one)."""
    table = {_normalise(flag.name): flag for flag in program.flags}
    given: dict[str, Any] = {}
    extra: list[str] = []
    problems: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            extra.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        flag = table.get(_normalise(name))
        if flag is None:
            problems.append(f"--{name}: unknown flag of {program.name}{_hint(name, program)}")
            if words and not words[0].startswith("--"):
                words.pop(0)  # probably its value
        elif flag.kind is bool:
            if equals:
                problems.append(f"{word}: --{flag.name} is a switch and has no value")
            given[flag.name] = True
        elif not equals and (not words or words[0].startswith("--")):
            problems.append(f"--{flag.name} needs a value")
        else:
            text = text if equals else words.pop(0)
            while flag.several and words and not words[0].startswith("--"):
                text += f" {words.pop(0)}"
            try:
                given[flag.name] = convert(text, flag.kind)
                check_limits(given[flag.name], {"choices": flag.choices})
            except ValueError as error:
                problems.append(f"--{flag.name} {text}: {error}")
    if extra and not program.extra_words:
        problems.append(f"unexpected argument {extra[0]}; {program.name} has only flags")
    if problems:
        raise UserError(*problems)
    return given, [f"{' '.join(extra)}: ignored; {program.extra_words}"] if extra else []


def _hint(name: str, program: Program) -> str:
    """Return a hint about `name`, which is not a flag of the original program.

    If `name` is an option of Bestiary, the hint is the flag of the original program with the same effect. Otherwise the
    hint lists flags of the original program with similar names.
    """
    same = [flag.name for flag in program.flags if flag.option.strip("`").split() == [f"--{name}"]]
    return (
        f"; did you mean --{same[0]}?" if same else suggest(f"--{name}", [f"--{flag.name}" for flag in program.flags])
    )


def _normalise(name: str) -> str:
    return name.replace("-", "_").lower()


def _find_mode(program: Program, given: Mapping[str, Any]) -> Mode:
    name = given.get("mode", program.default_mode)
    if name not in program.modes:
        raise UserError(
            f"--mode {name}: {program.name} has the modes {', '.join(program.modes)}{suggest(name, program.modes)}"
        )
    return program.modes[name]


def _with_defaults(program: Program, given: Mapping[str, Any], mode: Mode, cluster: str | None) -> Values:
    """Return the values of all flags. Flags that are not given have the default value of the detected fork."""
    forks = {flag.fork: flag.name for flag in program.flags if flag.name in given and flag.fork}
    if mode.fork:
        forks.setdefault(mode.fork, "mode")
    if len(forks) > 1:
        flags = ", ".join(f"--{name} (fork {fork})" for fork, name in forks.items())
        raise UserError(f"{flags}: these flags belong to different forks of {program.name}; remove one of them")
    fork = next(iter(forks), "")
    variants = program.detect({**given, "fork": fork})
    values = {flag.name: given.get(flag.name, _default(flag, variants)) for flag in program.flags}
    return Values(values, frozenset(given), program.name, variants, cluster)


def _default(flag: Flag, variants: Sequence[str]) -> Any:
    return next((flag.defaults[variant] for variant in variants if variant in flag.defaults), flag.default)


# --- translation of single flags ---


def _translate_flag(flag: Flag, values: Values, command: str) -> Words:
    """Return the words for one flag and, if the user gave the flag, a message about how Bestiary differs.

    There are words only if `flag.status` is OPTION. Flags of status JOINT are translated by the rules of the mode.
    """
    value, is_given = values[flag.name], flag.name in values.given
    if flag.status == REFUSED and is_given and value != flag.default:
        raise UserError(f"{_shown(flag, value)}: {flag.difference}")
    if command not in flag.commands and flag.status != IGNORED:
        return Words()
    differences = (f"{_shown(flag, value)}: {flag.difference}",) if is_given and flag.difference else ()
    if flag.status != OPTION or value is None or value is False:
        return Words((), differences)
    words = shlex.split(flag.option) if flag.kind is bool else (flag.option, flag.convert(value))
    return Words(tuple(words), differences)


def _unused_flags(program: Program, values: Values, command: str) -> Words:
    """Return a message that names the given flags that do not matter for this command, such as --lr for a test."""
    unused = [
        flag.name
        for flag in program.flags
        if flag.name in values.given and flag.status != IGNORED and command not in flag.commands
    ]
    if not unused or not command:
        return Words()
    names = ", ".join(f"--{name}" for name in unused)
    return Words((), (f"{names}: not needed; bestiary {command} reads the configuration of the training",))


def _shown(flag: Flag, value: Any) -> str:
    return f"--{flag.name}" if flag.kind is bool else f"--{flag.name} {value}"
