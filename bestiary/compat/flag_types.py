"""Data classes of the tables that describe the original programs, flag by flag.

An original program is a program of another project, such as PolyBeast of TorchBeast, whose command lines Bestiary
translates. The translator (`translate.py`) and the migration page (`migration_page.py`) read the same tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# How a flag is translated.
OPTION = "option"  # translated to `Flag.option` with the converted value
JOINT = "joint"  # translated together with other flags, by a rule of the `Mode` (train, test, ...)
IGNORED = "ignored"  # accepted without effect; if the flag is given, `Flag.difference` is printed, which says why
REFUSED = "refused"  # the translation fails, unless the flag has its default value


def format_value(value: Any) -> str:
    """Return a value as text for a Bestiary option: 300000000 -> 300M, 40.0 -> 40, 0.00048 -> 0.00048."""
    if isinstance(value, int) and value and not isinstance(value, bool):
        for size, suffix in ((1_000_000, "M"), (1_000, "k")):
            if value % size == 0:
                return f"{value // size}{suffix}"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


@dataclass(frozen=True)
class Flag:
    """One row of a table: a flag of the original program, and the option that does the same in Bestiary."""

    name: str  # as in the original, without the leading hyphens
    default: Any  # default value of the original
    # Bestiary option, for example "--steps"; for a switch also its value, for example "--device cpu". If the status is
    # JOINT, a description of the Bestiary options for tables and help texts.
    option: str = ""
    difference: str = ""  # how the option differs from the flag, or why there is no option; one line
    status: str = OPTION
    kind: type = str  # type of the value; bool: a switch without a value
    several: bool = False  # whether the flag accepts several words, which are joined by spaces
    choices: tuple[str, ...] = ()
    convert: Callable[[Any], str] = format_value  # unit conversion: value of the original -> value of the option
    fork: str = ""  # the fork that has this flag; empty: all forks
    # Default values that differ from `default`: {variant: value}. Values.variants explains variants.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    commands: tuple[str, ...] = ("train",)  # Bestiary commands for which the flag matters


@dataclass(frozen=True)
class Values:
    """The values of all flags of a program."""

    flags: Mapping[str, Any]
    given: frozenset[str]  # names of the flags on the command line
    program: str
    # Keys of Flag.defaults that apply, the most specific first. MonoBeast of the PopArt fork, for example, has
    # ("popart-mono", "popart", "mono").
    variants: tuple[str, ...] = ()
    cluster: str | None = None  # value of --cluster of `bestiary compat`

    def __getitem__(self, name: str) -> Any:
        return self.flags[name]

    @property
    def fork(self) -> str:
        """The fork whose defaults are used; empty: the defaults of no fork."""
        return next((variant for variant in self.variants if variant in ("popart", "reward")), "")


@dataclass(frozen=True)
class Words:
    """Words of a Bestiary command, and messages about how Bestiary differs from the original."""

    words: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __add__(self, other: "Words") -> "Words":
        return Words(self.words + other.words, self.differences + other.differences)


@dataclass(frozen=True)
class Mode:
    """A mode of an original program (train, test, ...) and the Bestiary command that does the same."""

    command: tuple[str, ...]  # for example ("look", "saliency"); empty: no equivalent command exists
    rules: tuple[Callable[[Values], Words], ...] = ()  # functions for translations that depend on several flags
    # If one original command corresponds to several Bestiary commands, each(values) returns one entry per command: the
    # words that only this command has.
    each: Callable[[Values], tuple[Words, ...]] | None = None
    # Behaviour of the original that no flag controls: (words of the Bestiary command, description).
    fixed: tuple[tuple[str, str], ...] = ()
    differences: tuple[str, ...] = ()  # printed for each command of this mode
    fork: str = ""  # the fork that has this mode; empty: all forks
    starts: bool = True  # False: the command is only printed
    runs_with_cluster: bool = False  # whether --cluster starts the command even if `starts` is False


@dataclass(frozen=True)
class Program:
    """A program, such as PolyBeast of TorchBeast, whose command lines Bestiary translates."""

    name: str
    flags: tuple[Flag, ...]
    modes: Mapping[str, Mode]
    default_mode: str = "train"
    # detect(values of the given flags) returns Values.variants.
    detect: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda given: ()
    # Reason why words that are neither flags nor values of flags are ignored. If the reason is empty, such words are
    # errors.
    extra_words: str = ""
    supports_cluster: bool = False
