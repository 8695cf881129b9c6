"""Commands `train` and `resume`."""

import itertools
from dataclasses import fields
from typing import TYPE_CHECKING

from bestiary.cli.arguments import Parser, add_trust_code
from bestiary.cli.main import allow_garbage_collection
from bestiary.cli.option_flags import add_option_flags
from bestiary.config.logger_options import find_loggers, merged_options
from bestiary.config.plugin_options import trust_named
from bestiary.config.training_options import Training
from bestiary.loggers import LOGGERS, Logger
from bestiary.runs.machine_options import MACHINE_OPTIONS
from bestiary.runs.option_sources import merge_sources
from bestiary.runs.run import RunLocation, open_run
from bestiary.utils.console import print_line
from bestiary.utils.plugin_names import PluginRef

if TYPE_CHECKING:
    from bestiary.config.config import Config


def train(argv: list[str]) -> None:
    """Train a new run. With --dry-run, only print its config and the origin of each value."""
    from bestiary.cli.train_parser import parse_train
    from bestiary.config.resolve import resolve

    given, location, dry_run, trust_code = parse_train(argv)
    config = resolve(*merge_sources(given, trust_code=trust_code))
    if dry_run:
        _print_config(config)
        return

    from bestiary import api

    allow_garbage_collection()
    run = api.start(config, RunLocation(**location))
    print_line(f"run: {run.path}")


def _print_config(config: "Config") -> None:
    """Print a config with the origin of each value, and the size of the network.

    Raise UserError if one of the user's callbacks is invalid.
    """
    from bestiary.config.origins import annotated_toml
    from bestiary.training.config_summary import describe

    if config.callbacks:
        from bestiary.training.callbacks.user_callback import make_user_callbacks

        make_user_callbacks(config)  # only to check them
    print(annotated_toml(config.to_toml(), config.origins))
    print(describe(config))


def resume(argv: list[str]) -> None:
    """Continue a stopped run, or extend a finished run."""
    parser = Parser("resume", "Continue a stopped run from a checkpoint, or extend a finished run with --steps.")
    parser.add_argument("run", metavar="RUN", help="run folder, for example runs/latest")
    add_trust_code(parser)
    parser.add_integer(
        "--steps",
        "new total number of steps; the learning-rate schedule is stretched to this number, unless "
        "--algo.lr-schedule-steps is set (default: unchanged)",
        low=1,
        metavar="STEPS",
    )
    parser.add_integer(
        "--checkpoint",
        "continue from the checkpoint nearest to this number of steps, and rename later checkpoints (default: the "
        "newest checkpoint)",
        metavar="STEPS",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although config.toml has other options or another seed than the checkpoint, or although another "
        "run saved the checkpoint (default: stop with an error)",
    )
    group = parser.add_argument_group(
        "options of this machine (default: as in config.toml, if you have trained the run with them on this machine)"
    )
    add_option_flags(group, Training, "", only=MACHINE_OPTIONS)
    logger_options = merged_options([*LOGGERS.values(), *_own_loggers(argv)])
    add_option_flags(group, logger_options, "logger")
    a = parser.parse_strictly(argv)
    names = [*MACHINE_OPTIONS, *(f"logger.{field.name}" for field in fields(logger_options))]
    machine = {name: getattr(a, name) for name in names if getattr(a, name) is not None}
    if a.logger is not None:
        machine["logger"] = ",".join(a.logger)

    from bestiary import api

    run = api.resume(open_run(a.run, a.trust_code), a.steps, a.checkpoint, a.accept_changes, **machine)
    print_line(f"run: {run.path}")


def _own_loggers(argv: list[str]) -> list[type[Logger]]:
    """Return the classes of the user's own loggers on a command line: the flags of `resume` depend on their options."""
    words = [word for flag, word in itertools.pairwise(argv) if flag == "--logger"]
    words += [word.removeprefix("--logger=") for word in argv if word.startswith("--logger=")]
    names = trust_named({"logger": ",".join(words)})["logger"] if words else []
    # Problems are reported later, with those of the other options.
    return [*find_loggers([name for name in names if isinstance(name, PluginRef)], []).values()]
