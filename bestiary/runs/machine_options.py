"""Machine options: options that depend on the machine (devices, threads, the cluster, loggers, paths of other runs).

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
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from bestiary.config.logger_options import find_loggers, merged_options
from bestiary.config.plugin_options import map_plugins, trust_named
from bestiary.config.toml import flatten
from bestiary.config.training_options import Training
from bestiary.loggers import LOGGERS
from bestiary.runs.run import Run
from bestiary.utils import plugins
from bestiary.utils.console import note, printable
from bestiary.utils.errors import UserError
from bestiary.utils.options import parse_options, suggest
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.user_store import UserStore

if TYPE_CHECKING:
    from bestiary.config.config import Config

RUNS = UserStore("runs.json", max_records=100_000)
MACHINE_OPTIONS = tuple(f.name for f in fields(Training) if f.metadata["machine"])
DEFAULTS = {name: getattr(Training(), name) for name in MACHINE_OPTIONS}
LOGGER_PREFIX = "logger."  # start of the keys of the loggers' options, which are machine options, too


def machine_values(config: "Config") -> dict[str, Any]:
    """Return the values of MACHINE_OPTIONS and of the options of the loggers, for example `logger.project`."""
    return {name: getattr(config.training, name) for name in MACHINE_OPTIONS} | _logger_values(config)


def _logger_values(config: "Config") -> dict[str, Any]:
    options = config.logger_options
    return {} if options is None else {LOGGER_PREFIX + f.name: getattr(options, f.name) for f in fields(options)}


def machine_flags(config: "Config") -> list[str]:
    """Return the values that are not defaults as arguments of `bestiary resume`, for example ["--device=cpu"]."""
    values = machine_values(config)
    defaults = DEFAULTS
    if config.logger_options is not None:
        defaults = DEFAULTS | {LOGGER_PREFIX + f.name: f.default for f in fields(config.logger_options)}
    return [_flag(name, value) for name, value in values.items() if value != defaults[name]]


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        value = "on" if value else "off"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"--{name.replace('_', '-')}={text}"


def remember_run(run: Run, config: "Config") -> None:
    """Store in runs.json that the user trains this run on this machine with the machine options in `config`."""
    if _is_id(run.id):
        record = {"options": _digest(config), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        if RUNS.read().get(run.id, {}).get("options") != record["options"]:
            RUNS.update(run.id, lambda _: record)


def is_own_choice(run: Run, config: "Config") -> bool:
    """Return whether the user has trained this run on this machine with the machine options in `config`."""
    return _is_id(run.id) and RUNS.read().get(run.id, {}).get("options") == _digest(config)


def choose_machine_options(run: Run, given: Mapping[str, Any]) -> "Config":
    """Return the config with which a run is resumed: the config of the run, with the machine options for this session.

    If `given` contains a machine option, its value is used. The other values come from config.toml if the user has
    chosen them on this machine. If not, the defaults are used, and a note lists the values in config.toml that are not
    used.

    Raises:
        UserError: a given value is invalid, or the address of the cluster is missing.
    """
    given = trust_named(flatten(given))
    problems = [
        f"--{name.replace('_', '-')}: not an option of resume{suggest(name, MACHINE_OPTIONS)}"
        for name in given
        if name not in MACHINE_OPTIONS and not name.startswith(LOGGER_PREFIX)
    ]
    parsed = parse_options(Training, given, "", problems)
    if problems:
        raise UserError(*problems)
    config = run.config
    training = config.training
    own = is_own_choice(run, config)
    if not own:
        _note_ignored(run, given)
    saved = machine_values(config) if own else DEFAULTS
    chosen = {**saved, **{name: getattr(parsed, name) for name in given if name in MACHINE_OPTIONS}}
    chosen |= {name: value for name, value in given.items() if name.startswith(LOGGER_PREFIX)}
    if chosen["cluster"] is not None and training.runtime != "cluster":
        raise UserError(f"--cluster {chosen['cluster']}: {run.path} has runtime = {training.runtime}; remove --cluster")
    return with_machine_options(config, chosen, set(given))


def _note_ignored(run: Run, given: Mapping[str, Any]) -> None:
    """Print the machine options in config.toml that are ignored. Another person may have chosen them.

    Raises:
        UserError: the address of the cluster is ignored, and `given` has no other address.
    """
    config = run.config
    ignored = [flag for flag in machine_flags(config) if _key(flag) not in given]
    if config.training.runtime == "cluster" and any(_key(flag) == "cluster" for flag in ignored):
        raise UserError(
            f"{run.path}: the cluster in config.toml ({config.training.cluster}) is not used, because you have not "
            "trained this run on this machine with these options (the run may come from another person, or config.toml "
            "was changed); add --cluster local, --cluster auto or --cluster HOST:PORT"
        )
    if ignored:
        # The values may come from another person. Quote them, so that the shell executes none of them as a command if
        # the user copies the flags.
        note(
            f"note: some options in the config.toml of {run.path} are not used, because you have not trained the run "
            f"with them on this machine; to use these options, add {printable(shlex.join(ignored))}"
        )


def _key(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--").replace("-", "_")


def with_machine_options(config: "Config", chosen: Mapping[str, Any], given: Collection[str] = ()) -> "Config":
    """Return a config with other machine options. Options of loggers that the run does not use are left out.

    Raises:
        UserError: an option in `given` belongs to none of the loggers, or a logger or the value of an option is wrong.
    """
    problems: list[str] = []
    loggers = find_loggers(chosen["logger"], problems)
    options = merged_options(loggers.values())
    names = [f.name for f in fields(options)]
    values = {key.removeprefix(LOGGER_PREFIX): value for key, value in chosen.items() if key.startswith(LOGGER_PREFIX)}
    for name in values.keys() - set(names):
        if LOGGER_PREFIX + name in given and len(problems) == 0:
            owners = [owner for owner in LOGGERS if name in {f.name for f in fields(merged_options([LOGGERS[owner]]))}]
            advice = f"; add --logger {' or '.join(owners)}" if owners else suggest(name, names)
            problems.append(f"--logger.{name.replace('_', '-')}: no logger of this run has this option{advice}")
    parsed = parse_options(options, values, "logger", problems)
    if problems:
        raise UserError(*problems)
    hashes = dict(config.plugin_hashes)

    def absolute(ref: PluginRef) -> PluginRef:
        found = ref.absolute()
        hashes[str(found.path)] = plugins.content_hash(found)
        return found

    used = map_plugins({"logger": list(loggers)}, absolute)["logger"]
    machine = {name: chosen[name] for name in MACHINE_OPTIONS} | {"logger": tuple(used) or None}
    return replace(
        config,
        training=replace(config.training, **machine),
        logger_options=parsed if loggers else None,
        plugin_hashes=hashes,
    )


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{32}", text) is not None


def _digest(config: "Config") -> str:
    """Return a hash of the machine options. Loggers in users' files are identified by their content, not their path."""
    hashes = config.plugin_hashes
    values = map_plugins(machine_values(config), lambda ref: f"{ref.attribute}@{hashes[str(ref.path)]}")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
