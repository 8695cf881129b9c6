"""Options of a machine: devices, threads, the cluster, loggers, and paths of other runs.

A run folder may come from another person or another machine. In this case, `resume` does not use the values of these
options in config.toml, and the user must give them again on the command line.

The file runs.json (`utils/user_store.py`), outside of all run folders, shows whether the user has chosen the values on
this machine. For each run that the user has trained on this machine, it contains the ID of the run and a hash of the
values of these options.
"""

import hashlib
import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from bestiary.config.training_options import Training
from bestiary.runs.run import Run
from bestiary.utils.console import note, printable
from bestiary.utils.errors import UserError
from bestiary.utils.options import parse_options, suggest
from bestiary.utils.user_store import UserStore

RUNS = UserStore("runs.json", max_records=100_000)
MACHINE_OPTIONS = tuple(f.name for f in fields(Training) if f.metadata["machine"])
DEFAULTS = {name: getattr(Training(), name) for name in MACHINE_OPTIONS}


def machine_values(training: Training) -> dict[str, Any]:
    """Return the values of MACHINE_OPTIONS."""
    return {name: getattr(training, name) for name in MACHINE_OPTIONS}


def machine_flags(training: Training) -> list[str]:
    """Return the values that are not defaults as arguments of `bestiary resume`, for example ["--device=cpu"]."""
    values = {name: value for name, value in machine_values(training).items() if value != DEFAULTS[name]}
    return [f"--{name.replace('_', '-')}={'on' if value is True else value}" for name, value in values.items()]


def remember_run(run: Run, training: Training) -> None:
    """Store in runs.json that the user trains this run on this machine with the machine options in `training`."""
    if _is_id(run.id):
        record = {"options": _digest(training), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        if RUNS.read().get(run.id, {}).get("options") != record["options"]:
            RUNS.update(run.id, lambda _: record)


def is_own_choice(run: Run, training: Training) -> bool:
    """Return whether the user has trained this run on this machine with the machine options in `training`."""
    return _is_id(run.id) and RUNS.read().get(run.id, {}).get("options") == _digest(training)


def choose_machine_options(run: Run, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of MACHINE_OPTIONS with which a run is resumed.

    If `given` contains an option, its value is used. The other values come from config.toml if the user has chosen them
    on this machine. If not, the defaults are used, and a note lists the values in config.toml that are not used.

    Raises:
        UserError: a given value is invalid, or the address of the cluster is missing.
    """
    problems = [
        f"--{name.replace('_', '-')}: not an option of resume{suggest(name, MACHINE_OPTIONS)}"
        for name in given
        if name not in MACHINE_OPTIONS
    ]
    parsed = parse_options(Training, given, "", problems)
    if problems:
        raise UserError(*problems)
    training = run.config.training
    saved = machine_values(training)
    if not is_own_choice(run, training):
        ignored = {name: value for name, value in saved.items() if value != DEFAULTS[name] and name not in given}
        if training.runtime == "cluster" and "cluster" in ignored:
            raise UserError(
                f"{run.path} trains on a cluster, but you have not trained it on this machine with the options in its "
                f"config.toml (cluster {training.cluster}); add --cluster local, --cluster auto or --cluster HOST:PORT"
            )
        if ignored:
            # The values may come from another person. Quote them, so that the shell executes none of them as a command
            # if the user copies the flags.
            flags = printable(shlex.join(machine_flags(replace(Training(), **ignored))))
            note(
                f"note: you have not trained {run.path} on this machine with the options in its config.toml, so some "
                f"of them are not used; to use them, add {flags}"
            )
        saved = DEFAULTS
    chosen = {**saved, **{name: getattr(parsed, name) for name in given}}
    if chosen["cluster"] is not None and training.runtime != "cluster":
        raise UserError(f"--cluster {chosen['cluster']}: {run.path} has runtime = {training.runtime}; remove --cluster")
    return chosen


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", text) is not None


def _digest(training: Training) -> str:
    return hashlib.sha256(json.dumps(machine_values(training), sort_keys=True).encode()).hexdigest()
