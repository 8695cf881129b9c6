"""The command line: parses (`arguments.py` knows how), calls one function a command, prints."""

import faulthandler
import os
import sys
from pathlib import Path

from bestiary import __version__
from bestiary.arguments import (
    add_run,
    amount,
    command_parser,
    hyphens,
    number,
    parse_train,
)
from bestiary.errors import RunError, UserError
from bestiary.readers import READERS

USAGE = """bestiary COMMAND ...

  train ENV                train a new agent: bestiary train atari/Pong
  resume RUN               go on with a run that was stopped, killed or is to go further
  eval RUN                 play whole games with a trained agent and report returns
  movie RUN...             film trained agents, one or side by side
  look WHAT RUN...         saliency, attention, filters, actions: what is going on inside
  audit RUN...             is what was trained on what was wanted? Trained and true returns, and a trusted run
  export RUN               rollouts of a trained agent as arrays
  compare RUN RUN...       learning curves with bands over seeds, a table, CSV
  study FILE               many runs from one file (a grid, variants, seeds), then table, curves and a page
  report FOLDER            all runs below a folder on one page, in one file
  runs                     the runs below a folder
  list WHAT                envs, torsos, memories, critics, agents, algorithms, presets, zoo, or rewards ENV
  doctor                   check this machine
  bench                    measure this machine: pieces, bound and whole

`bestiary COMMAND --help` explains each; RUN is a run folder, `runs/latest` the newest."""


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with its status: 0 done, 1 failed, 2 a mistake in the command, 130/143 interrupted."""
    faulthandler.enable()  # a crash in C++ then says where
    sys.exit(run_command(list(sys.argv[1:] if argv is None else argv)))


def run_command(argv: list[str]) -> int:
    command, rest = argv[0] if argv else "", [hyphens(word) for word in argv[1:]]
    try:
        if command in ("", "-h", "--help", "help"):
            print(USAGE, flush=True)
            return 0 if argv else 2
        if command in ("--version", "version"):
            print(f"bestiary {__version__}")
            return 0
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


def _resume(argv: list[str]) -> None:
    from bestiary.runs.folder import open_run
    from bestiary.runtime.train import resume

    parser = command_parser("resume", "Go on with a run from its newest checkpoint.")
    add_run(parser)
    parser.add_argument("--steps", metavar="INT", help="a new total of steps; the schedule is stretched to it")
    parser.add_argument(
        "--checkpoint", metavar="STEPS", help="go on from an earlier checkpoint; later ones are set aside"
    )
    a = parser.parse_strictly(argv)
    steps = number("--steps", a.steps, 1) if a.steps else None
    checkpoint = number("--checkpoint", a.checkpoint) if a.checkpoint else None
    run = resume(open_run(a.run, a.trust_code), steps, checkpoint)
    print(f"run: {run.path}")


def _look(argv: list[str]) -> None:
    from bestiary.lenses import LENSES
    from bestiary.options import suggest

    if not argv or argv[0] in ("-h", "--help"):
        print("bestiary look WHAT RUN...\n\n" + "\n".join(f"  {name:<12}{text}" for name, (_, text) in LENSES.items()))
        if not argv:
            raise UserError("look at what? For example: bestiary look saliency runs/latest")
        return
    if argv[0] not in LENSES:
        raise UserError(f"look {argv[0]}: there is {', '.join(LENSES)}{suggest(argv[0], LENSES)}")
    LENSES[argv[0]][0](argv[1:])


def _study(argv: list[str]) -> None:
    from bestiary.studies.run import Cluster, run_study

    parser = command_parser(
        "study", "Run what is missing of a study, then write its table, curves and page. Safe to stop."
    )
    parser.add_argument("file", metavar="FILE", help="the study as TOML (docs/studies.md shows one)")
    parser.add_argument(
        "--dry-run", action="store_true", help="list its runs, how far each is and their sizes, and stop"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: table, curves and page of what is there")
    parser.add_argument("--jobs", metavar="INT", default="1", help="runs at a time (default 1)")
    parser.add_argument(
        "--cluster", metavar="WHERE", help="make the runs on Ray: auto, host:port or local (docs/cluster.md)"
    )
    parser.add_argument("--cpus-per-run", metavar="FLOAT", help="cluster: CPUs that each run gets (default 1)")
    parser.add_argument(
        "--gpus-per-run", metavar="FLOAT", help="cluster: GPUs that each run gets, such as 0.25 (default 0)"
    )
    parser.add_argument("--trust-open-cluster", action="store_true", help="join a Ray that asks nobody for a token")
    parser.add_argument("--dir", metavar="FOLDER", help="where its runs and results go (default runs/NAME)")
    parser.add_argument(
        "--if-changed",
        choices=("error", "new"),
        default="error",
        help="where the file was changed and a run has other settings: stop, or run it anew and set the old one aside",
    )
    a = parser.parse_strictly(argv)
    cluster = None
    if a.cluster:
        if a.jobs != "1":
            raise UserError(f"--jobs {a.jobs}: on a cluster, --cpus-per-run decides how many runs there are at a time")
        cpus = amount("--cpus-per-run", a.cpus_per_run or "1", above=0)
        cluster = Cluster(a.cluster, cpus, amount("--gpus-per-run", a.gpus_per_run or "0"), a.trust_open_cluster)
    elif given := [
        flag for flag in ("cpus-per-run", "gpus-per-run", "trust-open-cluster") if vars(a)[flag.replace("-", "_")]
    ]:
        raise UserError(*(f"--{flag}: has an effect only on a cluster (--cluster)" for flag in given))
    run_study(
        Path(a.file),
        Path(a.dir) if a.dir else None,
        jobs=number("--jobs", a.jobs, 1),
        cluster=cluster,
        if_changed=a.if_changed,
        dry_run=a.dry_run,
        report_only=a.report,
    )


def _runs(argv: list[str]) -> None:
    from bestiary.runs.listing import show_live, show_runs

    parser = command_parser("runs", "The runs below a folder.")
    parser.add_argument("folder", nargs="?", default="runs", help="default runs/")
    parser.add_argument(
        "--live",
        action="store_true",
        help="those that are being trained: steps/s, lag, restarts; on a terminal for ever",
    )
    a = parser.parse_strictly(argv)
    show_live(Path(a.folder)) if a.live else show_runs(Path(a.folder))


def _list(argv: list[str]) -> None:
    from bestiary.runs.listing import LISTS, show_list

    parser = command_parser("list", "What there is to choose from.")
    parser.add_argument("what", choices=sorted(LISTS), help=", ".join(sorted(LISTS)))
    parser.add_argument(
        "filter", nargs="?", default="", help="only names that contain this; of rewards, the environment"
    )
    a = parser.parse_strictly(argv)
    show_list(a.what, a.filter)


def _doctor(argv: list[str]) -> None:
    from bestiary.doctor import examine

    command_parser(
        "doctor", "Check this machine: versions, cores, disk, a step of each environment family."
    ).parse_strictly(argv)
    if not examine():
        raise RunError("something that bestiary needs is missing or broken: see above")


def _bench(argv: list[str]) -> None:
    from bestiary.bench import CONFIGS, KERNELS, SALIENCY, bench, configured
    from bestiary.sizing import Machine, read_machine, show_predictions

    parser = command_parser(
        "bench", "How fast the pieces are, how fast they could be together, and how fast the whole is."
    )
    names = [*sorted(CONFIGS), KERNELS, SALIENCY]
    about = f"{', '.join(sorted(CONFIGS))}; {KERNELS}: what each memory costs; {SALIENCY}: against the published way"
    parser.add_argument("--config", nargs="+", choices=names, metavar="NAME", help=about)
    parser.add_argument("--repeats", metavar="INT", default="5", help="how often everything is measured (default 5)")
    parser.add_argument("--seconds", metavar="INT", default="5", help="for each piece; the whole gets 3x (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the results here, one object a configuration")
    parser.add_argument("--cluster", action="store_true", help="also the whole on a Ray of its own, an actor a core")
    parser.add_argument(
        "--predict",
        nargs="+",
        metavar="ACTORS",
        help="how fast clusters of so many actors would be (docs/cluster.md)",
    )
    parser.add_argument("--results", metavar="FILE", help="with --predict: from what --json wrote; measures nothing")
    parser.add_argument("--learners", metavar="INT", help="with --predict: so many (default 1)")
    parser.add_argument("--gbit", metavar="FLOAT", help="with --predict: the network of a learner (default 10)")
    a = parser.parse_strictly(argv)
    repeats, seconds = number("--repeats", a.repeats, 1), number("--seconds", a.seconds, 1)
    if alone := [flag for flag in ("results", "learners", "gbit") if vars(a)[flag] and not a.predict]:
        raise UserError(f"--{alone[0]}: has an effect only with --predict")
    actors = [number("--predict", text, 1) for text in a.predict or ()]
    learners, gbit = number("--learners", a.learners or "1", 1), amount("--gbit", a.gbit or "10", above=0)
    if a.json and (Path(a.json).is_dir() or not Path(a.json).resolve().parent.is_dir()):
        raise UserError(f"--json {a.json}: not a file that can be written")
    names = a.config or ["atari-shallow", "atari-resnet"]
    if a.predict and (other := [name for name in names if name not in CONFIGS]):
        raise UserError(f"--predict: {other[0]} is not a training")
    if a.results and (a.cluster or a.json):
        raise UserError(f"--results {a.results}: then nothing is measured; leave out --cluster and --json")
    if a.results:
        machines = {name: read_machine(Path(a.results), name) for name in names}
    else:
        measured = bench(names, repeats, seconds, Path(a.json) if a.json else None, a.cluster)
        machines = {r.config: Machine(r.cores, r.env, r.inference, r.learn) for r in measured}
    for name, machine in machines.items() if actors else ():
        show_predictions(name, configured(name), machine, actors, learners, gbit)


COMMANDS = {
    "train": _train,
    "resume": _resume,
    **READERS,
    "look": _look,
    "study": _study,
    "runs": _runs,
    "list": _list,
    "doctor": _doctor,
    "bench": _bench,
}
