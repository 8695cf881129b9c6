"""A short look at the machine before a local run: how many trajectories at once a gradient worker learns fastest from.

Small groups stay in a core's cache, large ones waste less time between operations; which is better depends on the net and on
the machine. A look so short is easily a tenth off: the usual size stands unless another is clearly better. The answer is kept
in a file of the user's cache, so that a machine is asked once for each kind of agent (`bestiary doctor` says where that file
is), and in the run's config.toml. Serial runs and runs of a fixed lag promise the same bytes every time: they are never probed.
"""

import hashlib
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bestiary.config import Config
from bestiary.console import note
from bestiary.cores import cores
from bestiary.envs.pool import Interface, Pool
from bestiary.rollout import ObservationSpec, Rollout
from bestiary.runtime.devices import learns_on
from bestiary.runtime.learner import Learner

SECONDS = 0.1  # of learning at each size, each time
TIMES = 3  # that all sizes are gone through: a moment in which the machine was busy must not decide
LONG = 1.0  # seconds a batch; larger ones are not tried
WORSE = (
    0.9  # of the best rate is less than such a look can be wrong about: the search ends there, two sizes after the best
)


def usual_group_size(config: Config, pool: Pool | Interface) -> int:
    """A fair choice on any machine: few large pictures or many small vectors; and all at once for a GPU."""
    if learns_on(config.training) != "cpu":
        return config.make_algorithm().batch_size(config.training.pool_size, config.training.all_pools)
    return 4 if _large(pool.observation_spec) else 32


def _large(observation: ObservationSpec) -> bool:
    return sum(torch.Size(spec.shape).numel() for spec in observation.values()) >= 4_096


def choose_group_size(config: Config, pool: Pool) -> int:
    """What `--group-size auto` stands for."""
    training = config.training
    if training.group_size is not None:
        return training.group_size
    if training.runtime == "serial" or training.lag is not None or learns_on(training) != "cpu":
        return usual_group_size(config, pool)
    path, key = cache_file(), _key(config, pool)
    known = read_cache(path)
    if key not in known:
        rates = probe(config, pool)
        known[key] = _choose(rates, usual_group_size(config, pool))
        note(
            "probe: groups of "
            + ", ".join(f"{size}: {rate:,.0f}" for size, rate in rates.items())
            + f" steps/s learnt; {known[key]} it is (--group-size sets it)"
        )
        _write(path, {**read_cache(path), key: known[key]})  # others may have written meanwhile
    return known[key]


def _choose(rates: dict[int, float], usual: int) -> int:
    """The usual size, or the largest below it that was tried, unless it is clearly worse than the best."""
    usual = max((size for size in rates if size <= usual), default=min(rates))
    best = max(rates, key=rates.__getitem__)
    return best if rates[usual] < WORSE * rates[best] else usual


def probe(config: Config, pool: Pool) -> dict[int, float]:
    """Decisions learnt a second, by group size, with every worker busy; from small to large, until it gets worse."""
    algorithm, workers = config.make_algorithm(), config.training.workers or cores()
    agent = config.make_agent(pool)
    learner = Learner(agent, algorithm, total_steps=1, group_size=1)
    rates: dict[int, float] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    largest = max(1, algorithm.batch_size(config.training.pool_size, config.training.all_pools) // workers)
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool_of_workers:
        learner.map = pool_of_workers.map
        for _ in range(TIMES):
            size = 1
            while size <= largest:
                state = agent.initial_state(size * workers)
                batch = algorithm.example(_made_up(pool, state, algorithm.unroll_length, size * workers))
                learner.group_size = size
                rate, long = _rate(learner, batch)
                rates[size] = max(rate, rates.get(size, 0.0))
                if long:
                    break
                if size > 2 * max(rates, key=rates.__getitem__) and rates[size] < WORSE * max(rates.values()):
                    break
                size *= 2
    torch.set_num_threads(threads)
    return rates


def _rate(learner: Learner, batch: Rollout) -> tuple[float, bool]:
    """Decisions a second, the best of several goes after a first one that warms up; and whether a go takes long."""
    learner.gradients(batch)
    best, elapsed = float("inf"), 0.0
    while elapsed < SECONDS:
        start = time.perf_counter()
        learner.gradients(batch)
        took = time.perf_counter() - start
        best, elapsed = min(best, took), elapsed + took
    return batch.length * batch.num_envs / best, best > LONG


def _made_up(pool: Pool, state: tuple[torch.Tensor, ...], length: int, num_envs: int) -> Rollout:
    """A rollout of noise, in the shape of real ones."""
    rollout = Rollout.empty(length, num_envs, pool.observation_spec, {}, state)
    for array in rollout.observation.values():
        array.random_(0, 256) if array.dtype == torch.uint8 else array.zero_()
    return rollout


def cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bestiary" / "group_sizes.json"


def _key(config: Config, pool: Pool) -> str:
    """What the answer depends on: machine, torch, parts and shapes, and how it was chosen."""
    training, algorithm = config.training, config.make_algorithm()
    batch_size = algorithm.batch_size(training.pool_size, training.all_pools)
    parts = {kind: config.tables()[kind] for kind in config.parts if kind != "algo"}
    shapes = {kind: [list(spec.shape), spec.dtype] for kind, spec in pool.observation_spec.items()}
    about = [parts, shapes, pool.action_spec.n, algorithm.unroll_length, batch_size, training.precision]
    machine = [_processor(), cores(), training.workers, torch.__version__, config.parts["algo"].name, WORSE]
    return hashlib.sha256(json.dumps([about, machine, config.plugin_hashes], sort_keys=True).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("model name", "Model", "CPU part")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read_cache(path: Path) -> dict[str, int]:
    """What is known; nothing, where the file is not there or not ours."""
    try:
        found = json.loads(path.read_text())
        return {str(key): int(size) for key, size in found.items() if int(size) > 0}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(path: Path, known: dict[str, int]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        note(f"note: {path} cannot be written ({error.strerror}), so the next run probes again")
