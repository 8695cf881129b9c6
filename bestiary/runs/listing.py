"""What there is: the runs below a folder, and the parts to choose from."""

import time
from pathlib import Path

from rich.live import Live
from rich.table import Table

from bestiary import zoo
from bestiary.agents import AGENTS
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.console import duration, interactive, plain_number, short, stdout
from bestiary.envs import atari, procgen, toy
from bestiary.envs.rewards import RewardedPool, Rewards
from bestiary.envs.weightings import NAMED, fitting
from bestiary.errors import UserError
from bestiary.options import convert
from bestiary.runs.checkpoints import checkpoints
from bestiary.runs.folder import Run
from bestiary.runs.tables import read_columns
from bestiary.runtime.load import bound_by
from bestiary.textconfig import presets, read_toml

COLUMNS = ("environment", "seed", "steps", "of", "return", "time", "state")


def find_runs(folder: Path) -> list[Path]:
    """The folders of all runs below one, oldest first; the folder itself, where it is a run."""
    runs = [path.parent for path in folder.glob("**/config.toml") if not path.parent.is_symlink()]
    if not runs:
        raise UserError(f"there is no run below {folder}; bestiary train --preset hello makes one")
    return sorted(runs, key=lambda path: path.stat().st_mtime)


def show_runs(folder: Path) -> None:
    table = Table()
    for column in ("run", *COLUMNS):
        table.add_column(column, justify="right" if column in ("seed", "steps", "of", "return", "time") else "left")
    for path in find_runs(folder):
        table.add_row(str(path), *describe_run(path))
    stdout.print(table)


LIVE = ("run", "environment", "steps", "of", "steps/s", "return", "lag", "bound by", "restarts", "time")


def show_live(folder: Path, seconds: float = 2.0) -> None:
    """The runs that are being trained now; where a person watches, again and again."""
    if not interactive():
        stdout.print(_live_table(folder))
        return
    with Live(_live_table(folder), console=stdout) as live:
        while True:
            time.sleep(seconds)
            live.update(_live_table(folder))


def _live_table(folder: Path) -> Table:
    table = Table(caption=None if folder.is_dir() else f"there is no folder {folder}")
    for column in LIVE:
        table.add_column(column, justify="left" if column in ("run", "environment", "bound by") else "right")
    runs = [path.parent for path in sorted(folder.glob("**/config.toml")) if not path.parent.is_symlink()]
    for path in [path for path in runs if Run(path).being_written]:
        table.add_row(str(path), *_live_cells(path))
    return table


def _live_cells(path: Path) -> list[str]:
    environment, _, steps, total, returned, spent, _ = describe_run(path)
    metrics = read_columns(path / "metrics.csv")
    newest = {name: column[-1] for name, column in metrics.items() if len(column)}
    waits = {name: float(newest.get(name, 0)) for name in ("actor_wait", "learner_wait", *_ACTOR)}
    bound = bound_by(waits, "")[0] if "actor_wait" in newest else ""
    lag = f"{newest['lag']:.1f}" if "lag" in newest else ""
    restarts = f"{newest['restarts']:.0f}" if "restarts" in newest else ""
    speed = f"{newest['sps']:,.0f}" if "sps" in newest else ""
    return [environment, steps, total, speed, returned, lag, bound, restarts, spent]


_ACTOR = ("actor_environment", "actor_inference")


def describe_run(path: Path) -> list[str]:
    """One run in words. Reads only text, so that a run of somebody else's code can be listed safely."""
    try:
        config = read_toml(path / "config.toml")
        total = convert(config.get("steps", 0), int)
    except (UserError, ValueError) as error:
        return [f"unreadable: {error}", "", "", "", "", "", ""]
    metrics, saved = read_columns(path / "metrics.csv"), checkpoints(path / "checkpoints")
    steps = saved[-1].steps if saved else 0
    have = bool(metrics) and len(metrics["step"]) > 0
    returns = [column[-1] for name, column in metrics.items() if have and name.split("/")[-1] == "return"]
    state = "finished" if steps >= total else "running" if Run(path).being_written else "stopped"
    names = config.get("env", [])
    return [
        ", ".join(Path(n).name if ".py:" in n else n for n in names),
        str(config.get("seed", "")),
        short(metrics["step"][-1]) if have and state == "running" else short(steps),
        short(total),
        " ".join("-" if value != value else plain_number(value) for value in returns),
        duration(float(metrics["seconds"][-1])) if have else "",
        state,
    ]


def _env_names() -> dict[str, str]:
    import gymnasium

    from bestiary.envs import warehouse

    names = {f"toy/{name}": _first_line(world) for name, world in toy.WORLDS.items()}
    names |= {name: world.about for name, world in warehouse.VARIANTS.items()}
    names |= {f"atari/{game}": "" for game in atari.games()}
    names |= {f"procgen/{game}:{mode}": "" for game, about in procgen.GAMES.items() for mode in about.modes.split()}
    names |= {f"gymnasium/{name}": "" for name in sorted(gymnasium.registry)}
    return names | {"path/to/file.py:Name": "your own (docs/extending.md)"}


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]


def _preset_names() -> dict[str, str]:
    return {name: path.read_text().splitlines()[0].removeprefix("# ") for name, path in presets().items()}


def _reward_names(env: str) -> dict[str, str]:
    """Of one environment: its components, then the named rewards that mean something there."""
    from bestiary.envs import canonical, make

    if not env:
        raise UserError("rewards of which environment? For example: bestiary list rewards atari/Riverraid")
    pool = RewardedPool(make(canonical(env)), Rewards(true=None, trained="alive=1"))
    pool.close()
    names = {f"{name}=WEIGHT": component.about for name, component in pool.components.items()}
    for name in fitting(pool.components, pool.tasks[0]):
        reward = NAMED[name]
        written = f"{name}:STRENGTH" + ("" if reward.base is None else f"[:BASE={reward.base:g}]")
        names[written] = reward.about
    return names | {"path/to/file.py:name": "your own function of the measures (docs/rewards.md)"}


LISTS = {
    "envs": _env_names,
    "torsos": lambda: {name: _first_line(part) for name, part in TORSOS.items()},
    "memories": lambda: {name: _first_line(part) for name, part in MEMORIES.items()},
    "agents": lambda: {name: _first_line(part) for name, part in AGENTS.items()},
    "critics": lambda: {name: _first_line(part) for name, part in CRITICS.items()},
    "algorithms": lambda: {name: _first_line(part) for name, part in ALGORITHMS.items()},
    "presets": _preset_names,
    "zoo": lambda: {name: "valid wherever a RUN is" for name in zoo.names()},
    "rewards": dict,  # of an environment
}


def show_list(what: str, containing: str) -> None:
    if what == "rewards":
        names = _reward_names(containing)
    else:
        names = {name: text for name, text in LISTS[what]().items() if containing.lower() in name.lower()}
    if not names:
        raise UserError(f"no {what} with {containing} in the name")
    width = max(map(len, names))
    for name, text in names.items():
        print(f"{name:<{width}}  {text}".rstrip())
