"""Config: the complete description of a run.

`resolve.resolve` checks user input and returns a Config. A Config builds the environments, the agent and the algorithm
that it describes, and converts itself to the text of config.toml.
"""

import dataclasses
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from bestiary import __version__, envs
from bestiary.agents.agent import Agent
from bestiary.algorithms.base import Algorithm
from bestiary.config.components import ComponentConfig, build_module, construct_component
from bestiary.config.forward_check import check_forward_pass
from bestiary.config.logger_options import find_loggers
from bestiary.config.toml import dump_toml, flatten
from bestiary.config.training_options import Training, group_key, unused_options
from bestiary.envs.multitask import MultiTaskVectorEnv, combine_interfaces
from bestiary.envs.rewards.wrapper import DEFAULT_REWARDS, RewardConfig, RewardWrapper
from bestiary.envs.vector_env import EnvInterface, VectorEnv
from bestiary.loggers import Logger
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest
from bestiary.utils.plugin_names import PluginRef


@dataclass(frozen=True)
class Config:
    """A checked configuration: environments, components with their options, and training options."""

    envs: tuple[str, ...]  # canonical names; several environments are the tasks of one agent
    env_options: Any  # instance of the options dataclass of the environment; all tasks have the same options
    components: dict[str, ComponentConfig]  # by kind: "algo", "agent", and the kinds that the agent class uses
    training: Training
    logger_options: Any = None  # options of all loggers in one object (`merged_options`); None: no loggers
    # Path of a plug-in file -> SHA-256 hash of the file's content (see `PluginSource.sha256`).
    plugin_hashes: dict[str, str] = field(default_factory=dict, compare=False)
    # Key of config.toml -> origin of its value, for example "preset hello" (see `config/origins.py`).
    origins: dict[str, str] = field(default_factory=dict, compare=False)

    # --- construction ---

    def make_vector_env(
        self, num_envs: int, seed: int | np.random.SeedSequence, render: bool = False, first_env: int = 0
    ) -> VectorEnv:
        """Build a vector environment with all tasks and the rewards of this config.

        `first_env` is the index of its first environment among all environments of a run.
        """
        return make_vector_env(self.envs, self.env_options, num_envs, seed, render, self.rewards, first_env)

    @cached_property
    def interface(self) -> EnvInterface:
        """The interface of the environments: their observations, actions, measures and other properties, for all tasks.

        The interface is computed from the options without building an environment. Gymnasium environments and classes
        in users' files are exceptions: one environment is built, and its interface is read.
        """
        interfaces = task_interfaces(self.envs, self.env_options)
        return interfaces[0] if len(interfaces) == 1 else combine_interfaces(self.envs, interfaces)

    @property
    def total_envs(self) -> int:
        """Return the total number of environments of all actors. With K tasks, environment i plays task i mod K."""
        return self.training.envs_of_pool(self.training.total_pools - 1).stop

    def envs_of_task(self, task: int) -> range:
        """Return the indices of the environments that play a task.

        The range is empty for a user's vector environment with several tasks, because it is then unknown which
        environment plays which task.
        """
        num_tasks = len(self.envs)
        return range(task, self.total_envs, num_tasks) if len(self.interface.tasks) == num_tasks else range(0)

    def task_index(self, env: str | None) -> int:
        """Return the index of the environment `env` among the tasks. If `env` is None, return 0."""
        name = envs.canonical_name(env) if env is not None else self.envs[0]
        if name not in self.envs:
            raise UserError(f"--env {name}: the run's tasks are {', '.join(self.envs)}{suggest(name, self.envs)}")
        return self.envs.index(name)

    @property
    def rewards(self) -> RewardConfig:
        """Return the training reward and the true rewards."""
        return RewardConfig(self.training.reward, self.training.true_reward)

    @property
    def callbacks(self) -> tuple[PluginRef, ...]:
        """Return the names of the user's callbacks (`--callback`)."""
        return tuple(name for name in self.training.callback or () if isinstance(name, PluginRef))

    @property
    def loggers(self) -> dict[str, type[Logger]]:
        """Return the classes of the loggers (`--logger`) by name."""
        return find_loggers(self.training.logger, [])

    def make_agent(self, interface: VectorEnv | EnvInterface | None = None, seed: int = 0) -> Agent:
        """Build an untrained agent for the observations, actions and tasks of an interface.

        If `interface` is None, the interface of this config is used. `seed` determines the initial weights. The global
        random state of torch is not changed.
        """
        if isinstance(interface, VectorEnv):
            interface = interface.interface
        interface = interface or self.interface
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = {
                kind: partial(build_module, kind, component, len(interface.tasks))
                for kind, component in self.components.items()
                if kind not in ("algo", "agent")
            }
            agent = construct_component(
                "agent", self.components["agent"], interface.observation_spec, interface.action_spec, **inner
            )
        if self.plugin_hashes:
            check_forward_pass(agent, interface, self.components)
        return agent

    def make_algorithm(self) -> Algorithm:
        """Build the algorithm."""
        return construct_component("algo", self.components["algo"])

    # --- text ---

    def tables(self) -> dict[str, Any]:
        """Return the config as nested dicts of plain values, with the same keys as config.toml."""
        omitted = {*unused_options(self.training.runtime), *(() if self.training.cluster else ("cluster",))}
        sections: dict[str, Any] = {
            **{name: value for name, value in _plain(self.training).items() if name not in omitted},
            **({"logger": self._logger_table()} if self.training.logger else {}),
            "env": {"name": list(self.envs), **_plain(self.env_options)},
        }
        for kind, component in self.components.items():
            sections[kind] = {"name": component.name, **_plain(component.options)}
        return sections

    def _logger_table(self) -> dict[str, Any]:
        return {"name": list(self.training.logger or ()), **_plain(self.logger_options)}

    def to_toml(self) -> str:
        """Return the text of config.toml: the config, versions of the main packages, and hashes of plug-in files."""
        tables = self.tables()
        packages = ("torch", "envpool", "numpy", "gymnasium")
        tables["versions"] = {
            "bestiary": __version__,
            **{name: importlib.metadata.version(name) for name in packages},
        }
        if self.plugin_hashes:
            tables["plugins"] = self.plugin_hashes
        return dump_toml(tables)

    def group_key(self) -> str:
        """Return a key of the experiment.

        Two runs have the same key if only options in UNCOMPARED (such as the seed) differ.
        """
        return group_key(flatten(self.tables()))

    def label(self) -> str:
        """Return a short label: the environment, agent, torso, memory and critic, for example "Pong-shallow-lstm".

        Agent `basic`, memory `none` and critic `shared` are omitted.
        """
        task = env_slug(self.envs[0])
        if len(self.envs) > 1:
            family = task if isinstance(self.envs[0], PluginRef) else self.envs[0].split("/")[0].replace(":", "-")
            task = f"{len(self.envs)}-{family}"
        inner = [p.name for kind, p in self.components.items() if kind in ("torso", "memory") and p.name != "none"]
        inner += [p.name for kind, p in self.components.items() if kind == "critic" and p.name != "shared"]
        named = [] if self.components["agent"].name == "basic" else [self.components["agent"].name]
        return "-".join([task, *(n.attribute if isinstance(n, PluginRef) else n for n in named + inner)])


def env_slug(env: str) -> str:
    """Return the name of an environment for use in file names: procgen/starpilot:easy -> starpilot-easy."""
    return env.rsplit("/", 1)[-1].split("@")[0].replace(".py:", "-").replace(":", "-")


def make_vector_env(
    names: Sequence[str],
    options: Any,
    num_envs: int,
    seed: int | np.random.SeedSequence,
    render: bool = False,
    rewards: RewardConfig = DEFAULT_REWARDS,
    first_env: int = 0,
) -> VectorEnv:
    """Build a vector environment.

    Each name is a task; environment i plays task (first_env + i) mod K, where K = len(names).
    """
    builds = [partial(_build_env, envs.lookup_env(name), options, render, rewards) for name in names]
    if len(names) == 1:
        return builds[0](num_envs, seed)
    return MultiTaskVectorEnv(names, builds, num_envs, seed, first_env)


def task_interfaces(names: Sequence[str], options: Any) -> tuple[EnvInterface, ...]:
    """Return the interface of each environment."""
    return tuple(envs.lookup_env(name).interface(options) for name in names)


def _build_env(
    spec: envs.EnvSpec, options: Any, render: bool, rewards: RewardConfig, num_envs: int, seed: Any
) -> VectorEnv:
    pool = spec.build(num_envs, seed, options, render)
    return pool if rewards.is_default else RewardWrapper(pool, rewards)


def _plain(options: Any) -> dict[str, Any]:
    """Return the fields of an options dataclass as values that TOML supports. Fields that are None are left out."""
    values: Iterable[tuple[str, Any]] = dataclasses.asdict(options).items()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values if v is not None}
