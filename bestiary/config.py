"""What a run is made of: the name of each part, that part's own options, and the options of the training itself.

A Config is made by `resolve.resolve`, which checks it; it builds what it describes, and is config.toml as text.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from bestiary import envs, plugins
from bestiary.agents import AGENTS
from bestiary.agents.agent import Agent
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.algorithms.algorithm import Algorithm
from bestiary.envs.mixture import MixturePool
from bestiary.envs.pool import Interface, Pool
from bestiary.envs.rewards import PLAIN, RewardedPool, Rewards
from bestiary.errors import UserError
from bestiary.options import construct, option, suggest
from bestiary.rollout import Inputs, ObservationSpec
from bestiary.textconfig import dump_toml, flatten

REGISTRIES: dict[str, Mapping[str, type]] = {
    "algo": ALGORITHMS,
    "agent": AGENTS,
    "torso": TORSOS,
    "memory": MEMORIES,
    "critic": CRITICS,
}
DEFAULTS = {"algo": "impala", "agent": "basic", "torso": "auto", "memory": "none", "critic": "shared"}
NEEDS = {  # what a user's own part must have
    "algo": (
        *(
            "learn",
            "loss",
            "make_optimizer",
            "rollouts",
            "batch_size",
            "passes",
            "unroll_length",
            "problems",
            "example",
        ),
        *("on_policy", "averages"),
    ),
    "agent": ("forward", "initial_state"),
    "torso": ("forward",),
    "memory": ("forward", "initial_state"),
    "critic": ("forward",),
}


@dataclass(frozen=True)
class Training:
    """The options of a training that belong to no part."""

    steps: int | None = option(None, "decisions to train for (none: the environment's own default)", low=1)
    reward: str | None = option(
        None, "what to train on: fuel:10, collected=1,expired=-1, file.py:name (none: the environment's own reward)"
    )
    true_reward: str | None = option(
        None, "what is only watched, written the same way; several between semicolons (none: the environment's own)"
    )
    seed: int = option(1, "of everything random: environments, weights, decisions", low=0, high=2**63 - 1)
    num_envs: int = option(
        32, "environments that are played at once (N); by each actor of a cluster", low=1, high=100_000
    )
    runtime: str = option(
        "local", "all cores, one deterministic thread, or Ray (--cluster)", choices=("local", "serial", "cluster")
    )
    cluster: str | None = option(
        None, "train on Ray: local (one for this run only), auto (the one that runs here), or the address of one"
    )
    actors: int = option(1, "cluster: processes that play, a CPU each", low=1, high=100_000)
    min_actors: int = option(0, "cluster: begin once so many have room; others follow with new nodes (0: all)", low=0)
    learners: int = option(
        1, "cluster: processes that learn together, each from its share of every batch", low=1, high=1024
    )
    inference: str = option(
        "actor", "cluster: decide where it is played, or in one place for all, in batches", choices=("actor", "central")
    )
    max_restarts: int = option(10, "cluster: stop after so many restarts within ten minutes", low=0)
    actor_timeout: float = option(
        120.0, "cluster: seconds without a decision after which an actor is replaced", above=0
    )
    trust_open_cluster: bool = option(False, "join a Ray that asks nobody for a token, though others can reach it")
    device: str = option("auto", "auto, cpu, cuda or cuda:1; where the agent learns")
    actor_device: str = option("auto", "local: where it acts (auto: where it learns)")
    precision: str = option("float32", "of the network's operations", choices=("float32", "bfloat16"))
    group_size: int | None = option(
        None, "trajectories whose gradient is computed at once (none: probed; on a GPU all)", low=1
    )
    pools: int = option(2, "local, cluster: pools that the environments are spread over, played in turn", low=1)
    actor_threads: int = option(
        0, "local: threads that play them (0: one; one a core where nobody learns meanwhile)", low=0
    )
    workers: int = option(0, "local: threads that compute gradients (0: one a core; one for a GPU)", low=0)
    max_lag: int | None = option(
        None,
        "local, cluster, without --lag: updates that a decision may be old when it is learnt from (none: 16; on a cluster "
        "what its actors need)",
        low=0,
    )
    lag: int | None = option(None, "local, cluster: exactly so many rollouts, which makes the run reproducible", low=0)
    log_every: int = option(5_000, "steps between two rows of metrics.csv", low=1)
    save_every: int = option(1_000_000, "steps between two checkpoints that are kept (0: only the newest are)", low=0)
    save_minutes: float = option(5.0, "minutes between two checkpoints that only the next ones replace", above=0)
    init_from: str | None = option(None, "a run whose weights to begin with")
    keep: tuple[int, ...] = option(
        (), "steps whose checkpoint is kept, too: 150M; 0 is the one before any learning", low=0
    )
    valid_every: int = option(
        0, "steps between two validations (0: none; 1M where one of the next two is given)", low=0
    )
    valid_levels: str | None = option(None, "levels to validate on, such as 500:700")
    valid_mode: str | None = option(None, "mode to validate in, such as hard (none: the training's)")
    valid_episodes: int = option(50, "games of each task in a validation", low=1)
    valid_greedy: bool = option(False, "validate with the likeliest actions, not sampled ones")
    alarm_games: int = option(
        100, "with a reward of your own: games in a window of the hacking alarm (0: no alarm)", low=0, high=100_000
    )
    alarm_windows: int = option(4, "windows over which it looks for trends", low=1, high=1000)
    max_bad_updates: int = option(10, "stop after so many updates in a row that were not finite", low=1)
    record: bool = option(False, "write down every decision, so that any game can be played again (recordings/)")
    tensorboard: bool = option(False, "also write TensorBoard events")
    wandb: str | None = option(None, "also log to Weights & Biases, in this project", bare="bestiary")
    eval_at_end: int = option(0, "episodes to evaluate when training is done", low=0)
    movie_at_end: bool = option(False, "film a game when training is done")

    @property
    def all_pools(self) -> int:
        """Pools of the whole run."""
        return 1 if self.runtime == "serial" else self.actors * self.pools

    @property
    def pool_size(self) -> int:
        """Environments in each of them."""
        return self.num_envs if self.runtime == "serial" else self.num_envs // self.pools


@dataclass(frozen=True)
class Part:
    name: str
    options: Any


@dataclass(frozen=True)
class Config:
    envs: tuple[str, ...]
    env_options: Any
    parts: dict[str, Part]  # algo and agent, and what the agent is composed of
    training: Training
    plugin_hashes: dict[str, str] = field(default_factory=dict, compare=False)

    # --- building what it describes ---

    def make_pool(self, num_envs: int, seed: int | np.random.SeedSequence, render: bool = False) -> Pool:
        return make_pool(self.envs, self.env_options, num_envs, seed, render, self.rewards)

    @property
    def rewards(self) -> Rewards:
        return Rewards(self.training.reward, self.training.true_reward)

    def make_agent(self, pool: Pool | Interface, seed: int = 0) -> Agent:
        """An untrained agent for what the pool shows and lets do."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = {
                kind: partial(_build_part, kind, part, len(pool.tasks))
                for kind, part in self.parts.items()
                if kind not in ("algo", "agent")
            }
            agent = _construct("agent", self.parts["agent"], pool.observation_spec, pool.action_spec, **inner)
        if self.plugin_hashes:
            _try_agent(agent, pool.observation_spec, self.parts)
        return agent

    def make_algorithm(self) -> Algorithm:
        return construct(lookup_part("algo", self.parts["algo"].name), options=self.parts["algo"].options)

    # --- as text ---

    def tables(self) -> dict[str, Any]:
        """Nested plain values, as config.toml has them."""
        elsewhere = CLUSTER if self.training.runtime != "cluster" else []
        sections: dict[str, Any] = {
            **{name: value for name, value in _plain(self.training).items() if name not in elsewhere},
            "env": {"name": list(self.envs), **_plain(self.env_options)},
        }
        for kind, part in self.parts.items():
            sections[kind] = {"name": part.name, **_plain(part.options)}
        return sections

    def to_toml(self) -> str:
        tables = self.tables()
        tables["versions"] = {
            name: importlib.metadata.version(name) for name in ("bestiary", "torch", "envpool", "numpy", "gymnasium")
        }
        if self.plugin_hashes:
            tables["plugins"] = self.plugin_hashes
        return dump_toml(tables)

    def group(self) -> str:
        return group_key(flatten(self.tables()))

    def label(self) -> str:
        """A short name: environment and agent."""
        task = plain_name(self.envs[0])
        if len(self.envs) > 1:
            task = f"{len(self.envs)}-{self.envs[0].split('/')[0].replace(':', '-')}"
        inner = [p.name for kind, p in self.parts.items() if kind in ("torso", "memory") and p.name != "none"]
        inner += [p.name for kind, p in self.parts.items() if kind == "critic" and p.name != "shared"]
        named = [] if self.parts["agent"].name == "basic" else [self.parts["agent"].name]
        return "-".join([task, *(plugins.split(n)[1] if plugins.is_plugin(n) else n for n in named + inner)])


def plain_name(env: str) -> str:
    """procgen/starpilot:easy -> starpilot-easy, for the names of files."""
    return env.rsplit("/", 1)[-1].split("@")[0].replace(".py:", "-").replace(":", "-")


CLUSTER = (
    "cluster actors min_actors learners inference max_restarts actor_timeout trust_open_cluster".split()
)  # options of Training
BESIDE = (
    "seed record group_size tensorboard wandb eval_at_end movie_at_end save_minutes save_every log_every max_bad_updates keep "
    "valid_every valid_levels valid_mode valid_episodes valid_greedy alarm_games alarm_windows "
    "cluster min_actors max_restarts actor_timeout trust_open_cluster"
).split()


def group_key(settings: Mapping[str, Any], *besides: str) -> str:
    """What runs that differ only in their seed (and in how they are logged, saved and cut into groups) have in common."""
    return json.dumps({k: v for k, v in settings.items() if k not in (*BESIDE, *besides)}, sort_keys=True)


def lookup_part(kind: str, name: str) -> Any:
    """A part by its name, or by `file.py:Name`."""
    if plugins.is_plugin(name):
        return plugins.load(name, kind, NEEDS[kind])
    if name not in REGISTRIES[kind]:
        known = ", ".join(REGISTRIES[kind])
        raise UserError(f"--{kind} {name}: there is {known}{suggest(name, REGISTRIES[kind])}")
    return REGISTRIES[kind][name]


def _construct(kind: str, part: Part, *args: Any, **inner: Any) -> Any:
    try:
        return construct(lookup_part(kind, part.name), *args, options=part.options, **inner)
    except UserError:
        raise
    except Exception as error:
        if plugins.is_plugin(part.name):
            raise UserError(f"{part.name}: cannot be made: {type(error).__name__}: {error}") from error
        raise


def make_pool(
    names: Sequence[str],
    options: Any,
    num_envs: int,
    seed: int | np.random.SeedSequence,
    render: bool = False,
    rewards: Rewards = PLAIN,
) -> Pool:
    """Of one environment, or of several tasks side by side."""
    builds = [partial(_build_env, envs.lookup(name), options, render, rewards) for name in names]
    return builds[0](num_envs, seed) if len(names) == 1 else MixturePool(names, builds, num_envs, seed)


def _build_env(family: envs.Family, options: Any, render: bool, rewards: Rewards, num_envs: int, seed: Any) -> Pool:
    pool = family.build(num_envs, seed, options, render)
    return pool if rewards.plain else RewardedPool(pool, rewards)


def _build_part(kind: str, part: Part, tasks: int, inputs: Any) -> nn.Module:
    if kind == "critic":
        return _construct(kind, part, inputs, tasks)
    module = _construct(kind, part, inputs)
    if not hasattr(module, "output_size"):
        raise UserError(f"{part.name}: not a usable {kind}: it sets no self.output_size (docs/extending.md shows one)")
    return module


def _try_agent(agent: Agent, observation: ObservationSpec, parts: Mapping[str, Part]) -> None:
    """One forward pass, so that a user's part of the wrong shape is found before any work starts."""
    T, B = 2, 3
    inputs = Inputs(
        {k: torch.zeros(T, B, *s.shape, dtype=getattr(torch, s.dtype)) for k, s in observation.items()},
        torch.zeros(T, B),
        torch.zeros(T, B, dtype=torch.bool),
        torch.zeros(T, B, dtype=torch.int64),
        torch.zeros(T, B, dtype=torch.int64),
    )
    try:
        with torch.no_grad():
            output, _ = agent(inputs, agent.initial_state(B))
        shape = tuple(output.value.shape)
    except Exception as error:
        own = ", ".join(part.name for part in parts.values() if plugins.is_plugin(part.name)) or "the agent"
        first = str(error).strip().splitlines()[:1]
        raise UserError(
            f"{own}: fails on a batch of {T} steps x {B}: {type(error).__name__}: {' '.join(first)}"
        ) from error
    if shape != (T, B):
        raise UserError(f"the agent's values are {shape} on a batch of {T} steps x {B}, not ({T}, {B})")


def _plain(options: Any) -> dict[str, Any]:
    values: Iterable[tuple[str, Any]] = dataclasses.asdict(options).items()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values if v is not None}
