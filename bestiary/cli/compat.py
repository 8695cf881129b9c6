"""Command `compat`: translate the command line of an original program and run the result.

An original program is a program, such as PolyBeast of TorchBeast, whose command lines Bestiary can translate.
"""

import argparse

from bestiary.cli.arguments import Parser
from bestiary.cli.main import call_command
from bestiary.compat.flag_types import IGNORED, REFUSED, Flag, Program
from bestiary.compat.programs import PROGRAMS
from bestiary.compat.translate import find_program, format_command, translate
from bestiary.utils.console import note


def compat_command(argv: list[str]) -> None:
    """Print the Bestiary commands that correspond to the command line of an original program, and run them."""
    program = next((word for word in argv if word in PROGRAMS), None)
    if program is not None and not {"-h", "--help"}.isdisjoint(argv[argv.index(program) :]):
        print(describe_flags(find_program(program)))
        return
    a = _parser().parse_strictly(argv)
    words, cluster = _own_options(a.arguments, a.cluster)
    translation = translate(a.program, [word for word in words if word != "--dry-run"], cluster)
    for command in translation.commands:
        print(format_command(command), flush=True)
    for line in translation.differences:
        note(f"note: {line}")
    if a.dry_run or "--dry-run" in words or not translation.starts:
        return
    for command in translation.commands:
        call_command(command)


def _parser() -> Parser:
    parser = Parser(
        "compat",
        "Accept the command line of an original program, print the equivalent Bestiary command and the differences "
        "that matter, and run this command. The defaults are those of the original. PROGRAM is the word after python "
        "-m. The page docs/migration.md lists the flags of all programs.",
        usage="bestiary compat [--dry-run] [--cluster ADDRESS] PROGRAM [ARGUMENT ...]",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and the differences, and stop")
    parser.add_argument(
        "--cluster",
        metavar="ADDRESS",
        help="train on a Ray cluster, with one actor process per actor or environment server of the original, if "
        "possible (local: start a cluster on this machine for the run, with at most one actor process per core; auto: "
        "use the cluster that runs on this machine; or host:port)",
    )
    parser.add_argument("program", metavar="PROGRAM", help=f"original program: {', '.join(PROGRAMS)}")
    arguments = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="flags of the original program"
    )
    arguments.required = False  # argparse would otherwise name it as missing if PROGRAM is missing
    return parser


def _own_options(words: list[str], cluster: str | None) -> tuple[list[str], str | None]:
    """Remove --cluster from `words`, the words after PROGRAM. Return the remaining words and the value of --cluster.

    `cluster` is the value that was given before PROGRAM, or None.
    """
    remaining: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--cluster="):
            cluster = word.partition("=")[2]
        elif word == "--cluster" and rest:
            cluster = rest.pop(0)
        else:
            remaining.append(word)
    return remaining, cluster


def describe_flags(program: Program) -> str:
    """Return the help text of an original program: each flag with its default and the corresponding Bestiary option."""
    lines = [f"usage: bestiary compat {program.name} [--dry-run] [FLAG ...]", ""]
    width = max(len(flag.name) for flag in program.flags) + 4
    lines += [f"  {'--' + flag.name:<{width}}{_describe(flag)}" for flag in program.flags]
    return "\n".join(lines)


def _describe(flag: Flag) -> str:
    text = {IGNORED: "accepted", REFUSED: "refused"}.get(flag.status, flag.option.replace("`", ""))
    default = "" if flag.kind is bool or flag.default is None else f" (default: {flag.default})"
    return "; ".join(part for part in (text, flag.difference) if part) + default
