"""Groups of runs that are repetitions of one experiment, and the labels of these groups in figures and tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bestiary.config.training_options import group_key
from bestiary.runs.run import Run
from bestiary.utils.console import note, warn
from bestiary.utils.errors import UserError

MAX_DIFFERENCES = 3  # a short label has at most this many differing options
MAX_WORD_LENGTH = 36  # a longer option value or run name is abbreviated in short labels
MAX_RUN_NAMES = 4  # a legend lists at most this many run names of a group


def unique_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without duplicates.

    For example, a run is listed twice if the list also contains the link runs/latest, and this link points to the run.
    """
    by_path: dict[Path, Run] = {}
    for run in runs:
        path = run.path.resolve()
        if path in by_path:
            note(f"note: {run.path} is listed more than once (a link such as runs/latest counts); it is used once")
        by_path.setdefault(path, run)
    return list(by_path.values())


def group_by_config(
    runs: Sequence[Run], configs: Mapping[Path, dict[str, Any]], names: Sequence[str] = (), warn_of_seeds: bool = True
) -> dict[str, list[Run]]:
    """Return {label: runs whose configs differ only in the seed}.

    The groups are sorted by the position of their first run in `runs`. `names` are the labels of the groups in this
    order. If no names are given, a label says how the config of the group differs from the other configs. Raise
    UserError if the number of names is wrong.
    """
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        by_config.setdefault(group_key(configs[run.path]), []).append(run)
    labels = config_labels(list(by_config))
    if names:
        _check_names(names, [list_names(members) for members in by_config.values()])
        labels = list(names)
    groups = dict(zip(labels, by_config.values(), strict=True))
    for label, members in groups.items():
        seeds = [run.raw_config["seed"] for run in members]
        if warn_of_seeds and len(set(seeds)) < len(seeds):
            warn(f"{label}: some of the seeds {seeds} are equal, so the band may be too narrow")
    return groups


def _check_names(names: Sequence[str], groups: Sequence[str]) -> None:
    """Raise UserError if there is not exactly one name for each group, or if two names are equal."""
    given = " ".join(names)
    if len(names) != len(groups):
        listed = "; ".join(f"{k}. {members}" for k, members in enumerate(groups, start=1))
        raise UserError(
            f"--label {given}: {len(names)} {'name' if len(names) == 1 else 'names'} for {len(groups)} "
            f"{'group' if len(groups) == 1 else 'groups'} of runs; give one name per group, in this order: {listed}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"--label {given}: two groups have the same name; choose different names")


def config_labels(group_keys: Sequence[str]) -> list[str]:
    """Return a label for each config. `group_keys` are the configs as JSON (see `group_key`).

    A label has all components and options in which the configs differ: first the components, then options that are
    needed so that all labels differ, then the other options. Options of a component that differs, for example algo.lr
    if algo differs, are left out if they are not needed. An empty label is replaced by the names of the config's
    environments.
    """
    configs = [json.loads(key) for key in group_keys]
    keys = {key for config in configs for key in config}
    differing = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    shown = [kind for kind in ("env", "algo", "agent", "torso", "memory", "critic") if kind in differing]
    options = sorted(key for key in differing if key not in shown)
    labels = [_config_label(config, shown) for config in configs]
    while options and len(set(labels)) < len(labels):
        shown.append(options.pop(0))
        labels = [_config_label(config, shown) for config in configs]
    shown += [key for key in options if key.partition(".")[0] not in shown]
    labels = [_config_label(config, shown) for config in configs]
    return [label or " ".join(config["env"]) for label, config in zip(labels, configs, strict=True)]


def _config_label(config: dict[str, Any], keys: list[str]) -> str:
    """Return the given keys and their values as text, for example "algo ppo, torso mlp, steps none".

    If the config does not contain a key, its value is "none". Exception: if the key is an option of a component, such
    as torso.width, it is left out.
    """
    values = {key: config.get(key, "none") for key in keys if key in config or "." not in key}
    words = {key: " ".join(map(str, v)) if isinstance(v, list) else v for key, v in values.items()}
    return ", ".join(str(value) if key == "env" else f"{key} {value}" for key, value in words.items())


# --- short texts for legends ---


def short_label(label: str) -> str:
    """Return a label with at most MAX_DIFFERENCES options, and with abbreviated values.

    If options are left out, their number is appended: "algo ppo, torso mlp, memory gru, +4 options".
    """
    parts = label.split(", ")
    hidden = len(parts) - MAX_DIFFERENCES
    shown = [_shorten(part) for part in parts[:MAX_DIFFERENCES]]
    if hidden > 0:
        shown.append(f"+{hidden} {'option' if hidden == 1 else 'options'}")
    return ", ".join(shown)


def list_names(runs: Sequence[Run]) -> str:
    """Return the names of runs, separated by commas; only the first and the last if there are over MAX_RUN_NAMES."""
    names = [_shorten(run.name) for run in runs]
    return ", ".join(names) if len(names) <= MAX_RUN_NAMES else f"{names[0]} ... {names[-1]}"


def _shorten(text: str) -> str:
    """Return the text, with an ellipsis in its middle if it is longer than MAX_WORD_LENGTH."""
    if len(text) <= MAX_WORD_LENGTH:
        return text
    half = (MAX_WORD_LENGTH - 3) // 2
    return f"{text[:half]}...{text[-half:]}"
