"""The command line: parses, calls one function a command, prints.

`train` is parsed in two stages. The first finds the choices (environment, preset, algorithm, agent and its parts); the
second knows just the options of those parts. Values are not checked here but in `resolve.py`, all at once.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from bestiary import __version__
from bestiary.errors import RunError, UserError

USAGE = """bestiary COMMAND ...

  train ENV                train a new agent: bestiary train atari/Pong
  resume RUN               go on with a run that was stopped, killed or is to go further
  eval RUN                 play whole games with a trained agent and report returns
  movie RUN                film a trained agent
  compare RUN RUN...       learning curves with bands over seeds, a table, CSV
  study FILE               many runs from one file (a grid, variants, seeds), then table, curves and a page
  runs                     the runs below a folder
  list WHAT                envs, torsos, memories, agents, algorithms, presets or zoo
  doctor                   check this machine
  bench                    measure this machine: pieces, bound and whole

`bestiary COMMAND --help` explains each; RUN is a run folder, `runs/latest` the newest."""


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


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 a mistake in the command, 130/143 interrupted."""
    sys.exit(run_command(list(sys.argv[1:] if argv is None else argv)))


def run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 2
    if argv[0] in ("--version", "version"):
        print(f"bestiary {__version__}")
        return 0
    command, rest = argv[0], [_hyphens(word) for word in argv[1:]]
    try:
        if command not in COMMANDS:
            from bestiary.options import suggest

            raise UserError(f"unknown command {command}{suggest(command, COMMANDS)} (bestiary --help lists them)")
        COMMANDS[command](rest)
        return 0
    except UserError as error:
        for problem in error.problems:
            print(f"bestiary: {problem}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"bestiary: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        return 128 + getattr(interrupt, "signum", 2)
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"bestiary: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        return 1
    except Exception as error:
        from bestiary import plugins

        if (cause := plugins.blame(error)) is None:
            raise  # a bug of ours: the traceback is what we want to see
        print(f"bestiary: {cause}", file=sys.stderr)
        return 1


def _hyphens(word: str) -> str:
    """--num_envs=3 -> --num-envs=3; underscores in values stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


# --- train ---


def _train(argv: list[str]) -> None:
    from bestiary.resolve import layers, resolve
    from bestiary.runs.folder import Place
    from bestiary.runtime.train import describe, start

    given, place, dry_run = parse_train(argv)
    config = resolve(*layers(given))
    if dry_run:
        print(config.to_toml())
        print(describe(config))
        return
    run = start(config, Place(**place))
    print(f"run: {run.path}")


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
    for kind, default in {**DEFAULTS, **getattr(agent, "defaults", {})}.items():
        name = str(chosen.get(kind, default))
        if name == "auto" and family is not None:
            name = _or_none(lambda: _auto_torso(env_name)) or name
        part = None if name == "auto" else _or_none(lambda kind=kind, name=name: lookup_part(kind, name))
        if part is not None:
            _add_options(parser.add_argument_group(f"{kind} {name}"), options_of(part), kind)
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
    from bestiary.envs import WORLDS

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
            "/" in follows or ".py:" in follows or follows.split(":")[0] in WORLDS
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

    usage = "bestiary train ENV [options]"
    parser = Parser(prog="bestiary train", usage=usage, formatter_class=_Help, allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="print the config, the parts and their sizes, and stop")
    group = parser.add_argument_group("what to train")
    group.add_argument(
        "env", nargs="*", metavar="ENV", help="atari/Pong, warehouse, gymnasium/CartPole-v1, toy/recall, my_env.py:Maze"
    )
    group.add_argument("--preset", metavar="NAME", help="options of a published experiment (bestiary list presets)")
    group.add_argument("--config", metavar="FILE", help="options from a TOML file, such as a run's config.toml")
    for kind, registry in REGISTRIES.items():
        names = ", ".join(["auto", *registry] if kind == "torso" else registry)
        group.add_argument(f"--{kind}", metavar="NAME", help=f"{names}, or your own file.py:Name")
    return parser


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)


def _add_options(group: Any, options: type, kind: str, taken: Iterable[str] = ()) -> None:
    """A flag for each option; its short spelling only where that is not `taken` by the command itself."""
    from bestiary.options import field_types, flag

    kinds, taken = field_types(options), set(taken)
    for f in dataclasses.fields(options):
        default = f.default if f.default is not dataclasses.MISSING else None
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


def _parser(command: str, what: str) -> Parser:
    return Parser(prog=f"bestiary {command}", description=what, formatter_class=_Help, allow_abbrev=False)


def _number(parser_name: str, text: str, low: int = 0) -> int:
    from bestiary.options import convert

    try:
        number = convert(text, int)
    except ValueError as error:
        raise UserError(f"{parser_name} {text}: {error}") from error
    if number < low:
        raise UserError(f"{parser_name} {text}: must be at least {low}")
    return number


def _fps(text: str) -> float:
    from bestiary.options import convert

    try:
        fps = float(convert(text, float))
    except ValueError as error:
        raise UserError(f"--fps {text}: {error}") from error
    if not 0.1 <= fps <= 100:
        raise UserError(f"--fps {text}: must be between 0.1 and 100")
    return fps


def _add_run(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument("run", metavar="RUN", nargs=nargs, help="a run folder, such as runs/latest")
    parser.add_argument(
        "--trust-code", action="store_true", help="run the copy of your own parts that the run folder keeps"
    )


def _add_player(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint", metavar="STEPS", help="the checkpoint nearest to so many steps (default: the newest)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always the likeliest action")
    how.add_argument("--sample", action="store_true", help="actions as likely as in training (the default)")
    parser.add_argument("--seed", metavar="INT", default="0", help="of environments and decisions (default 0)")


def _resume(argv: list[str]) -> None:
    from bestiary.runs.folder import open_run
    from bestiary.runtime.train import resume

    parser = _parser("resume", "Go on with a run from its newest checkpoint.")
    _add_run(parser)
    parser.add_argument("--steps", metavar="INT", help="a new total of steps; the schedule is stretched to it")
    parser.add_argument(
        "--checkpoint", metavar="STEPS", help="go on from an earlier checkpoint; later ones are set aside"
    )
    a = parser.parse_strictly(argv)
    steps = _number("--steps", a.steps, 1) if a.steps else None
    checkpoint = _number("--checkpoint", a.checkpoint) if a.checkpoint else None
    run = resume(open_run(a.run, a.trust_code), steps, checkpoint)
    print(f"run: {run.path}")


def _eval(argv: list[str]) -> None:
    from bestiary.analysis.evaluate import evaluate, evaluate_player

    parser = _parser("eval", "Play whole games with a trained agent; writes JSON and CSV into the run folder.")
    _add_run(parser)
    parser.add_argument(
        "--env", metavar="ENV", help="what a scripted player plays: eval scripted:nearest --env warehouse"
    )
    parser.add_argument("--episodes", metavar="INT", default="100", help="whole games to play (default 100)")
    parser.add_argument("--num-envs", metavar="INT", default="32", help="environments at once (default 32)")
    parser.add_argument("--max-steps", metavar="INT", default="27k", help="give a game up after so many (default 27k)")
    _add_player(parser)
    a, run, options = _parse_with_env(parser, argv)
    numbers = {
        "episodes": _number("--episodes", a.episodes, 1),
        "seed": _number("--seed", a.seed),
        "num_envs": _number("--num-envs", a.num_envs, 1),
        "max_steps": _number("--max-steps", a.max_steps, 1),
    }
    if run is None:
        if a.greedy or a.sample or a.checkpoint or a.trust_code:
            raise UserError(f"{a.run}: --greedy, --sample, --checkpoint and --trust-code are for trained agents")
        evaluate_player(a.run.removeprefix("scripted:"), a.env, options, **numbers).show()
        return
    checkpoint = _number("--checkpoint", a.checkpoint) if a.checkpoint else None
    evaluate(run.with_env(options), checkpoint=checkpoint, greedy=a.greedy, **numbers).show()


def _parse_with_env(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, Any, dict[str, Any]]:
    """The arguments, the run (None for a scripted player), and the options of its environment that were given: what the
    agent is to play differently from its training."""
    from bestiary import envs
    from bestiary.runs.folder import Run

    found = _find_run(argv)
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
    run = found if isinstance(found, Run) else None
    if run is not None and getattr(a, "env", None):
        raise UserError(
            f"--env {a.env}: a run's agent plays the environment of its training; only scripted:NAME needs it"
        )
    return a, run, given


def _find_run(argv: list[str]) -> Any:
    """The run that one of the words names, or the scripted player; any other word may be a flag's value."""
    from bestiary.runs.folder import open_run

    words = [word for word in argv if not word.startswith("-")]
    trust = "--trust-code" in argv
    runs = (word if word.startswith("scripted:") else _or_none(lambda w=word: open_run(w, trust)) for word in words)
    found = next((run for run in runs if run is not None), None)
    if found is None and not {"-h", "--help"} & set(argv):
        if not words:
            raise UserError("which run? For example: runs/latest (bestiary runs lists them)")
        open_run(words[0])  # says what is wrong with it
    return found


def _explicit(argv: list[str], parser: Parser) -> list[str]:
    """`--legacy RUN` -> `--legacy=on RUN`: argparse would take the run for the flag's value."""
    words = []
    for word, follows in zip(argv, [*argv[1:], ""], strict=True):
        action = parser._option_string_actions.get(word)
        bare = action is not None and action.metavar == "on|off" and follows not in ON_OFF
        words.append(f"{word}=on" if bare else word)
    return words


def _movie(argv: list[str]) -> None:
    from bestiary.analysis.movie import film

    parser = _parser("movie", "Film a trained agent: the environment's own picture, as GIF or MP4.")
    _add_run(parser)
    parser.add_argument("--out", metavar="FILE", help="play.gif or play.mp4 (default: in the run folder's movies/)")
    parser.add_argument("--length", metavar="STEPS", default="2000", help="at most so many steps (default 2000)")
    parser.add_argument("--fps", metavar="FLOAT", help="pictures a second (default: about the game's own speed)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--attention", action="store_true", help="draw where the agent looks over the picture")
    _add_player(parser)
    if scripted := [word for word in argv if word.startswith("scripted:")]:
        raise UserError(f"{scripted[0]}: scripted players are evaluated (bestiary eval), not filmed")
    a, run, options = _parse_with_env(parser, argv)
    path = film(
        run.with_env(options),
        attention=a.attention,
        out=a.out,
        length=_number("--length", a.length, 1),
        checkpoint=_number("--checkpoint", a.checkpoint) if a.checkpoint else None,
        greedy=a.greedy,
        seed=_number("--seed", a.seed),
        fps=_fps(a.fps) if a.fps else 0,
        overwrite=a.overwrite,
    )
    print(f"movie: {path}")


def _compare(argv: list[str]) -> None:
    from bestiary.analysis.compare import compare
    from bestiary.runs.folder import open_run

    parser = _parser(
        "compare", "Learning curves of runs; those that differ only in their seed are one curve with a band."
    )
    _add_run(parser, nargs="+")
    parser.add_argument(
        "--out", metavar="FILE", default="curves.png", help="figure (default curves.png); a CSV goes beside it"
    )
    parser.add_argument(
        "--axis", choices=("steps", "minutes"), default="steps", help="steps or minutes (default steps)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    a = parser.parse_strictly(argv)
    compare([open_run(r, a.trust_code) for r in a.run], Path(a.out), axis=a.axis, overwrite=a.overwrite)


def _study(argv: list[str]) -> None:
    from bestiary.studies.run import run_study

    parser = _parser("study", "Run what is missing of a study, then write its table, curves and page. Safe to stop.")
    parser.add_argument("file", metavar="FILE", help="the study as TOML (docs/studies.md shows one)")
    parser.add_argument(
        "--dry-run", action="store_true", help="list its runs, how far each is and their sizes, and stop"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: table, curves and page of what is there")
    parser.add_argument("--jobs", metavar="INT", default="1", help="runs at a time (default 1)")
    parser.add_argument("--dir", metavar="FOLDER", help="where its runs and results go (default runs/NAME)")
    parser.add_argument(
        "--if-changed",
        choices=("error", "new"),
        default="error",
        help="where the file was changed and a run has other settings: stop, or run it anew and set the old one aside",
    )
    a = parser.parse_strictly(argv)
    run_study(
        Path(a.file),
        Path(a.dir) if a.dir else None,
        jobs=_number("--jobs", a.jobs, 1),
        if_changed=a.if_changed,
        dry_run=a.dry_run,
        report_only=a.report,
    )


def _runs(argv: list[str]) -> None:
    from bestiary.runs.listing import show_runs

    parser = _parser("runs", "The runs below a folder.")
    parser.add_argument("folder", nargs="?", default="runs", help="default runs/")
    show_runs(Path(parser.parse_strictly(argv).folder))


def _list(argv: list[str]) -> None:
    from bestiary.runs.listing import LISTS, show_list

    parser = _parser("list", "What there is to choose from.")
    parser.add_argument("what", choices=sorted(LISTS), help=", ".join(sorted(LISTS)))
    parser.add_argument("filter", nargs="?", default="", help="only names that contain this")
    a = parser.parse_strictly(argv)
    show_list(a.what, a.filter)


def _doctor(argv: list[str]) -> None:
    from bestiary.doctor import examine

    _parser("doctor", "Check this machine: versions, cores, disk, a step of each environment family.").parse_strictly(
        argv
    )
    if not examine():
        raise RunError("something that bestiary needs is missing or broken: see above")


def _bench(argv: list[str]) -> None:
    from bestiary.bench import CONFIGS, bench

    parser = _parser("bench", "How fast the pieces are, how fast they could be together, and how fast the whole is.")
    parser.add_argument("--config", nargs="+", choices=sorted(CONFIGS), metavar="NAME", help=", ".join(sorted(CONFIGS)))
    parser.add_argument("--repeats", metavar="INT", default="5", help="how often everything is measured (default 5)")
    parser.add_argument("--seconds", metavar="INT", default="5", help="for each piece; the whole gets 4x (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the results here, one object a configuration")
    a = parser.parse_strictly(argv)
    repeats, seconds = _number("--repeats", a.repeats, 1), _number("--seconds", a.seconds, 1)
    bench(a.config or ["atari-shallow", "atari-resnet"], repeats, seconds, Path(a.json) if a.json else None)


COMMANDS = {
    "train": _train,
    "resume": _resume,
    "eval": _eval,
    "movie": _movie,
    "compare": _compare,
    "study": _study,
    "runs": _runs,
    "list": _list,
    "doctor": _doctor,
    "bench": _bench,
}
