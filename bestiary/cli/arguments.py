"""Argument parsing: the parser class of all commands, and arguments that several commands share."""

import argparse
import textwrap
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from bestiary.config.foreign_flags import foreign_flag_hint
from bestiary.utils.errors import UserError
from bestiary.utils.options import check_limits, convert, parse_range, suggest


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter for lines of 120 characters. It does not break lines at hyphens, so option names stay complete."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36, width=120)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Argument parser that checks the limits of numbers. It raises UserError if an argument is invalid."""

    def __init__(self, command: str, description: str | None = None, usage: str | None = None):
        super().__init__(
            prog=f"bestiary {command}",
            description=description,
            usage=usage,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file: Any = None) -> None:
        """Print the help text. If `capture_parser` has called the command, store this parser and print nothing."""
        captured = _captured_parsers.get()
        if captured is None:
            super().print_help(file)
        else:
            captured.append(self)

    def add_integer(
        self, flag: str, help: str, *, default: int | None = None, low: int = 0, metavar: str = "N"
    ) -> None:
        """Add an option whose value is an integer >= `low`. Users may write suffixes, for example 200k or 5M."""
        self._add_number(flag, int, {"low": low}, help, default, metavar)

    def add_float(
        self,
        flag: str,
        help: str,
        *,
        default: float | None = None,
        low: float | None = None,
        high: float | None = None,
        above: float | None = None,
        metavar: str = "X",
    ) -> None:
        """Add an option whose value is a number. Optional limits: low <= value <= high, and value > above."""
        self._add_number(flag, float, {"low": low, "high": high, "above": above}, help, default, metavar)

    def _add_number(
        self, flag: str, kind: type, limits: Mapping[str, Any], help: str, default: float | None, metavar: str
    ) -> None:
        text = help if default is None else f"{help} (default: {default:,})"
        parse = partial(parse_number, flag, kind, limits)
        self.add_argument(flag, type=parse, default=default, metavar=metavar, help=text)

    def parse_strictly(self, argv: list[str]) -> argparse.Namespace:
        """Parse all arguments. If an argument is unknown, raise UserError with a suggestion of similar options."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            unknown_flags = [
                f"unknown option {word}{foreign_flag_hint(word, flags) or suggest(word, flags)}"
                for word in unknown
                if word.startswith("--")
            ]
            raise UserError(*(unknown_flags or [f"unexpected argument {word}" for word in unknown]))
        return arguments


# Parsers whose help was requested inside `capture_parser`; None outside of it.
_captured_parsers: ContextVar[list[Parser] | None] = ContextVar("captured_parsers", default=None)


def capture_parser(command: Callable[[list[str]], None], argv: list[str]) -> Parser:
    """Return the parser that a command builds for these arguments, without running the command.

    The command is called with --help. It adds all arguments to its parser, calls `Parser.print_help` and exits.
    During this call, `Parser.print_help` stores the parser instead of printing the help.
    """
    captured: list[Parser] = []
    token = _captured_parsers.set(captured)
    try:
        command([*argv, "--help"])
    except SystemExit:
        pass
    finally:
        _captured_parsers.reset(token)
    (parser,) = captured
    return parser


def parse_number(flag: str, kind: type, limits: Mapping[str, Any], text: str) -> Any:
    """Convert `text`, the value of the option `flag`, to a number. Raise UserError if it is invalid."""
    try:
        value = convert(text, kind)
        check_limits(value, limits)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error
    return value


def parse_axis_range(flag: str, text: str) -> tuple[float, float]:
    """Return the limits (low, high) of a range such as 2M:4M. `text` is the value of the option `flag`."""
    try:
        return parse_range(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error


def none_if_invalid(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, or None if it raises UserError."""
    try:
        return function()
    except UserError:
        return None


# --- arguments that several commands share ---


def add_run_argument(parser: Parser, several: bool = False) -> None:
    """Add the positional argument RUN (with `several`: one or more runs) and the option --trust-code."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+" if several else None,
        help=f"run folder{'s' if several else ''}, for example runs/latest, or zoo/NAME for an agent of the zoo",
    )
    add_trust_code(parser)


def add_trust_code(parser: Parser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="execute plug-ins (Python files with components) given by a run or a file even if you have not used them "
        "before, and use a cluster given by a file; the command prints their names; read the plug-ins first",
    )


def add_policy_arguments(parser: Parser) -> None:
    """Add the options that decide how an agent plays: --checkpoint, --greedy, --sample and --seed."""
    parser.add_argument(
        "--checkpoint",
        metavar="STEPS",
        help="checkpoint to play: a number of steps (the nearest checkpoint is used), best (highest validation "
        "return), best-training (highest training return) or best-true (highest true return) (default: the newest)",
    )
    sampling = parser.add_mutually_exclusive_group()
    add_greedy(sampling)
    sampling.add_argument("--sample", action="store_true", help="sample actions from the policy; this is the default")
    add_seed(parser)


def add_greedy(parser: Any) -> None:
    parser.add_argument("--greedy", action="store_true", help="choose the most probable action instead of sampling")


def add_seed(parser: Parser) -> None:
    parser.add_integer("--seed", "random seed for environments and action sampling", default=0)


def add_game_limits(parser: Parser, num_envs: int = 32) -> None:
    """Add --num-envs and --max-steps, for commands that play whole games."""
    parser.add_integer("--num-envs", "number of environments that are stepped together", default=num_envs, low=1)
    parser.add_integer(
        "--max-steps",
        "maximum length of a game, in steps; longer games are not included in the results",
        default=27_000,
        low=1,
        metavar="STEPS",
    )


def add_playback_arguments(parser: Parser) -> None:
    """Add --fps, --overwrite, --env, --replay and --game, for commands that draw a game."""
    parser.add_float(
        "--fps",
        "frames per second of the video; a GIF allows at most 50, and its frame durations are rounded to 1/100 s "
        "(default: about the speed of the game)",
        low=0.1,
        high=100,
    )
    add_overwrite(parser)
    add_task(parser)
    add_replay(parser)


def add_replay(parser: Parser) -> None:
    parser.add_argument(
        "--replay",
        metavar="FILE",
        help="use a recorded game instead of playing a new one; FILE is recordings/NAME.json in a run folder",
    )
    parser.add_integer(
        "--game", "with --replay: index of the game: its row in recordings/NAME.csv, counted from 0 (default: 0)"
    )


def add_overwrite(parser: Parser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace output files that already exist")


def add_task(parser: Parser) -> None:
    parser.add_argument(
        "--env", metavar="ENV", help="environment to play; one of the run's tasks (default: the first task)"
    )
