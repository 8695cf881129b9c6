"""The run folder: created once, written by one trainer at a time, read by everything else."""

import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from bestiary import plugins, zoo
from bestiary.agents.agent import Agent
from bestiary.config import Config
from bestiary.console import note
from bestiary.envs.mixture import shapes
from bestiary.errors import UserError
from bestiary.options import option, parse_options, suggest
from bestiary.resolve import resolve
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint, unused
from bestiary.runs.tables import read_columns
from bestiary.textconfig import dump_toml, read_tables, read_toml

HEADER = "# What this run is made of: `bestiary train --config` on this file starts the same one again.\n"


@dataclass(frozen=True)
class Place:
    """Where a new run goes."""

    name: str | None = option(None, "folder below runs/ (none: environment, agent and date)")
    run_dir: str | None = option(None, "folder of the run, anywhere")
    if_exists: str = option("error", "what to do where the folder is there already", choices=("error", "resume", "new"))

    def path(self, config: Config) -> Path:
        if self.run_dir is not None:
            return Path(self.run_dir).expanduser()
        return Path("runs") / (self.name or f"{config.label()}-{time.strftime('%Y%m%d-%H%M%S')}")

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name or Path(self.name).name != self.name):
            raise ValueError(f"--name {self.name}: a name of one folder below runs/; --run-dir takes any path")


@dataclass
class Run:
    """A run folder, opened for reading."""

    path: Path
    trust_code: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> Config:
        """What the run is made of. A user's own parts are imported only as `bestiary.plugins` allows."""
        flat = read_toml(self.path / "config.toml")
        hashes = _read_plugin_hashes(self.path / "config.toml")

        def trusted(path: Path, name: str) -> str:
            return plugins.resolve_trusted(f"{path}:{name}", self.path / "plugins", hashes, self.trust_code)

        flat = plugins.renamed(flat, trusted)
        return resolve(flat, dict.fromkeys(flat, str(self.path / "config.toml")))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What config.toml says, as text: nothing is imported, and users' own parts are named by content, not by path."""
        hashes = _read_plugin_hashes(self.path / "config.toml")
        return plugins.renamed(
            read_toml(self.path / "config.toml"),
            lambda path, name: f"{path.name}:{name}@{hashes.get(str(path), '')[:8]}",
        )

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """metrics.csv by column."""
        return read_columns(self.path / "metrics.csv")

    @property
    def episodes(self) -> dict[str, np.ndarray]:
        """episodes.csv by column."""
        return read_columns(self.path / "episodes.csv")

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return checkpoints.checkpoints(self.path / "checkpoints")

    @property
    def steps(self) -> int:
        """Steps of the newest checkpoint."""
        return self.checkpoints[-1].steps if self.checkpoints else 0

    def agent(self, checkpoint: int | Checkpoint | None = None) -> Agent:
        """The trained agent at a checkpoint (the newest, or the nearest to so many steps, or just this one), ready to act."""
        pool = self.config.make_pool(1, 0)
        agent = self.config.make_agent(pool)
        pool.close()
        chosen = checkpoint if isinstance(checkpoint, Checkpoint) else checkpoints.choose(self.path, checkpoint)
        load_weights(agent, chosen)
        return agent

    def evaluate(self, episodes: int | None = None, **options: Any) -> Any:
        """Play whole games and return their statistics: see `bestiary.analysis.evaluate`."""
        from bestiary.analysis.evaluate import evaluate

        return evaluate(self, episodes=episodes, **options)

    def with_env(self, options: dict[str, Any]) -> "Run":
        """The run as if its environment had these options: to see how the same agent does there."""
        if not options:
            return self
        schema, problems = type(self.config.env_options), list[str]()
        given = {**asdict(self.config.env_options), **options}
        parsed = parse_options(schema, {k: v for k, v in given.items() if v is not None}, "env", problems)
        if problems:
            raise UserError(*problems)
        other = Run(self.path, self.trust_code)
        other.config = replace(self.config, env_options=parsed)
        before, after = (config.make_pool(1, 0) for config in (self.config, other.config))
        before.close()
        after.close()
        if before.observation_spec != after.observation_spec or before.action_spec != after.action_spec:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise UserError(
                f"{flags}: the agent of {self.path} sees {shapes(before)} and has {before.action_spec.n} actions; with "
                f"this it would see {shapes(after)} and have {after.action_spec.n}"
            )
        return other

    def new_path(self, folder: str, stem: str, suffix: str) -> Path:
        """A file below the run folder (below runs/zoo-NAME for one of the zoo) that does not exist yet, under a name that no
        other file has either: what belongs together differs in its suffix."""
        place = (Path("runs") / f"zoo-{self.name}" if self.shipped else self.path) / folder
        place.mkdir(parents=True, exist_ok=True)
        names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        taken = {path.stem for path in place.iterdir()}
        return place / f"{next(name for name in names if name not in taken)}{suffix}"

    @property
    def shipped(self) -> bool:
        """It came with the package: it is only read, and what is made of it goes to runs/zoo-NAME."""
        return self.path.resolve().is_relative_to(zoo.FOLDER)

    @property
    def being_written(self) -> bool:
        if not (self.path / "lock.json").exists():
            return False
        try:
            with filelock.FileLock(self.path / "lock").acquire(timeout=0):
                return False
        except filelock.Timeout:
            return True
        except OSError:
            return False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder as its only writer. The lock is the operating system's: it ends with the process, however."""
        if self.shipped:
            raise UserError(f"zoo/{self.name} came with the package and is only read: it can be played, not trained on")
        lock = filelock.FileLock(self.path / "lock", timeout=0)
        owner = self.path / "lock.json"
        try:
            lock.acquire()
        except filelock.Timeout:
            raise UserError(
                f"{self.path} is being written by another process{_owner(owner)}: wait, or stop that one"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}") from error
        try:
            if owner.exists():
                note(f"note: the last writer of {self.path}{_owner(owner)} did not end cleanly; taking over")
            owner.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()


def open_run(path: str | Path, trust_code: bool = False) -> Run:
    """An existing run folder; `runs/NAME`, `NAME`, any path, or `zoo/NAME` for one that came with the package."""
    asked = Path(path).expanduser()
    for place in (asked, Path("runs") / asked):
        if (place / "config.toml").is_file():
            real = place.resolve()
            inside = real.is_relative_to(Path.cwd())
            return Run(real.relative_to(Path.cwd()) if inside else real, trust_code)
    if (shipped := zoo.find(asked)) is not None:
        return Run(shipped, trust_code)
    known = [*(p.parent.name for p in Path("runs").glob("*/config.toml")), *zoo.names()]
    if asked.exists():
        raise UserError(f"{path} is not a run folder: it has no config.toml")
    wrong = str(asked) if asked.parent == Path("zoo") else asked.name
    raise UserError(f"{path}: there is no such run{suggest(wrong, known)} (bestiary runs lists them)")


def labels(runs: Sequence[Run]) -> list[str]:
    """What runs are called in one picture: their names, or paths where two have the same name."""
    names = [run.name for run in runs]
    paths = [f"zoo/{run.name}" if run.shipped else str(run.path) for run in runs]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def create_run(config: Config, place: Place) -> tuple[Run, bool]:
    """The folder for a new run, or, where the place says so, the existing run to go on with (then True)."""
    path = place.path(config)
    automatic = place.name is None and place.run_dir is None
    if (path.is_dir() and any(path.iterdir())) or path.is_file():
        if place.if_exists == "new" or automatic:
            path = unused(path)
        elif not (path / "config.toml").is_file():
            raise UserError(f"{path} exists and is not a run folder; choose another --name or --run-dir")
        elif place.if_exists == "resume":
            return Run(path), True
        else:
            raise UserError(
                f"{path} exists already; go on with it (bestiary resume {path}), choose another --name, or add --if-exists new"
            )
    try:
        path = _make_folder(path, or_beside=automatic)
        (path / "checkpoints").mkdir(exist_ok=True)
        _copy_plugins(config, path / "plugins")
        _write_text(path / "config.toml", HEADER + config.to_toml())
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror or error}") from error
    checkpoints.link(path.parent / "latest", path.name)
    return Run(path), False


def _make_folder(path: Path, or_beside: bool) -> Path:
    """Make a folder; where several trainings start in the same second, each takes a name of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while or_beside:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            path = unused(path)
    path.mkdir(exist_ok=True)
    return path


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def amend(run: Run, **training: Any) -> None:
    """Change options of an existing run's training; everything else in its config.toml stays as it is written."""
    run.config = replace(run.config, training=replace(run.config.training, **training))
    tables = read_tables(run.path / "config.toml")
    _write_text(run.path / "config.toml", HEADER + dump_toml({**tables, **training}))


def load_weights(agent: Agent, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into an agent; says what differs where it was made for another one."""
    saved, expected = checkpoint.model(), agent.state_dict()
    differences = [
        f"{name}: {'missing' if name not in saved else tuple(saved[name].shape)} in the checkpoint, "
        f"{tuple(expected[name].shape) if name in expected else 'not there'} in the agent"
        for name in sorted({*saved, *expected})
        if name not in saved or name not in expected or saved[name].shape != expected[name].shape
    ]
    if differences:
        raise UserError(f"{checkpoint.path} was made for another agent than config.toml describes:", *differences[:8])
    agent.load_state_dict(saved)


def _copy_plugins(config: Config, folder: Path) -> None:
    for source, sha256 in config.plugin_hashes.items():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / plugins.copy_name(Path(source), sha256))


def _read_plugin_hashes(path: Path) -> dict[str, str]:
    return read_tables(path).get("plugins", {})


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_text())
        return f" (pid {owner['pid']} on {owner['host']})"
    except (OSError, ValueError, KeyError):
        return ""
