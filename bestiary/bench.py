"""`bestiary bench`: how fast the pieces are, how fast they could be together, and how fast the whole is.

Everything is measured with the trainer's own code, on all cores. The pieces alone: environments stepping, agents deciding,
learners learning, each at the best of several batch sizes and layouts, so that a slow piece cannot flatter the whole. If
every core were always busy with one of the three, a step would cost the sum of what it costs in each:

    bound = 1 / (1/env + 1/inference + 1/learn)          ratio = whole / bound

Machines are noisy, so pieces and whole, and several configurations, are measured in turn, several times, and medians are
reported; what configurations are to each other is the median of what they were in each turn.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bestiary.bench_memories import bench_memories
from bestiary.bench_memories import show as show_memories
from bestiary.bench_saliency import bench_saliency
from bestiary.bench_saliency import show as show_saliency
from bestiary.bench_whole import Whole, measure_on_ray
from bestiary.config import Config
from bestiary.console import note, stdout
from bestiary.cores import cores
from bestiary.envs.pool import Pool
from bestiary.resolve import layers, resolve
from bestiary.runtime.actor import Actor
from bestiary.runtime.build import build
from bestiary.runtime.probe import choose_group_size

PUBLISHED = {"num_envs": 64, "batch_size": 32}  # IMPALA's batches, which other code bases are measured with
WAREHOUSE = {
    "env": "warehouse",
    "algo": "ppo",
    "num_envs": 256,
    "rollout_length": 32,
    "algo.sequence": 8,
    "algo.epochs": 3,
}
MANY: dict[str, Any] = {"torso": "shallow", "popart": True, "num_envs": 48, "batch_size": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "atari-shallow": {"env": "atari/Pong", "torso": "shallow", **PUBLISHED},
    "atari-resnet": {"env": "atari/Pong", "torso": "resnet", **PUBLISHED},
    "atari-lstm": {"env": "atari/Pong", "torso": "shallow", "memory": "lstm", **PUBLISHED},
    "pong": {"preset": "pong"},
    "riverraid": {"env": "atari/Riverraid", "torso": "shallow", **PUBLISHED},
    "riverraid-rewards": {"env": "atari/Riverraid", "torso": "shallow", "reward": "pacifist:20", **PUBLISHED},
    "warehouse-iam": {**WAREHOUSE, "agent": "iam", "torso.sizes": (512, 256), "memory": "gru", "memory.hidden": 128},
    "warehouse-fnn": {**WAREHOUSE, "agent.inputs": "none", "torso.sizes": (693, 256)},
    "toy": {"env": "toy/catch", **PUBLISHED},
    "slowest-game": {"env": "atari/NameThisGame", **MANY},  # of the six; at random, SpaceInvaders is as slow
    "six-games": {"env": "atari/{AirRaid,Carnival,DemonAttack,NameThisGame,Pong,SpaceInvaders}", **MANY},
    "procgen": {"env": "procgen/starpilot:easy", "levels": "0:200", "torso": "resnet", **PUBLISHED},
}
KERNELS, SALIENCY = "kernels", "saliency"  # not trainings: what each memory costs, what a frame's saliency costs
CORES = cores()


@dataclass
class Result:
    """Medians over the repeats, in decisions a second; `layout` says how each piece was fastest."""

    config: str
    env: float
    inference: float
    learn: float
    bound: float
    whole: float
    ratio: float
    max_lag: float
    memory_mib: float  # of the process, with all configurations that are measured
    of_first: float  # the whole, of that of the first configuration in the same turn
    env_of_first: float  # and the environments alone
    layout: dict[str, Any]
    repeats: list[dict[str, float]]
    cores: float = CORES
    cluster: float | None = None  # the whole on a Ray of its own
    cluster_ratio: float | None = None  # to the whole without
    cluster_start: float | None = None  # seconds until the first update
    driver_ms: float | None = None  # of the driver's CPU for each rollout


def bench(
    names: list[str],
    repeats: int = 5,
    seconds: float = 5.0,
    json_path: Path | None = None,
    cluster: bool = False,
) -> list[Result]:
    """Measure and print; with `json_path`, also write what is known after each turn. Gives those of trainings."""
    results, others = list[Result](), list[dict[str, Any]]()
    trainings = [name for name in names if name in CONFIGS]
    for known in _in_turn(trainings, repeats, seconds, cluster):
        results = known
        _write(json_path, results, others)
    for name in names:
        if name not in CONFIGS:
            others.append(bench_memories(repeats, seconds) if name == KERNELS else bench_saliency(repeats))
            _write(json_path, results, others)
    if results:
        _show(results)
    for measured in others:
        (show_memories if measured["config"] == KERNELS else show_saliency)(measured)
    return results


def _write(json_path: Path | None, results: list[Result], others: list[dict[str, Any]]) -> None:
    if json_path is not None:
        json_path.write_text(json.dumps([*(asdict(result) for result in results), *others], indent=1) + "\n")


def configured(name: str, **options: Any) -> Config:
    """A training that goes on until it is stopped."""
    ever = {"steps": 10**9, "log_every": 500, "save_minutes": 10**6, "save_every": 0}
    return resolve(layers({**CONFIGS[name], **ever, **options})[0])


def _in_turn(names: list[str], repeats: int, seconds: float, cluster: bool) -> Iterator[list[Result]]:
    """What is known of every configuration, after each turn in which all were measured."""
    with ExitStack() as stack:
        trainings = [_Training(name, seconds, stack) for name in names]
        for repeat in range(repeats if names else 0):
            for training in trainings:
                row = training.measure(seconds, cluster, trainings[0].rows)
                numbers = ", ".join(f"{key} {number:,.4g}" for key, number in row.items())
                note(f"{training.name} {repeat + 1}/{repeats}: {numbers}")
            yield [training.result() for training in trainings]


class _Training:
    """A configuration, its pieces each in the layout that was fastest, and what was measured of them."""

    def __init__(self, name: str, seconds: float, stack: ExitStack):
        note(f"{name}: looking for the best layout of each piece")
        self.name, self.config, self.rows = name, _settled(configured(name)), list[dict[str, float]]()
        candidates = {
            "env": [partial(_env_piece, self.config, n, p) for n in _SIZES for p in (1, CORES)],
            "inference": [partial(_inference_piece, self.config, n) for n in _SIZES],
            "learn": [partial(learn_piece, self.config, g) for g in _group_sizes(self.config)],
        }
        self.pieces = {piece: _best(made, seconds)(stack) for piece, made in candidates.items()}
        self.whole = Whole(self.config, stack)
        self.whole.measure(seconds)  # its warm-up

    def measure(self, seconds: float, cluster: bool, first: list[dict[str, float]]) -> dict[str, float]:
        """A turn: the pieces, then the whole. `first` are the turns of the configuration to compare with, maybe this one."""
        row = {piece: _rate(function, seconds) for piece, (_, function) in self.pieces.items()}
        row["bound"] = 1 / (1 / row["env"] + 1 / row["inference"] + 1 / row["learn"])
        row |= self.whole.measure(3 * seconds)
        row["ratio"] = row["whole"] / row["bound"]
        if cluster:
            row |= measure_on_ray(_on_ray(self.name, self.config), 3 * seconds)
            row["cluster_ratio"] = row["cluster"] / row["whole"]
        self.rows.append(row)
        row["of_first"] = row["whole"] / first[-1]["whole"]
        row["env_of_first"] = row["env"] / first[-1]["env"]
        return row

    def result(self) -> Result:
        medians = {key: statistics.median(row[key] for row in self.rows) for key in self.rows[0]}
        layout = {piece: label for piece, (label, _) in self.pieces.items()}
        return Result(config=self.name, **medians, layout=layout, repeats=self.rows)


def _on_ray(name: str, alone: Config) -> Config:
    """The same training with as many environments, played by an actor a core."""
    options = {"cluster": "local", "actors": CORES, "num_envs": alone.training.num_envs // CORES}
    return configured(name, **options, group_size=alone.training.group_size)


_SIZES = (8, 16, 32, 64, 128)  # of pools and of batches, to find the fastest of


def _settled(config: Config) -> Config:
    """With the group size that a run would begin with."""
    pool = config.make_pool(1, 0)
    try:
        return replace(config, training=replace(config.training, group_size=choose_group_size(config, pool)))
    finally:
        pool.close()


def _group_sizes(config: Config) -> list[int]:
    """Powers of two, as long as every core gets a group of the batch."""
    training = config.training
    batch = config.make_algorithm().batch_size(training.pool_size, training.all_pools)
    return [2**k for k in range((batch // CORES).bit_length())] or [1]


Piece = tuple[str, Callable[[], int]]  # how it is laid out; one go at it, returning the decisions done


def _best(candidates: Sequence[Callable[[ExitStack], Piece]], seconds: float) -> Callable[[ExitStack], Piece]:
    """The fastest, each built for its turn and gone after it."""

    def rate(build: Callable[[ExitStack], Piece]) -> float:
        with ExitStack() as stack:
            return _rate(build(stack)[1], seconds / 3)

    return max(candidates, key=rate)


def _rate(function: Callable[[], int], seconds: float) -> float:
    function()
    start, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        done += function()
    return done / elapsed


def _env_piece(config: Config, num_envs: int, count: int, stack: ExitStack) -> Piece:
    """Pools that step with random actions: one, whose own threads use all cores, or several in a thread each."""
    pools = [config.make_pool(num_envs, seed) for seed in range(count)]
    rng = np.random.default_rng(0)
    for pool in pools:
        stack.callback(pool.close)
        pool.reset()
    actions = rng.integers(0, pools[0].action_spec.n, (10, num_envs))
    workers = stack.enter_context(ThreadPoolExecutor(count))

    def step(pool: Pool) -> int:
        for chosen in actions:
            pool.send(chosen)
            pool.recv()
        return actions.size

    return f"{count} of {num_envs} environments", lambda: sum(workers.map(step, pools))


class _Still:
    """A pool whose environments stand still: what is left of acting is the agent's part."""

    def __init__(self, pool: Any):
        self.__dict__.update(
            {k: getattr(pool, k) for k in ("num_envs", "observation_spec", "action_spec", "measures_spec", "tasks")}
        )
        self.step = pool.reset()

    def reset(self) -> Any:
        return self.step

    def send(self, actions: np.ndarray) -> None:
        pass


def _inference_piece(config: Config, batch: int, stack: ExitStack) -> Piece:
    """Actors deciding, one a core, each in a thread of its own."""
    pool = config.make_pool(batch, 0)
    still = _Still(pool)
    pool.close()
    agent = config.make_agent(pool)
    actors = [Actor(agent, still, 20, seed=i) for i in range(CORES)]  # type: ignore[arg-type]
    for actor in actors:
        actor.start()
    workers = stack.enter_context(ThreadPoolExecutor(CORES, initializer=lambda: torch.set_num_threads(1)))

    def think(actor: Actor) -> int:
        for t in range(10):
            actor.t = t
            actor.act()
        return 10 * batch

    return f"batches of {batch}", lambda: sum(workers.map(think, actors))


def learn_piece(config: Config, group_size: int, stack: ExitStack) -> Piece:
    """A learner with a gradient worker a core, on a batch of real rollouts."""
    actors, learner = build(config)
    actor = actors[0]
    actor.start()
    rollouts = [actor.collect() for _ in range(learner.algorithm.rollouts(actor.pool.num_envs, len(actors)))]
    for each in actors:
        each.pool.close()
    learner.group_size = group_size
    workers = stack.enter_context(ThreadPoolExecutor(CORES, initializer=lambda: torch.set_num_threads(1)))
    learner.map = workers.map

    def go() -> int:
        learner.learn(rollouts)
        return sum(rollout.decisions for rollout in rollouts)

    return f"groups of {group_size}", go


def _show(results: list[Result]) -> None:
    table = Table(title=f"decisions a second on {CORES} cores, medians")
    for column in ("", "env", "inference", "learn", "bound", "whole", "ratio", "max lag", "memory"):
        table.add_column(column, justify="right" if column else "left")
    for r in results:
        rates = (f"{rate:,.0f}" for rate in (r.env, r.inference, r.learn, r.bound, r.whole))
        table.add_row(r.config, *rates, f"{r.ratio:.2f}", f"{r.max_lag:.0f}", f"{r.memory_mib:,.0f} MiB")
    stdout.print(table)
    for r in results:
        if r.cluster is not None:
            note(
                f"{r.config}: on a Ray of its own {r.cluster:,.0f}, {r.cluster_ratio:.2f} of the whole; first update after "
                f"{r.cluster_start:.1f} s; {r.driver_ms:.2f} ms of the driver for each rollout"
            )
        if r is not results[0]:
            first = results[0].config
            note(
                f"{r.config}, of {first} in the same turn: environments {r.env_of_first:.3f}, the whole {r.of_first:.3f}"
            )
        note(f"{r.config}: best with {', '.join(f'{piece}: {label}' for piece, label in r.layout.items())}")
