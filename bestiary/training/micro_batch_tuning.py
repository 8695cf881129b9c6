"""Auto-tuning of the micro-batch size.

The fastest micro-batch size depends on the network and the machine. Small micro-batches fit into the processor's cache;
large micro-batches have less overhead per step. Before a run starts, the speed of several sizes is measured for a short
time. The error of such a measurement can be 10 %, so the default size is kept unless another size is clearly faster.
The result is written to the run's config.toml. It is also cached in a file in the user's cache folder (`bestiary
doctor` prints the path), so that each combination of machine and agent is measured only once.

Nothing is measured if --micro-batch-size is given or if the learner uses a GPU. Serial runs and runs with a fixed
policy lag must be reproducible, so they always use the default size.
"""

import hashlib
import json
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bestiary.algorithms.base import Batch
from bestiary.config.config import Config
from bestiary.envs.vector_env import EnvInterface
from bestiary.rollout import ObservationSpec, Rollout
from bestiary.training.devices import learner_device_type
from bestiary.training.learner import Learner
from bestiary.utils.console import note
from bestiary.utils.cpu import num_cores

MEASURE_SECONDS = 0.1  # duration of one measurement of one size, in seconds
NUM_PASSES = 3  # number of measurements per size; the fastest one counts, because other programs can slow them down
MAX_BATCH_SECONDS = 1.0  # if the gradient of a batch takes longer than this, larger sizes are not measured
# A size is clearly slower than the fastest size if its speed is below this fraction of the highest speed.
CLEARLY_SLOWER = 0.9


def default_micro_batch_size(config: Config) -> int:
    """Return the default size: on a GPU, the batch size; on a CPU, 4 for large observations (images), otherwise 32."""
    if learner_device_type(config.training) != "cpu":
        return config.make_algorithm().batch_size(config.training.pool_size, config.training.total_pools)
    return 4 if _is_large(config.interface.observation_spec) else 32


def _is_large(observation: ObservationSpec) -> bool:
    """Return whether one observation has at least 4,096 elements."""
    return sum(torch.Size(spec.shape).numel() for spec in observation.values()) >= 4_096


def choose_micro_batch_size(config: Config) -> int:
    """Return --micro-batch-size if it is given. Otherwise choose the default, the cached or the measured size.

    Serial runs, runs with a fixed policy lag and runs on a GPU use the default size. Other runs use the cached size. If
    no size is cached, the speed of several sizes is measured, and the selected size is cached.
    """
    training = config.training
    if training.micro_batch_size is not None:
        return training.micro_batch_size
    if training.runtime == "serial" or training.lag is not None or learner_device_type(training) != "cpu":
        return default_micro_batch_size(config)
    path = cache_file()
    key = _cache_key(config)
    sizes = read_cache(path)
    if key not in sizes:
        rates = measure_rates(config)
        sizes[key] = _select_size(rates, default_micro_batch_size(config))
        measured = "; ".join(f"size {size}: {rate:,.0f} steps/s" for size, rate in rates.items())
        note(f"auto-tuning: micro-batch {measured}; selected size {sizes[key]} (to change it: --micro-batch-size)")
        # Read the cache again, because other runs may have written to it during the measurement.
        _write_cache(path, {**read_cache(path), key: sizes[key]})
    return sizes[key]


def _select_size(rates: dict[int, float], default: int) -> int:
    """Return the fastest size if it is clearly faster than the default size, otherwise the default size.

    If the speed of the default size was not measured, the largest measured size below the default size is used as the
    default. If there is no such size, the smallest measured size is used.
    """
    default = max((size for size in rates if size <= default), default=min(rates))
    fastest = max(rates, key=rates.__getitem__)
    return fastest if rates[default] < CLEARLY_SLOWER * rates[fastest] else default


def measure_rates(config: Config) -> dict[int, float]:
    """Return the learning speed for each micro-batch size, in steps per second. All learner threads are used.

    The sizes 1, 2, 4, 8, ... are measured in this order. The measurement stops after a size if (1) the gradient of a
    batch took longer than `MAX_BATCH_SECONDS`, or (2) the size is at least four times the fastest size, and clearly
    slower (see CLEARLY_SLOWER).
    """
    algorithm = config.make_algorithm()
    num_threads = config.training.learner_threads or num_cores()
    agent = config.make_agent()
    learner = Learner(agent, algorithm, total_steps=1, micro_batch_size=1)
    rates: dict[int, float] = {}
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    max_size = max(1, algorithm.batch_size(config.training.pool_size, config.training.total_pools) // num_threads)
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as learner_threads:
        learner.parallel_map = learner_threads.map
        for _ in range(NUM_PASSES):
            size = 1
            while size <= max_size:
                state = agent.initial_state(size * num_threads)
                rollout = _random_rollout(config.interface, state, algorithm.sequence_length, size * num_threads)
                batch = algorithm.dummy_batch(rollout)
                learner.micro_batch_size = size
                rate, batch_seconds = _measure_rate(learner, batch)
                rates[size] = max(rate, rates.get(size, 0.0))
                if batch_seconds > MAX_BATCH_SECONDS:
                    break
                fastest = max(rates, key=rates.__getitem__)
                if size > 2 * fastest and rates[size] < CLEARLY_SLOWER * rates[fastest]:
                    break
                size *= 2
    torch.set_num_threads(torch_threads)
    return rates


def _measure_rate(learner: Learner, batch: Batch) -> tuple[float, float]:
    """Compute the gradient of a batch several times. Return the highest speed (steps/s) and the shortest time (s)."""
    learner.batch_gradient(batch)
    best, elapsed = float("inf"), 0.0
    while elapsed < MEASURE_SECONDS:
        start = time.perf_counter()
        learner.batch_gradient(batch)
        duration = time.perf_counter() - start
        best = min(best, duration)
        elapsed += duration
    return batch.rollout.num_steps / best, best


def _random_rollout(interface: EnvInterface, state: tuple[torch.Tensor, ...], length: int, num_envs: int) -> Rollout:
    """Return a rollout with the same shapes as in training. Images are random, and vectors contain zeros."""
    rollout = Rollout.empty(length, num_envs, interface.observation_spec, {}, state)
    for array in rollout.observation.values():
        array.random_(0, 256) if array.dtype == torch.uint8 else array.zero_()
    return rollout


def cache_file() -> Path:
    """Return the path of the file in which the selected micro-batch sizes are cached."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bestiary" / "micro_batch_sizes.json"


def _cache_key(config: Config) -> str:
    """Return a hash of everything that can affect the fastest micro-batch size: agent, shapes, machine, software."""
    training, algorithm = config.training, config.make_algorithm()
    batch_size = algorithm.batch_size(training.pool_size, training.total_pools)
    components = {kind: config.tables()[kind] for kind in config.components if kind != "algo"}
    shapes = {kind: [list(spec.shape), spec.dtype] for kind, spec in config.interface.observation_spec.items()}
    agent = [
        components,
        shapes,
        config.interface.action_spec.n,
        algorithm.sequence_length,
        batch_size,
        training.precision,
    ]
    software = [torch.__version__, config.components["algo"].name, CLEARLY_SLOWER]
    machine = [_processor_name(), num_cores(), training.learner_threads]
    text = json.dumps([agent, machine, software, config.plugin_hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor_name() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("model name", "Model", "CPU part")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def read_cache(path: Path) -> dict[str, int]:
    """Return the cached size for each cache key, or an empty dict if the file is missing or not valid."""
    try:
        content = json.loads(path.read_text())
        return {str(key): int(size) for key, size in content.items() if int(size) > 0}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_cache(path: Path, sizes: dict[str, int]) -> None:
    """Write the cache file in one atomic operation. If this fails, print a note."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(sizes, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        note(f"note: cannot write {path} ({error.strerror}); the next run repeats the auto-tuning")
