"""Sources of a new run's options: another run (`--init-from`), a preset, a config file, and options given directly.

Each source becomes a flat dict, for example `{"memory": "lstm", "memory.hidden": 512, "steps": "5M"}`. `merge_sources`
merges these dicts in this order: run of `--init-from`, `--preset`, `--config`, direct options. If two sources set the
same option, the later source in this order wins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary.config.option_merging import override_options
from bestiary.config.plugin_options import trust_in_file, trust_named
from bestiary.config.toml import flatten, read_preset
from bestiary.runs import plugin_copies
from bestiary.runs.format_version import check_version
from bestiary.runs.run import open_run
from bestiary.utils.console import note
from bestiary.utils.errors import UserError
from bestiary.utils.options import BOOLEANS

FALSE_VALUES = tuple(text for text, value in BOOLEANS.items() if not value)


def merge_sources(
    options: Mapping[str, Any], *, trust_code: bool = False, study: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge `options` with the sources that are named in `options` under "init_from", "preset" and "config".

    Return two dicts. The first contains the merged options as a flat dict. The second maps each option that is not in
    `options` to its source, for error messages: {"memory.hidden": "preset hello"}.

    Args:
        options: options given directly. If `study` is empty, their plug-ins are trusted, because the user gave them.
        trust_code: whether to accept unknown plug-ins and clusters that are given by a config file, a study file or a
            run, and not directly by the user.
        study: description of the study file that contains `options`, or "" if they come from the user. Plug-ins from a
            study file are treated like plug-ins from a config file.

    Raises:
        UserError: a plug-in or a cluster given by a file or a run is not trusted.
    """
    direct = flatten(options)
    direct = trust_in_file(direct, study, trust_code) if study else trust_named(direct)
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if direct.get("init_from") is not None:
        merged = _options_of_run(str(direct["init_from"]), trust_code)
        origin = dict.fromkeys(merged, f"run {direct['init_from']}")
    files = {"preset": read_preset, "config": lambda name: _read_config(name, trust_code)}
    for source, read in files.items():
        name = direct.pop(source, None)
        if name is not None:
            found = read(str(name))
            merged = override_options(merged, found)
            origin |= dict.fromkeys(found, f"{source} {name}")
    merged = override_options(merged, direct)
    origin = {key: where for key, where in origin.items() if key not in direct}
    _check_cluster(merged, {**origin, **(dict.fromkeys(direct, study) if study else {})}, trust_code)
    return merged, origin


def _check_cluster(options: Mapping[str, Any], origin: Mapping[str, str], trust_code: bool) -> None:
    """Raise UserError if a file chooses a cluster and `trust_code` is False.

    Processes of a cluster can run code as the user. The cluster `local` is allowed, because the run itself starts it.
    `origin` maps an option to its file.
    """
    cluster = options.get("cluster")
    if cluster in (None, "none", "local"):
        return
    problems = []
    for key in ("cluster", "trust_open_cluster"):
        if key in origin and str(options[key]).lower() not in FALSE_VALUES:
            flag = f"--{key.replace('_', '-')} {options[key]}"
            if trust_code:
                note(
                    f"note: {origin[key]} sets {flag}; this is accepted because of --trust-code, so the processes of "
                    "this cluster can run code as you"
                )
            else:
                problems.append(
                    f"{origin[key]} sets {flag}, and the processes of this cluster could run code as you; if you "
                    "trust it, add --trust-code"
                )
    if problems:
        raise UserError(*problems)


def _read_config(path: str, trust_code: bool) -> dict[str, Any]:
    check_version(Path(path))
    return plugin_copies.trust_config(Path(path), trust_code)


def _options_of_run(path: str, trust_code: bool) -> dict[str, Any]:
    """Return the options that a warm start takes from another run.

    These are the agent and its components, the environments, the frame stack and the action set.
    """
    settings = flatten(open_run(path, trust_code).config.tables())
    kinds = ("agent", "torso", "memory", "critic")
    env_keys = ("env", "env.frame_stack", "env.full_actions")
    return {k: v for k, v in settings.items() if v is not None and (k in env_keys or k.split(".")[0] in kinds)}
