"""What a run is made of: the name of each part, that part's own options, and the options of the training itself.

There is one way from what a user wrote to a Config, whoever wrote it: a flag, a TOML file, a preset or a Python keyword
becomes an entry of one flat dict (`{"memory": "lstm", "memory.hidden": 512, "steps": "5M"}`), and `resolve` checks the dict
in two stages: first the choices of parts, then the options of just those parts. All problems are reported at once.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from bestiary import envs, plugins
from bestiary.agents.agent import AGENTS, Agent
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS, suitable
from bestiary.algorithms import ALGORITHMS
from bestiary.envs.pool import Pool
from bestiary.errors import UserError
from bestiary.options import construct, field_types, option, options_of, parse_options, suggest
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec
from bestiary.textconfig import dump_toml, flatten, read_preset, read_toml

REGISTRIES: dict[str, Mapping[str, type]] = {
    "algo": ALGORITHMS,
    "agent": AGENTS,
    "torso": TORSOS,
    "memory": MEMORIES,
}
DEFAULTS = {"algo": "impala", "agent": "basic", "torso": "auto", "memory": "none"}
NEEDS = {  # what a user's own part must have
    "algo": ("loss", "make_optimizer"),
    "agent": ("forward", "initial_state"),
    "torso": ("forward",),
    "memory": ("forward", "initial_state"),
}


@dataclass(frozen=True)
class Training:
    """The options of a training that belong to no part."""

    steps: int | None = option(None, "decisions to train for (none: the environment's own default)", low=1)
    seed: int = option(1, "of everything random: environments, weights, decisions", low=0, high=2**63 - 1)
    num_envs: int = option(64, "environments that are played at once (N)", low=1, high=100_000)
    runtime: str = option("local", "all cores, or one deterministic thread", choices=("local", "serial"))
    device: str = option("auto", "auto, cpu, cuda or cuda:1; where the agent acts and learns")
    precision: str = option("float32", "of the network's operations", choices=("float32", "bfloat16"))
    group_size: int = option(4, "trajectories whose gradient is computed at once", low=1)
    pools: int = option(2, "local: pools that the environments are spread over, played in turn", low=1)
    actor_threads: int = option(1, "local: threads that play them", low=1)
    workers: int = option(0, "local: threads that compute gradients (0: one a core)", low=0)
    max_lag: int = option(8, "local: updates that a decision may be old when it is learnt from", low=0)
    lag: int | None = option(None, "local: exactly so many rollouts, which makes the run reproducible", low=0)
    log_every: int = option(5_000, "steps between two rows of metrics.csv", low=1)
    save_every: int = option(1_000_000, "steps between two checkpoints that are kept (0: only the newest are)", low=0)
    save_minutes: float = option(5.0, "minutes between two checkpoints that only the next ones replace", above=0)
    max_bad_updates: int = option(10, "stop after so many updates in a row that were not finite", low=1)
    tensorboard: bool = option(False, "also write TensorBoard events")
    wandb: str | None = option(None, "also log to Weights & Biases, in this project", bare="bestiary")
    eval_at_end: int = option(0, "episodes to evaluate when training is done", low=0)
    movie_at_end: bool = option(False, "film a game when training is done")


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
        return envs.lookup(self.envs[0]).build(num_envs, seed, self.env_options, render)

    def make_agent(self, observation: ObservationSpec, action: ActionSpec, seed: int = 0) -> Agent:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inner = {
                kind: partial(_build_part, kind, part)
                for kind, part in self.parts.items()
                if kind not in ("algo", "agent")
            }
            agent = _construct("agent", self.parts["agent"], observation, action, **inner)
        if self.plugin_hashes:
            _try_agent(agent, observation, self.parts)
        return agent

    def make_algorithm(self) -> Any:
        return construct(lookup_part("algo", self.parts["algo"].name), options=self.parts["algo"].options)

    # --- as text ---

    def tables(self) -> dict[str, Any]:
        """Nested plain values, as config.toml has them."""
        sections: dict[str, Any] = {
            **_plain(self.training),
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
        task = self.envs[0].rsplit("/", 1)[-1].replace(".py:", "-")
        inner = [p.name for kind, p in self.parts.items() if kind in ("torso", "memory") and p.name != "none"]
        named = [] if self.parts["agent"].name == "basic" else [self.parts["agent"].name]
        return "-".join([task, *(plugins.split(n)[1] if plugins.is_plugin(n) else n for n in named + inner)])


BESIDE = "seed tensorboard wandb eval_at_end movie_at_end save_minutes save_every log_every max_bad_updates".split()


def group_key(settings: Mapping[str, Any], *besides: str) -> str:
    """What runs that differ only in their seed (and in how they are logged and saved) have in common."""
    return json.dumps({k: v for k, v in settings.items() if k not in (*BESIDE, *besides)}, sort_keys=True)


# --- from what users write ---


def resolve(given: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> Config:
    """Check a flat dict of names and options and make it a Config; raises UserError with all problems found."""
    given, problems = dict(given), list[str]()
    names = env_names(given.pop("env", ()))
    if not names:
        problems.append("which environment? For example: bestiary train atari/Pong (bestiary list envs shows all)")
    if len(names) > 1:
        problems.append(f"several environments in one run are not supported yet; choose one of {', '.join(names)}")
    family = _attempt(problems, lambda: envs.lookup(names[0])) if names else None
    choice = _choose_parts(given, problems)
    schemas: dict[str, type] = {"": Training}
    env_options = None
    if family is not None:
        schemas["env"] = family.options
        env_options = parse_options(family.options, _sort(given, schemas)["env"], "env", problems)
    if family is not None and env_options is not None:
        specs = _attempt(problems, lambda: _specs(family, env_options))
        if specs is not None and choice.get("torso") == "auto":
            choice["torso"] = suitable(specs[0])
    chosen = {kind: part for kind, name in choice.items() if (part := _find_part(kind, name, problems)) is not None}
    schemas |= {kind: options_of(part) for kind, part in chosen.items()}
    values = _sort(given, schemas)
    problems += _unknown(given, schemas, {"env", *choice} - set(schemas), origin or {})
    parsed = {kind: parse_options(schemas[kind], values[kind], kind, problems) for kind in chosen}
    training = parse_options(Training, values[""], "", problems)
    if training is not None and training.steps is None and family is not None:
        training = dataclasses.replace(training, steps=family.default_steps)
    if training is not None and parsed.get("algo") is not None:
        _check_batches(training, parsed["algo"], problems)
    if problems:
        raise UserError(*dict.fromkeys(problems))

    used = [n for n in (*names, *choice.values()) if plugins.is_plugin(n)]
    hashes = {str(plugins.split(plugins.absolute(n))[0]): plugins.digest(plugins.split(n)[0]) for n in used}
    absolute = {n: plugins.absolute(n) if plugins.is_plugin(n) else n for n in (*names, *choice.values())}
    return Config(
        envs=tuple(absolute[n] for n in names),
        env_options=env_options,
        parts={kind: Part(absolute[choice[kind]], parsed[kind]) for kind in chosen},
        training=training,
        plugin_hashes=hashes,
    )


def env_names(env: Any) -> tuple[str, ...]:
    names = (env,) if isinstance(env, str) else tuple(env) if isinstance(env, list | tuple) else (env,)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"env = {env!r}: expected the name of an environment, such as atari/Pong")
    return names


def layers(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Presets, then config files, then what was given directly, each over the one before; and where each key came from."""
    direct = flatten(options)
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, read in (("preset", read_preset), ("config", lambda path: read_toml(Path(path)))):
        named = direct.pop(source, None)
        if named is not None:
            layer = read(str(named))
            given = _over(given, layer)
            origin |= dict.fromkeys(layer, f"{source} {named}")
    given = _over(given, direct)
    return given, {key: where for key, where in origin.items() if key not in direct}


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, its keys last: of two spellings of one option, the later one counts.

    Where `above` chooses another part, the options of the part below go with it."""
    replaced = {kind for kind in DEFAULTS if kind in above and kind in below and above[kind] != below[kind]}
    if "env" in above and "env" in below and _families(above["env"]) != _families(below["env"]):
        replaced.add("env")
    kept = {k: v for k, v in below.items() if k not in above and k.split(".")[0] not in replaced - {k}}
    return {**kept, **above}


def _families(env: Any) -> set[str]:
    return {name if plugins.is_plugin(name) else name.split("/")[0] for name in env_names(env)}


def lookup_part(kind: str, name: str) -> Any:
    """A part by its name, or by `file.py:Name`."""
    if plugins.is_plugin(name):
        return plugins.load(name, kind, NEEDS[kind])
    if name not in REGISTRIES[kind]:
        known = ", ".join(REGISTRIES[kind])
        raise UserError(f"--{kind} {name}: there is {known}{suggest(name, REGISTRIES[kind])}")
    return REGISTRIES[kind][name]


def _choose_parts(given: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """The names of the algorithm, the agent and the parts that the agent is composed of; takes them out of `given`."""
    choice = {kind: str(given.pop(kind, DEFAULTS[kind])) for kind in ("algo", "agent")}
    agent = _find_part("agent", choice["agent"], problems)
    for kind in getattr(agent, "parts", () if agent else ("torso", "memory")):
        choice[kind] = str(given.pop(kind, DEFAULTS[kind]))
    return choice


def _find_part(kind: str, name: str, problems: list[str]) -> Any:
    return None if (kind, name) == ("torso", "auto") else _attempt(problems, lambda: lookup_part(kind, name))


def _spellings(schemas: Mapping[str, type]) -> dict[str, tuple[str, str]]:
    """Every way to write an option, to the part and field it sets: `memory.hidden`, `lr` or `algo.lr`, `sticky`."""
    spellings: dict[str, tuple[str, str]] = {}
    for kind in sorted(schemas, key=lambda kind: kind == ""):  # a flat name that two claim is the training's own
        for f in dataclasses.fields(schemas[kind]):
            if kind:
                spellings[f"{kind}.{f.name}"] = (kind, f.name)
            if kind in ("", "env") or f.metadata.get("everyday"):
                spellings[f.name] = (kind, f.name)
    return spellings


def _sort(given: Mapping[str, Any], schemas: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Raw values by the part that each belongs to."""
    spellings, values = _spellings(schemas), {kind: dict[str, Any]() for kind in schemas}
    for key, value in given.items():
        if key in spellings:
            kind, name = spellings[key]
            values[kind][name] = value
    return values


def _unknown(
    given: Mapping[str, Any], schemas: Mapping[str, type], missing: set[str], origin: Mapping[str, str]
) -> list[str]:
    """A problem for each option that belongs to no chosen part. Of parts not found (`missing`) nothing is known."""
    spellings, problems = _spellings(schemas), []
    names = [*spellings, *DEFAULTS, "preset", "config", "name", "run_dir", "if_exists", "dry_run"]
    for key in given:
        kind = key.split(".")[0] if "." in key else ""
        if key in spellings or kind in missing or (not kind and missing & {"env", "algo"}):
            continue
        shown = key.replace("_", "-")
        where = f" (in {origin[key]})" if key in origin else ""
        near = suggest(f"--{shown}", [f"--{s.replace('_', '-')}" for s in names if not s.startswith("env.")])
        if key in ("name", "run_dir", "if_exists"):
            near = ": where a run goes is said on the command line, not in a file"
        problems.append(f"unknown option --{shown}{where}{_owner(key) or near}")
    return problems


def _owner(key: str) -> str:
    """Where the option would be valid, if another part had been chosen."""
    kind, dot, name = key.partition(".")
    owners = [n for n, part in REGISTRIES.get(kind, {}).items() if name in field_types(options_of(part))]
    return f": it is an option of {kind} {' and '.join(owners)}" if dot and owners else ""


def _check_batches(training: Training, algo: Any, problems: list[str]) -> None:
    batch, n = getattr(algo, "batch_size", training.num_envs), training.num_envs
    if training.runtime == "local":
        if n % training.pools:
            problems.append(f"--num-envs {n} does not divide into --pools {training.pools} of the same size")
            return
        if training.actor_threads > training.pools:
            problems.append(
                f"--actor-threads {training.actor_threads}: each needs a pool, and there are {training.pools}"
            )
        n //= training.pools
        updates = max(1, n // batch) * getattr(algo, "replay", 1)
        if training.max_lag < updates - 1:
            problems.append(
                f"--max-lag {training.max_lag}: one rollout brings {updates} updates; at least {updates - 1}"
            )
    if batch % n and n % batch:
        near = [b for b in range(1, 2 * batch + 1) if n % b == 0 or b % n == 0]
        best = min(near, key=lambda b: abs(b - batch))
        problems.append(
            f"--batch-size {batch} and {n} environments a pool: one must divide the other, so that batches are made of "
            f"whole trajectories; try --batch-size {best}"
        )


def _attempt(problems: list[str], function: Any) -> Any:
    try:
        return function()
    except UserError as error:
        problems.extend(error.problems)
        return None


def _specs(family: envs.Family, options: Any) -> tuple[ObservationSpec, ActionSpec]:
    try:
        pool = family.build(1, 0, options, False)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"the environment cannot be made: {type(error).__name__}: {error}") from error
    pool.close()
    return pool.observation_spec, pool.action_spec


def _construct(kind: str, part: Part, *args: Any, **inner: Any) -> Any:
    try:
        return construct(lookup_part(kind, part.name), *args, options=part.options, **inner)
    except UserError:
        raise
    except Exception as error:
        if plugins.is_plugin(part.name):
            raise UserError(f"{part.name}: cannot be made: {type(error).__name__}: {error}") from error
        raise


def _build_part(kind: str, part: Part, *args: Any) -> nn.Module:
    module = _construct(kind, part, *args)
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
