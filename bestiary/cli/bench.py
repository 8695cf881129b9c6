"""Command `bench`: measure the training throughput of this machine."""

from pathlib import Path
from typing import Any

from bestiary.bench.configs import CONFIGS, KERNELS, SALIENCY, make_bench_config
from bestiary.cli.arguments import Parser, parse_number
from bestiary.utils.errors import UserError

DEFAULT_CONFIGS = ["atari-shallow", "atari-resnet"]


def bench_command(argv: list[str]) -> None:
    """Measure the training throughput of this machine, and predict the throughput of clusters."""
    parser = Parser(
        "bench",
        "Measure the speed of this machine, in steps per second. First, environment stepping, inference and learning "
        "are measured separately. Then, complete training is measured and compared with its upper bound, "
        "1 / (1/env_stepping + 1/inference + 1/learning).",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        choices=[*sorted(CONFIGS), KERNELS, SALIENCY],
        metavar="NAME",
        help=f"what to measure: a training configuration ({', '.join(sorted(CONFIGS))}), {KERNELS} (the computing "
        f"time of each memory) or {SALIENCY} (the computing time of a saliency map, compared with a procedure that "
        f"evaluates one patch after the other) (default: {' '.join(DEFAULT_CONFIGS)})",
    )
    parser.add_integer(
        "--repeats", "number of repetitions of each measurement; the median is reported", default=5, low=1
    )
    parser.add_integer(
        "--seconds",
        "duration of each measurement, in seconds; a measurement of complete training takes 3 times as long",
        default=5,
        low=1,
        metavar="SECONDS",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the results to this JSON file, one object per configuration"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="also measure training on a local Ray cluster with one actor per core"
    )
    parser.add_argument(
        "--predict",
        nargs="+",
        metavar="ACTORS",
        help="predict the training throughput of clusters with these numbers of actors (see docs/cluster.md)",
    )
    parser.add_argument(
        "--results",
        metavar="FILE",
        help="with --predict: use the results in a file that was written with --json, instead of measuring",
    )
    parser.add_integer("--learners", "with --predict: number of learners (default: 1)", low=1)
    parser.add_float("--gbit", "with --predict: network bandwidth of a learner, in Gbit/s (default: 10)", above=0)
    a = parser.parse_strictly(argv)
    actors = [parse_number("--predict", int, {"low": 1}, text) for text in a.predict or ()]
    names = a.config or DEFAULT_CONFIGS
    _check_arguments(a, names)

    from bestiary.bench.cluster_model import Machine, print_predictions, read_machine
    from bestiary.bench.throughput import run_benchmarks

    if a.results:
        machines = {name: read_machine(Path(a.results), name) for name in names}
    else:
        results = run_benchmarks(names, a.repeats, a.seconds, Path(a.json) if a.json else None, a.cluster)
        machines = {r.config: Machine(r.cores, r.env_stepping, r.inference, r.learning) for r in results}
    if actors:
        for name, machine in machines.items():
            print_predictions(name, make_bench_config(name), machine, actors, a.learners or 1, a.gbit or 10.0)


def _check_arguments(a: Any, names: list[str]) -> None:
    """Raise UserError if options cannot be combined or the JSON file cannot be written."""
    if not a.predict:
        given = {"--results": a.results, "--learners": a.learners, "--gbit": a.gbit}
        if flags := [flag for flag, value in given.items() if value]:
            raise UserError(f"{flags[0]}: has an effect only with --predict; add --predict or remove {flags[0]}")
    if a.json and (Path(a.json).is_dir() or not Path(a.json).resolve().parent.is_dir()):
        raise UserError(f"--json {a.json}: cannot be written; give a file in an existing folder")
    if a.predict and (others := [name for name in names if name not in CONFIGS]):
        raise UserError(
            f"--predict: {others[0]} is not a training configuration; choose --config from {', '.join(sorted(CONFIGS))}"
        )
    if a.results and (a.cluster or a.json):
        raise UserError(
            f"--results {a.results}: nothing is measured, so --cluster and --json have no effect; remove these options"
        )
