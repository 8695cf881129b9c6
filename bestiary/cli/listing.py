"""Commands `runs` (list the runs below a folder) and `list` (list names that other commands accept)."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table

from bestiary.cli.arguments import Parser
from bestiary.config.toml import preset_paths
from bestiary.envs import atari_games, canonical_name, lookup_env, procgen, toy
from bestiary.envs.rewards.named_rewards import NAMED_REWARDS, available_named_rewards
from bestiary.envs.rewards.wrapper import list_components
from bestiary.envs.warehouse.variants import VARIANTS
from bestiary.loggers import LOGGERS
from bestiary.runs import zoo
from bestiary.runs.csv_tables import read_columns
from bestiary.runs.listing import COLUMNS, describe_run, find_runs, list_run_folders
from bestiary.runs.run_lock import is_locked
from bestiary.studies.study_file import published_studies
from bestiary.utils import trust
from bestiary.utils.console import is_interactive, plain, stdout
from bestiary.utils.errors import UserError

LIVE_COLUMNS = (
    "run",
    "environment",
    "steps",
    "of",
    "steps/s",
    "return",
    "policy lag",
    "bottleneck",
    "restarts",
    "time",
)
REFRESH_SECONDS = 2.0


# --- runs ---


def runs(argv: list[str]) -> None:
    """Print a table of the runs below a folder."""
    parser = Parser("runs", "List the runs below a folder, oldest first.")
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="runs", help="folder to search (default: runs)")
    parser.add_argument(
        "--live",
        action="store_true",
        help="list only runs that are being trained now, with steps/s, policy lag and, on a cluster, the number of "
        "process restarts; in a terminal, the table is updated until you press Ctrl-C",
    )
    a = parser.parse_strictly(argv)
    if a.live:
        _show_live(Path(a.folder))
    else:
        _show_runs(Path(a.folder))


def _show_runs(folder: Path) -> None:
    table = Table()
    for column in ("run", *COLUMNS):
        table.add_column(column, justify="right" if column in ("seed", "steps", "of", "return", "time") else "left")
    for path in find_runs(folder):
        table.add_row(*map(plain, (str(path), *describe_run(path))))
    stdout.print(table)


def _show_live(folder: Path) -> None:
    """Print a table of the runs that are being trained. In a terminal, update it until the user presses Ctrl-C."""
    if not is_interactive():
        stdout.print(_live_table(folder))
        return

    from rich.live import Live

    with Live(_live_table(folder), console=stdout) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            live.update(_live_table(folder))


def _live_table(folder: Path) -> Table:
    table = Table(caption=None if folder.is_dir() else f"no such folder: {folder}")
    for column in LIVE_COLUMNS:
        table.add_column(column, justify="left" if column in ("run", "environment", "bottleneck") else "right")
    for path in [path for path in list_run_folders(folder) if is_locked(path)]:
        table.add_row(*map(plain, (str(path), *_live_cells(path))))
    return table


def _live_cells(path: Path) -> list[str]:
    """Return the cells of a run for all LIVE_COLUMNS except the first. A cell without a value is empty."""
    from bestiary.training.utilisation import find_bottleneck

    environment, _, steps, total, returns, duration, _ = describe_run(path)
    try:
        metrics = read_columns(path / "metrics.csv")
    except UserError:
        metrics = {}
    newest = {name: column[-1] for name, column in metrics.items() if len(column) and column.dtype.kind == "f"}
    waits = ("actor_wait", "learner_wait", "actor_environment", "actor_inference")
    bottleneck = ""
    if "actor_wait" in newest:
        bottleneck = find_bottleneck({name: float(newest.get(name, 0)) for name in waits}, "")[0]
    lag = f"{newest['policy_lag']:.1f}" if "policy_lag" in newest else ""
    restarts = f"{newest['restarts']:.0f}" if "restarts" in newest else ""
    speed = f"{newest['sps']:,.0f}" if "sps" in newest else ""
    return [environment, steps, total, speed, returns, lag, bottleneck, restarts, duration]


# --- list ---


def list_command(argv: list[str]) -> None:
    """Print the names that can be given to other commands, each with a description."""
    parser = Parser(
        "list",
        "List the names of environments, components, presets, rewards, studies (published experiments) or zoo agents "
        "(trained agents that come with the package), with descriptions.",
    )
    names = ", ".join([*LISTS, "rewards"])
    parser.add_argument("what", metavar="WHAT", choices=[*LISTS, "rewards"], help=f"what to list: {names}")
    parser.add_argument(
        "filter",
        metavar="TEXT",
        nargs="?",
        default="",
        help="list only names that contain this text; for rewards: the environment, for example atari/Riverraid",
    )
    a = parser.parse_strictly(argv)
    if a.what == "rewards":
        found = _list_rewards(a.filter)
    else:
        found = {name: text for name, text in LISTS[a.what]().items() if a.filter.lower() in name.lower()}
    if not found:
        raise UserError(
            f"list {a.what} {a.filter}: no name contains {a.filter} (to list all names: bestiary list {a.what})"
        )
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:<{width}}  {text}".rstrip())


def _list_envs() -> dict[str, str]:
    import gymnasium

    names = {f"toy/{name}": _first_line(game) for name, game in toy.TOY_GAMES.items()}
    names |= {name: spec.description for name, spec in VARIANTS.items()}
    names |= {f"atari/{game}": "" for game in atari_games.list_games()}
    names |= {f"procgen/{game}:{mode}": "" for game, about in procgen.GAMES.items() for mode in about.modes.split()}
    names |= {f"gymnasium/{name}": "" for name in sorted(gymnasium.registry)}
    return names | {"path/to/file.py:Name": "your own environment (see docs/extending.md)"}


def _list_presets() -> dict[str, str]:
    return {name: path.read_text().splitlines()[0].removeprefix("# ") for name, path in preset_paths().items()}


def _list_studies() -> dict[str, str]:
    return {name: path.read_text().splitlines()[0].removeprefix("# ") for name, path in published_studies().items()}


def _list_rewards(env: str) -> dict[str, str]:
    """Return {name: description} of the reward components and named rewards that an environment supports."""
    if not env:
        raise UserError("list rewards: no environment given; for example: bestiary list rewards atari/Riverraid")
    spec = lookup_env(canonical_name(trust.named_by_user(env)))
    components = list_components(spec.interface(spec.options()))
    names = {f"{name}=WEIGHT": component.description for name, component in components.items()}
    for name in available_named_rewards(components):
        reward = NAMED_REWARDS[name]
        base = "" if reward.base is None else f"[:BASE={reward.base:g}]"
        names[f"{name}:STRENGTH{base}"] = reward.description
    return names | {"path/to/file.py:name": "your own Python function (see docs/rewards.md)"}


def _list_components(kind: str) -> dict[str, str]:
    from bestiary.config.components import REGISTRIES

    return {name: _first_line(component) for name, component in REGISTRIES[kind].items()}


def _list_loggers() -> dict[str, str]:
    names = {name: _first_line(logger) for name, logger in LOGGERS.items()}
    return names | {"path/to/file.py:Name": "your own logger (see docs/extending.md)"}


def _first_line(component: object) -> str:
    return (component.__doc__ or "").strip().splitlines()[0]


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "envs": _list_envs,
    "algorithms": partial(_list_components, "algo"),
    "agents": partial(_list_components, "agent"),
    "torsos": partial(_list_components, "torso"),
    "memories": partial(_list_components, "memory"),
    "critics": partial(_list_components, "critic"),
    "loggers": _list_loggers,
    "presets": _list_presets,
    "studies": _list_studies,
    "zoo": lambda: dict.fromkeys(zoo.agent_names(), "trained agent; all commands except resume accept it as RUN"),
}
