"""How a command line becomes values: the parsers, and the two stages in which they learn what they can be given.

First come the choices (of `train`: environment, preset, algorithm, agent and its parts; of `eval` and `movie`: the run), then
the options of just those. Values are not checked here but in `resolve.py`, all at once.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from bestiary.errors import UserError

ON_OFF = ("on", "off", "yes", "no", "true", "false")


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse_strictly(self, argv: list[str]) -> argparse.Namespace:
        from bestiary.options import suggest

        arguments, unknown = self.parse_known_args(argv)
        flags = [f for action in self._actions for f in action.option_strings if f.startswith("--")]
        wrong = [word for word in unknown if word.startswith("--")]
        if unknown:
            stray = [f"unexpected argument {word}" for word in unknown]
            raise UserError(*([f"unknown option {word}{suggest(word, flags)}" for word in wrong] or stray))
        return arguments


def hyphens(word: str) -> str:
    """--num_envs=3 -> --num-envs=3; underscores in values stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


# --- train ---


def parse_train(argv: list[str]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """What was given on the command line, unchecked: options, place, and whether it is a dry run."""
    from bestiary import envs
    from bestiary.config import DEFAULTS, Training, lookup_part
    from bestiary.options import options_of, parse_options
    from bestiary.resolve import env_names, layers
    from bestiary.runs.folder import Place

    chosen, _ = layers(scan(argv, _train_parser()))
    env_name = next(iter(env_names(chosen.get("env", ()))), "")

    parser = _train_parser()
    _add_options(parser.add_argument_group("training"), Training, "")
    _add_options(parser.add_argument_group("where the run goes"), Place, "")
    family = _or_none(lambda: envs.lookup(env_name)) if env_name else None
    if family is not None:
        _add_options(parser.add_argument_group(f"environment {env_name}"), family.options, "env")
    agent = _or_none(lambda: lookup_part("agent", str(chosen.get("agent", DEFAULTS["agent"]))))
    wishes = getattr(agent, "defaults", {})
    for kind in DEFAULTS:
        default = wishes.get(kind, DEFAULTS[kind])
        name = str(chosen.get(kind, "popart" if kind == "critic" and chosen.get("popart") else default))
        if name == "auto" and family is not None:
            name = _or_none(lambda: _auto_torso(env_name)) or name
        part = None if name == "auto" else _or_none(lambda kind=kind, name=name: lookup_part(kind, name))
        if part is not None:
            _add_options(parser.add_argument_group(f"{kind} {name}"), options_of(part), kind, wishes=wishes)
    if {"-h", "--help"} & set(argv):
        parser.print_help()
        raise SystemExit(0)

    given = scan(argv, parser)
    dry_run = given.pop("dry_run", False)
    problems: list[str] = []
    place = {f.name: given.pop(f.name) for f in dataclasses.fields(Place) if f.name in given}
    parse_options(Place, place, "", problems)
    if problems:
        raise UserError(*problems)
    return given, place, dry_run


def scan(argv: list[str], parser: Parser) -> dict[str, Any]:
    """Flags and their values as written, by option name; environments under "env". Flags the parser does not have are
    kept too, for `resolve` to say what is wrong with them."""
    from bestiary.envs import FAMILIES, WORLDS

    given: dict[str, Any] = {}
    names, words = list[str](), list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("-") and not word.startswith("--") and word != "-h":
            raise UserError(f"unknown option {word}: options have two hyphens, such as --seed 3")
        if not word.startswith("--"):
            names += [word] if word != "-h" else []
            continue
        name, equals, value = word.partition("=")
        action = parser._option_string_actions.get(name)
        key = name.removeprefix("--").replace("-", "_") if action is None else action.dest
        follows = words[0] if words and not words[0].startswith("--") else None
        looks_like_env = follows is not None and (
            ".py:" in follows or re.split("[/:]", follows)[0] in {**FAMILIES, **WORLDS}
        )
        if equals:
            given[key] = value
        elif action is not None and action.nargs == 0:
            given[key] = action.const
        elif action is not None and action.nargs == "?":
            takes = follows is not None and not looks_like_env and (action.metavar != "on|off" or follows in ON_OFF)
            given[key] = words.pop(0) if takes else action.const
        elif follows is not None and (action is not None or not looks_like_env):
            given[key] = words.pop(0)
        elif action is not None:
            raise UserError(f"{name} needs a value")
        else:
            given[key] = ""
    return {**given, **({"env": names} if names else {})}


def _train_parser() -> Parser:
    """The choices; the options of the parts chosen are added to it. It explains; `scan` reads."""
    from bestiary.config import REGISTRIES

    usage = "bestiary train ENV [ENV ...] [options]"
    parser = Parser(prog="bestiary train", usage=usage, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="print the config, the parts and their sizes, and stop")
    group = parser.add_argument_group("what to train")
    group.add_argument(
        "env",
        nargs="*",
        metavar="ENV",
        help="atari/Pong, warehouse, gymnasium/CartPole-v1, toy/recall, my_env.py:Maze; several: tasks of one agent",
    )
    group.add_argument("--preset", metavar="NAME", help="options of a published experiment (bestiary list presets)")
    group.add_argument("--config", metavar="FILE", help="options from a TOML file, such as a run's config.toml")
    group.add_argument(
        "--popart", nargs="?", const=True, metavar="on|off", help="a normalised value for each task: --critic popart"
    )
    group.add_argument(
        "--input",
        metavar="FORMAT",
        help="Atari: what is seen: gray-stack (as always), rgb-stack, or rgb-last, one frame",
    )
    for kind, registry in REGISTRIES.items():
        names = ", ".join(["auto", *registry] if kind == "torso" else registry)
        group.add_argument(f"--{kind}", metavar="NAME", help=f"{names}, or your own file.py:Name")
    return parser


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)


def _add_options(
    group: Any, options: type, kind: str, taken: Iterable[str] = (), wishes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """A flag for each option; its short spelling only where that is not `taken` by the command itself."""
    from bestiary.options import field_types, flag

    kinds, taken = field_types(options), set(taken)
    for f in dataclasses.fields(options):
        default = wishes.get(f"{kind}.{f.name}", None if f.default is dataclasses.MISSING else f.default)
        shown = "x".join(map(str, default)) if isinstance(default, tuple) else default
        if default is None or isinstance(default, bool):
            shown = {True: "on", False: "off", None: "none"}[default]
        text = f.metadata.get("help", "").replace("%", "%%")
        choices = f.metadata.get("choices")
        text += f" [{', '.join(choices)}]" if choices else ""
        boolean = kinds[f.name] is bool
        bare = True if boolean else f.metadata.get("bare")
        optional = {"nargs": "?", "const": bare} if bare is not None else {}
        spellings = list(
            dict.fromkeys((flag(kind, f), f"--{kind}.{f.name}".replace("_", "-")) if kind else (flag(kind, f),))
        )
        spellings = [spelling for spelling in spellings if spelling not in taken]
        metavar = "on|off" if boolean else getattr(kinds[f.name], "__name__", "value").upper()
        metavar = metavar if metavar in ("on|off", "INT", "FLOAT", "STR") else "VALUE"
        dest = f"{kind}.{f.name}" if kind else f.name
        group.add_argument(*spellings, dest=dest, metavar=metavar, help=f"{text} (default {shown})", **optional)
        if boolean:
            negated = [s.replace("--", "--no-", 1) for s in spellings]
            group.add_argument(*negated, dest=dest, action="store_const", const=False, help=argparse.SUPPRESS)


def _or_none(function: Any) -> Any:
    """What goes wrong here will go wrong again in `resolve`, which reports it with all other problems."""
    try:
        return function()
    except UserError:
        return None


def _auto_torso(env_name: str) -> str:
    from bestiary import envs
    from bestiary.agents.torsos import suitable

    pool = envs.make(env_name)
    pool.close()
    return suitable(pool.observation_spec)


# --- the other commands ---


def command_parser(command: str, what: str) -> Parser:
    return Parser(prog=f"bestiary {command}", description=what, formatter_class=_Help, allow_abbrev=False)


def number(parser_name: str, text: str, low: int = 0) -> int:
    from bestiary.options import convert

    try:
        number = convert(text, int)
    except ValueError as error:
        raise UserError(f"{parser_name} {text}: {error}") from error
    if number < low:
        raise UserError(f"{parser_name} {text}: must be at least {low}")
    return number


def amount(flag: str, text: str, above: float = -1) -> float:
    """A number of things that can be had in parts."""
    from bestiary.options import convert

    try:
        found = float(convert(text, float))
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error
    if found <= above or found < 0:
        raise UserError(f"{flag} {text}: must be {'above' if above >= 0 else 'at least'} 0")
    return found


def part_of_axis(flag: str, text: str) -> tuple[float, float]:
    from bestiary.options import span

    try:
        return span(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error


FPS = "pictures a second (default: about the game's own speed; a GIF has at most 50, in hundredths of a second)"


def frame_rate(text: str) -> float:
    return quantity("--fps", text, 0.1, 100)


def quantity(flag: str, text: str, low: float, high: float) -> float:
    from bestiary.options import convert

    try:
        value = float(convert(text, float))
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from error
    if not low <= value <= high:
        raise UserError(f"{flag} {text}: must be between {low:g} and {high:g}")
    return value


def add_run(parser: Parser, nargs: str | None = None) -> None:
    several = "run folders, such as runs/latest" if nargs else "a run folder, such as runs/latest"
    parser.add_argument("run", metavar="RUN", nargs=nargs, help=several)
    parser.add_argument(
        "--trust-code", action="store_true", help="run the copy of your own parts that the run folder keeps"
    )


def add_player(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="STEPS",
        help="the one nearest to so many steps, or best, best-trained, best-true (default: the newest)",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always the likeliest action")
    how.add_argument("--sample", action="store_true", help="actions as likely as in training (the default)")
    parser.add_argument("--seed", metavar="INT", default="0", help="of environments and decisions (default 0)")


def add_replay(parser: Parser) -> None:
    parser.add_argument("--replay", metavar="FILE", help="a recorded game instead of a new one: recordings/NAME.json")
    parser.add_argument("--game", metavar="INT", help="which of its games, a line of NAME.csv (default 0)")


def which_replay(a: argparse.Namespace) -> Any:
    """The recording and the game that were asked for; None where none was."""
    from bestiary.runs.recordings import SEEN, open_recording

    if a.replay is None:
        if a.game is not None:
            raise UserError(f"--game {a.game}: is for --replay")
        return None
    fixed = {"greedy": a.greedy, "sample": a.sample, "env": a.env, "seed": a.seed != "0"}
    fixed |= {name[4:]: value is not None for name, value in vars(a).items() if name.startswith("env.")}
    if changed := [f"--{name.replace('_', '-')}" for name, given in fixed.items() if given and name not in SEEN]:
        raise UserError(f"{', '.join(changed)}: the game of --replay was recorded, and so was all that is done in it")
    recording = open_recording(a.replay)
    return recording, recording.game(number("--game", a.game) if a.game else 0)


def which_checkpoint(text: str | None, run: Any) -> int | None:
    """Steps, or `best`: the one that validation liked most; or the best by trained or true return."""
    from bestiary.runs.checkpoints import BESTS, best

    if text not in BESTS:
        return number("--checkpoint", text) if text else None
    if text != "best":
        if (steps := best(run.path / "checkpoints", text)) is None:
            raise UserError(
                f"--checkpoint {text}: {run.path} has none: it is kept where a run of one task has a --reward or "
                "--true-reward, and after 20 games"
            )
        return steps
    if (steps := best(run.path / "checkpoints")) is None:
        training = run.config.training
        validated = training.valid_every or training.valid_levels or training.valid_mode
        why = "its tasks' returns have no common scale, so none was the best" if validated else "it was not validated"
        raise UserError(f"--checkpoint best: {run.path} has none: {why} (docs/procgen.md)")
    return steps


def parse_with_env(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """The arguments, the run (None for a scripted player), and the options of its environment that were given: what the
    agent is to play differently from its training."""
    from bestiary import envs
    from bestiary.runs.folder import Run

    found, argv = _find_run(argv)
    if isinstance(found, Run):
        env = found.config.envs[0]
    else:
        env = next((argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--env"), "")
        env = next((word.partition("=")[2] for word in argv if word.startswith("--env=")), env)
        if not env and not {"-h", "--help"} & set(argv):
            raise UserError(f"{found}: which environment does it play? For example: --env warehouse")
    if env:
        group = parser.add_argument_group(f"environment {env}, where it is to differ from the training's")
        taken = [spelling for action in parser._actions for spelling in action.option_strings]
        _add_options(group, envs.lookup(env).options, "env", taken)
    a = parser.parse_strictly(_explicit(argv, parser))
    given = {name[4:]: value for name, value in vars(a).items() if name.startswith("env.") and value is not None}
    return a, found if isinstance(found, Run) else None, given


def _find_run(argv: list[str]) -> tuple[Any, list[str]]:
    """The run that one of the words names, or the scripted player; and the words, with that one in front, where no flag can
    take it for a value, and those that follow it up to the next flag. Any other word may be one."""
    from bestiary.runs.folder import open_run

    trust = "--trust-code" in argv
    for k, word in enumerate(argv):
        if not word.startswith("-"):
            run = word if word.startswith("scripted:") else _or_none(lambda w=word: open_run(w, trust))
            if run is not None:
                end = next((n for n in range(k + 1, len(argv)) if argv[n].startswith("-")), len(argv))
                return run, [*argv[k:end], *argv[:k], *argv[end:]]
    if not {"-h", "--help"} & set(argv):
        words = [word for word in argv if not word.startswith("-")]
        if not words:
            raise UserError("which run? For example: runs/latest (bestiary runs lists them)")
        open_run(words[0])  # says what is wrong with it
    return None, argv


def _explicit(argv: list[str], parser: Parser) -> list[str]:
    """`--legacy RUN` -> `--legacy=on RUN`: argparse would take the run for the flag's value."""
    words = []
    for word, follows in zip(argv, [*argv[1:], ""], strict=True):
        action = parser._option_string_actions.get(word)
        bare = action is not None and action.metavar == "on|off" and follows not in ON_OFF
        words.append(f"{word}=on" if bare else word)
    return words
