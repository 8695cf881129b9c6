"""Run folders: functions that create and open run folders, and the class `Run` that reads a run folder.

Only `Run.config` and the methods that use it import torch, so commands that read the tables of runs start fast.
"""

import contextlib
import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.config.toml import dump_toml, read_tables, read_toml
from bestiary.envs.multitask import describe_observations
from bestiary.envs.vector_env import VectorEnv
from bestiary.runs import checkpoints, plugin_copies, run_lock, zoo
from bestiary.runs.checkpoints import Checkpoint, unused_path
from bestiary.runs.format_version import check_version
from bestiary.runs.listing import COLUMNS, describe_run
from bestiary.runs.tables import Table, html_table
from bestiary.utils import safe_files
from bestiary.utils.console import valid_text
from bestiary.utils.errors import UserError
from bestiary.utils.options import option, parse_options, suggest
from bestiary.utils.plugin_names import PluginRef

if TYPE_CHECKING:
    import gymnasium.vector
    from matplotlib.figure import Figure

    from bestiary.agents.agent import Agent
    from bestiary.agents.trained_policy import Policy
    from bestiary.config.config import Config

CONFIG_HEADER = "# Complete configuration of this run. `bestiary train --config` on this file repeats the training.\n"

ID_FILE = "run_id.txt"
ORIGINS_FILE = "config_origins.json"  # {option: origin of its value}, see config/origins.py


@dataclass(frozen=True)
class RunLocation:
    """Options that choose the folder of a new run, and what to do if this folder exists."""

    name: str | None = option(
        None, "name of the run folder in runs/ (default: composed of environment, agent and date)", metavar="NAME"
    )
    run_dir: str | None = option(None, "path of the run folder (default: runs/NAME)", metavar="DIR")
    if_exists: str = option(
        "error",
        "what to do if the run folder exists; error: stop with an error, resume: continue its training, "
        "new: append -2, -3 ... to the name",
        choices=("error", "resume", "new"),
    )

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name or Path(self.name).name != self.name):
            raise ValueError(
                f"--name {self.name}: must be the name of a folder in runs/, without slashes; for a path use --run-dir"
            )
        if self.name == "latest":
            raise ValueError("--name latest: reserved for the link to the newest run; choose another name")

    def path(self, config: "Config") -> Path:
        """Return the path of the run folder: `run_dir` if it is given, otherwise runs/NAME.

        The default NAME is composed of environment, agent and date.
        """
        if self.run_dir is not None:
            return Path(self.run_dir).expanduser()
        return Path("runs") / (self.name or f"{config.label()}-{time.strftime('%Y%m%d-%H%M%S')}")


@dataclass(repr=False)
class Run:
    """An existing run folder."""

    path: Path
    trust_code: bool = field(default=False, repr=False)  # whether unknown plug-ins may be executed
    shown_path: Path = field(init=False, repr=False, compare=False)  # the path as the user gave it, for messages
    # Keys of config.toml that are changed in `config`, but not yet in config.toml (see `update_config`).
    unwritten_options: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.shown_path = self.path

    def __repr__(self) -> str:
        """Return one line: the path, environments, seed, steps, newest return and state of the run."""
        envs, seed, steps, total, returns, _, state = describe_run(self.path)
        if not seed:
            return f"Run({self._short_path}: {envs})"
        mean = f", return {returns}" if returns else ""
        return f"Run({self._short_path}: {envs}, seed {seed}, {steps} of {total} steps{mean}, {state})"

    def _repr_html_(self) -> str:
        """Return an HTML table with the environments, seed, steps, return, time and state of the run, for notebooks."""
        facts = dict(zip(COLUMNS, describe_run(self.path), strict=True))
        total = facts.pop("of")
        facts["steps"] = f"{facts['steps']} of {total}" if total else ""
        return html_table(f"Run {self._short_path}", [list(pair) for pair in facts.items()])

    @property
    def _short_path(self) -> str:
        return f"zoo/{self.name}" if self.in_zoo else str(self.path)

    @contextmanager
    def absolute_path(self) -> Iterator[None]:
        """Context in which `path` is absolute, because code of an environment may change the working directory.

        After the context, `path` has its previous value. If this value is a relative path and the working directory has
        changed, `path` stays absolute.
        """
        working_directory = Path.cwd()
        before = self.path
        self.path = working_directory / before
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):  # the working directory has been removed
                if before.is_absolute() or Path.cwd() == working_directory:
                    self.path = before

    @property
    def name(self) -> str:
        """The name of the run folder, as valid text."""
        return valid_text(self.path.resolve().name)

    @property
    def id(self) -> str:
        """The random ID of the run. Its checkpoints contain the same ID. Runs of older versions have an empty ID."""
        try:
            return safe_files.read_text(self.path / ID_FILE, max_bytes=1000).strip()
        except (OSError, ValueError):
            return ""

    @cached_property
    def config(self) -> "Config":
        """The configuration, with all values checked. Plug-ins (users' files) are executed only if they are trusted."""
        from bestiary.config.resolve import resolve

        options = plugin_copies.trust_options(self._read_options(), self.path, self.trust_code)
        return resolve(options, dict.fromkeys(options, str(self.path / "config.toml")))

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """The options in config.toml. They are not checked, and no plug-in is imported.

        A plug-in is named by its file name and the start of its hash, for example `net.py:Torso@1a2b3c4d`, not by its
        path. So the same plug-in has the same name in all runs.
        """
        return plugin_copies.shown_options(self._read_options(), self.path)

    def _read_options(self) -> dict[str, Any]:
        check_version(self.path)
        return read_toml(self.path / "config.toml", in_run_folder=True)

    @property
    def metrics(self) -> Table:
        """The columns of metrics.csv by name."""
        return Table.read(self.path / "metrics.csv")

    @property
    def episodes(self) -> Table:
        """The columns of episodes.csv by name."""
        return Table.read(self.path / "episodes.csv")

    @property
    def validations(self) -> Table:
        """The columns of validation.csv by name. The table is empty if the run has no validation."""
        return Table.read(self.path / "validation.csv")

    def plot(self) -> "Figure":
        """Return a matplotlib figure of the learning curve: the mean return of recent games over the steps."""
        figure = self.metrics.plot()
        figure.axes[0].set_title(self.name, fontsize="medium")
        return figure

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, from the oldest to the newest."""
        return checkpoints.list_checkpoints(self.path / "checkpoints")

    @property
    def steps(self) -> int:
        """The step count of the newest checkpoint, or 0 if there is none."""
        return self.checkpoints[-1].steps if self.checkpoints else 0

    def agent(self, checkpoint: int | Checkpoint | None = None) -> "Agent":
        """Return the agent with the weights of a checkpoint.

        If `checkpoint` is a number of steps, the nearest checkpoint is used. If `checkpoint` is None, the newest
        checkpoint is used.
        """
        agent = self.config.make_agent()
        chosen = checkpoint if isinstance(checkpoint, Checkpoint) else checkpoints.choose(self.path, checkpoint)
        load_weights(agent, chosen)
        return agent

    def policy(
        self,
        *,
        greedy: bool = False,
        seed: int = 0,
        env: str | None = None,
        checkpoint: int | Checkpoint | None = None,
    ) -> "Policy":
        """Return the trained agent as a policy for your own loop: `policy.act(observation, reward=..., done=...)`.

        In the environments of `make_vec(seed=S)`, the policy takes the same actions as in an evaluation with this seed.

        Args:
            greedy: take the most probable action instead of sampling an action.
            seed: seed with which actions are sampled.
            env: the task to play if the agent was trained on several tasks. The default is the first task.
            checkpoint: see `agent`.
        """
        from bestiary.agents.trained_policy import Policy

        return Policy(
            self.agent(checkpoint),
            self.config.interface,
            greedy=greedy,
            seed=evaluation_seeds(self.config, seed)[1],
            task=self.config.task_index(env),
            name=self.name,
        )

    def make_vec(
        self, num_envs: int = 1, *, seed: int = 0, env: str | None = None, render_mode: str | None = None
    ) -> "gymnasium.vector.VectorEnv":
        """Return a Gymnasium vector environment with the options and rewards of the training.

        The games are the same as in `bestiary eval` with the same `seed` and `num_envs`. If the agent was trained on
        several tasks, `env` is the task to play. The default is the first task. `render` requires
        `render_mode="rgb_array"`.
        """
        from bestiary.config.config import make_vector_env
        from bestiary.envs.as_gymnasium import GymnasiumAdapter

        config = self.config
        name = config.envs[config.task_index(env)]

        def build(seed: Any) -> VectorEnv:
            return make_vector_env(
                [name], config.env_options, num_envs, seed, render_mode is not None, rewards=config.rewards
            )

        return GymnasiumAdapter(build, evaluation_seeds(config, seed)[0], render_mode)

    def with_env_options(self, options: dict[str, Any]) -> "Run":
        """Return a `Run` of the same folder that uses other environment options, for example in evaluations.

        Raises:
            UserError: the options change the format of the observations or the set of actions, so that the agent does
                not fit the environment.
        """
        if not options:
            return self
        problems: list[str] = []
        values = {**asdict(self.config.env_options), **options}
        values = {key: value for key, value in values.items() if value is not None}
        parsed = parse_options(type(self.config.env_options), values, "env", problems)
        if problems:
            raise UserError(*problems)
        changed = Run(self.path, self.trust_code)
        changed.config = replace(self.config, env_options=parsed)
        old, new = self.config.interface, changed.config.interface
        if old.observation_spec != new.observation_spec or old.action_spec != new.action_spec:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise UserError(
                f"{flags}: the agent of {self.path} was trained with {describe_observations(old)} and "
                f"{old.action_spec.n} actions; with these options, it would get {describe_observations(new)} and "
                f"{new.action_spec.n} actions"
            )
        return changed

    def new_output_path(self, folder: str, stem: str, suffix: str, companion: str = "") -> Path:
        """Return the path of a new file in a subfolder of the run folder, and create the subfolder.

        The name of the file is the first free stem of STEM, STEM-2, STEM-3, ..., plus the suffix. A stem is free if no
        file in the subfolder has this stem. The suffix is ignored, because files that belong together differ only in
        their suffix. If `companion` is given, for example "-steps", no file may have the stem STEM-steps either: the
        caller also writes a file with this stem.

        The folder of a zoo agent is read-only. For a zoo agent, the subfolder is therefore created in runs/zoo-NAME.
        """
        root = Path("runs") / f"zoo-{self.name}" if self.in_zoo else self.path
        parent = root / folder
        if self.in_zoo:
            root.mkdir(parents=True, exist_ok=True)
        safe_files.make_folder(parent, root)
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        taken = {path.stem for path in parent.iterdir()}
        free = (name for name in candidates if taken.isdisjoint((name, f"{name}{companion}")))
        return parent / f"{next(free)}{suffix}"

    @property
    def in_zoo(self) -> bool:
        """Whether the run is a zoo agent. Zoo agents are part of the package and therefore read-only."""
        return self.path.resolve().is_relative_to(zoo.ZOO_FOLDER)

    @property
    def is_locked(self) -> bool:
        """Whether a training process is writing to the run folder now."""
        return run_lock.is_locked(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context in which no other process writes to the run folder. Raise UserError if this is not possible."""
        if self.in_zoo:
            raise UserError(
                f"zoo/{self.name} is part of the package and read-only: it can be evaluated, but not trained"
            )
        with run_lock.locked(self.path):
            yield


def evaluation_seeds(config: "Config", seed: int) -> tuple[np.random.SeedSequence, int]:
    """Return the seeds of an evaluation of a run: the seed of the environments and the seed of action sampling.

    `seed` is the seed of the evaluation (`bestiary eval --seed`).
    """
    env_seed, action_seed = np.random.SeedSequence([config.training.seed, 1, seed]).spawn(2)
    return env_seed, int(action_seed.generate_state(1)[0])


def open_run(path: str | Path, trust_code: bool = False) -> Run:
    """Open an existing run. `path` is a path, the name of a folder in runs/, or `zoo/NAME` for a zoo agent."""
    asked = Path(path).expanduser()
    for candidate in (asked, Path("runs") / asked):
        if (candidate / "config.toml").is_file():
            folder = candidate.resolve()
            if folder.is_relative_to(Path.cwd()):
                folder = folder.relative_to(Path.cwd())
            check_version(folder)
            return Run(folder, trust_code)
    zoo_folder = zoo.find_agent(asked)
    if zoo_folder is not None:
        return Run(zoo_folder, trust_code)
    if asked.exists():
        raise UserError(f"{path} is not a run folder: it has no config.toml{_import_hint(asked)}")
    known = [*(p.parent.name for p in Path("runs").glob("*/config.toml")), *zoo.agent_names()]
    name = str(asked) if asked.parent == Path("zoo") else asked.name
    raise UserError(f"{path}: there is no such run{suggest(name, known)} (to list all runs: bestiary runs)")


def _import_hint(path: Path) -> str:
    """Return a hint if `path` is a checkpoint of TorchBeast or a folder that contains one, otherwise ""."""
    if path.suffix == ".tar" and path.is_file():
        return f"; to use a checkpoint of TorchBeast: bestiary import {path} --name NAME"
    if (path / "model.tar").is_file():
        return f"; to use its checkpoint of TorchBeast: bestiary import {path / 'model.tar'} --run-dir {path}"
    return ""


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run in a figure: its name or, if several runs have this name, its path."""
    names = [run.name for run in runs]
    paths = [f"zoo/{run.name}" if run.in_zoo else valid_text(str(run.path)) for run in runs]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def create_run(config: "Config", location: RunLocation, source: Path | None = None) -> tuple[Run, bool]:
    """Create the folder of a new run. Return the run, and whether it existed before.

    `location.if_exists` determines what happens if the folder exists (see RunLocation). `source` is the checkpoint of
    another program from which the run is made. Its own folder may become the run folder.
    """
    path = location.path(config)
    is_default_name = location.name is None and location.run_dir is None
    if source is not None and _is_folder_of_import(path, source):
        pass
    elif (path.is_dir() and any(path.iterdir())) or path.is_file():
        if location.if_exists == "new" or is_default_name:
            path = unused_path(path)
        elif _is_incomplete(path):
            pass  # the process that created the folder was killed before it wrote config.toml
        elif not (path / "config.toml").is_file():
            raise UserError(f"{path} exists and is not a run folder; choose another --name or --run-dir")
        elif location.if_exists == "resume":
            return Run(path), True
        else:
            raise UserError(
                f"{path} exists already; resume it (bestiary resume {path}), choose another --name, "
                "or add --if-exists new"
            )
    try:
        path = _make_folder(path, rename_if_exists=is_default_name or location.if_exists == "new")
        # Two processes may create the same run at the same time. Only the process that has the lock writes files.
        with Run(path).lock():
            if (path / "config.toml").exists():
                raise UserError(f"{path}: another process has created this run; choose another --name")
            (path / "checkpoints").mkdir(exist_ok=True)
            checkpoints.remove_unfinished(path / "checkpoints")
            plugin_copies.write_copies(config, path)
            safe_files.write_text(path / ID_FILE, uuid.uuid4().hex)
            safe_files.write_text(path / ORIGINS_FILE, json.dumps(config.origins, indent=1) + "\n")
            safe_files.write_text(path / "config.toml", CONFIG_HEADER + config.to_toml())
    except OSError as error:
        raise UserError(f"{path} cannot be created: {error.strerror or error}") from error
    if path.parent.resolve() == Path("runs").resolve():
        checkpoints.replace_link(path.parent / "latest", path.name)
    return Run(path), False


def _is_folder_of_import(path: Path, source: Path) -> bool:
    """Return whether `path` is the folder of the checkpoint `source` and has no file that a run folder also has."""
    if not path.is_dir() or path.resolve() != source.resolve().parent:
        return False
    return not any((path / name).exists() for name in ("config.toml", "checkpoints", "metrics.csv", ID_FILE))


def _is_incomplete(path: Path) -> bool:
    """Return whether a folder contains only files that `create_run` writes before it writes config.toml."""
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(safe_files.TEMPORARY_PREFIX)}
    own_names = {"lock", "lock_owner.json", "checkpoints", "plugins", ID_FILE, ORIGINS_FILE}
    return "lock" in names and names <= own_names and not checkpoints.list_checkpoints(path / "checkpoints")


def _make_folder(path: Path, rename_if_exists: bool) -> Path:
    """Create a folder and return its path.

    If `rename_if_exists` is true and the folder exists, create a folder with another name. This is necessary for
    default names: two runs that start in the same second have the same default name.
    """
    safe_files.make_new_folder(path.parent, parents=True)
    while rename_if_exists:
        try:
            safe_files.make_new_folder(path, exist_ok=False)
            return path
        except FileExistsError:
            path = unused_path(path)
    safe_files.make_new_folder(path)
    return path


def update_config(run: Run, **training: Any) -> None:
    """Change training options of a run in `run.config`. Call `write_config` to change them in config.toml, too."""
    run.config = replace(run.config, training=replace(run.config.training, **training))
    run.unwritten_options |= training


def set_machine_options(run: Run, config: "Config") -> None:
    """Replace the config of a run by `config`. The two configs differ only in machine options, for example loggers."""
    old, new = run.config.tables(), config.tables()
    run.config = config
    changed = {key: new.get(key) for key in {**old, **new} if old.get(key) != new.get(key)}
    run.unwritten_options |= changed


def write_config(run: Run) -> None:
    """Update config.toml: write all options that were changed by `update_config` and `set_machine_options`."""
    if run.unwritten_options:
        tables = {**read_tables(run.path / "config.toml", in_run_folder=True), **run.unwritten_options}
        files = [str(name.path) for name in run.config.training.logger or () if isinstance(name, PluginRef)]
        if "logger" in run.unwritten_options and files:
            plugin_copies.write_copies(run.config, run.path)
            hashes = {file: run.config.plugin_hashes[file] for file in files}
            tables["plugins"] = {**tables.get("plugins", {}), **hashes}
        set_tables = {name: value for name, value in tables.items() if value is not None}
        safe_files.write_text(run.path / "config.toml", CONFIG_HEADER + dump_toml(set_tables))
        run.unwritten_options = {}


def load_weights(agent: "Agent", checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into an agent.

    Raise UserError if the names or shapes of the tensors differ between the checkpoint and the agent, or if values are
    not valid.
    """
    from bestiary.agents.critics import PopArt

    saved = checkpoint.load_model()
    expected = agent.state_dict()
    differences = []
    for name in sorted({*saved, *expected}):
        saved_shape, expected_shape = (
            f"{str(tensors[name].dtype).removeprefix('torch.')} {tuple(tensors[name].shape)}"
            if name in tensors
            else "missing"
            for tensors in (saved, expected)
        )
        if saved_shape != expected_shape:
            differences.append(f"{name}: {saved_shape} in the checkpoint, {expected_shape} in the agent")
    if differences:
        raise UserError(
            f"{checkpoint.path} does not fit the agent described by config.toml:",
            *differences[:8],
        )
    parameters = dict(agent.named_parameters())
    # Buffers may contain infinite values, for example in masks.
    invalid = [
        name for name, value in saved.items() if value.isnan().any() or (name in parameters and value.isinf().any())
    ]
    if invalid:
        raise UserError(f"{checkpoint.path} cannot be used: the values of {', '.join(invalid[:4])} are not finite")
    agent.load_state_dict(saved)
    if any(isinstance(module, PopArt) and not module.has_valid_statistics() for module in agent.modules()):
        raise UserError(f"{checkpoint.path} cannot be used: the statistics of PopArt are not valid")
