"""Measure the throughput of training and compare it with an upper bound (`bestiary bench`).

Everything is measured with the same code that training uses, on all cores. Each of the three phases of training
(environment stepping, inference and learning) is measured alone, with several layouts. A layout is a batch size and a
number of threads. The bound uses the fastest layout of each phase. It assumes that every core is always busy with one
of the phases. The time per step is then the sum of the times per step of the three phases:

    bound = 1 / (1/env_stepping + 1/inference + 1/learning)          ratio = end_to_end / bound

The speed of a machine varies over time. Therefore the phases and the end-to-end training of all configurations are
measured in turn, several times, and medians are reported. Ratios are computed within each repeat, and the median of
these ratios is reported.
"""

import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bestiary.bench.configs import CONFIGS, KERNELS, make_bench_config
from bestiary.bench.end_to_end import EndToEndRun, measure_on_local_cluster
from bestiary.bench.memories import bench_memories, print_memories
from bestiary.bench.phases import (
    BATCH_SIZES,
    CORES,
    make_env_phase,
    make_inference_phase,
    make_learning_phase,
    measure_rate,
    micro_batch_sizes,
    select_fastest,
)
from bestiary.bench.saliency import bench_saliency, print_saliency
from bestiary.config.config import Config
from bestiary.training.micro_batch_tuning import choose_micro_batch_size
from bestiary.utils.console import format_number, note, stdout


@dataclass
class Result:
    """The results of one configuration. Numbers are medians over the repeats. Speeds are in steps/s."""

    config: str
    env_stepping: float
    inference: float
    learning: float
    bound: float
    end_to_end: float
    ratio: float  # end_to_end / bound
    max_policy_lag: float
    # Resident memory of the whole process in MiB. One process measures all configurations in turn, so the value
    # includes the memory of the other configurations.
    memory_mib: float
    relative_end_to_end: float  # end_to_end / end_to_end of the first configuration
    relative_env_stepping: float  # env_stepping / env_stepping of the first configuration
    layout: dict[str, str]  # phase of training -> its fastest batch size and number of threads, as text
    repeats: list[dict[str, float]]  # the results of each repeat
    cores: float = CORES
    cluster: float | None = None  # end-to-end speed on a local Ray cluster
    cluster_ratio: float | None = None  # cluster / end_to_end
    cluster_startup_seconds: float | None = None  # time from the start of Ray to the first update
    driver_ms_per_rollout: float | None = None  # CPU time of the driver process per rollout


def run_benchmarks(
    names: list[str],
    repeats: int = 5,
    seconds: float = 5.0,
    json_path: Path | None = None,
    cluster: bool = False,
) -> list[Result]:
    """Run benchmarks and print their results. Return the results of the training configurations.

    Args:
        names: names of training configurations, KERNELS or SALIENCY.
        repeats: number of measurements of each quantity.
        seconds: duration of one measurement of a phase. A measurement of end-to-end training takes three times as long.
        json_path: file to which the results so far are written after each repeat.
        cluster: whether to measure training on a local Ray cluster, too.
    """
    results = list[Result]()
    other_results = list[dict[str, Any]]()
    training_names = [name for name in names if name in CONFIGS]
    for results in _measure_in_turn(training_names, repeats, seconds, cluster):
        _write_json(json_path, results, other_results)
    for name in names:
        if name not in CONFIGS:
            other_results.append(bench_memories(repeats, seconds) if name == KERNELS else bench_saliency(repeats))
            _write_json(json_path, results, other_results)
    if results:
        _print_results(results)
    for result in other_results:
        if result["config"] == KERNELS:
            print_memories(result)
        else:
            print_saliency(result)
    return results


def _write_json(json_path: Path | None, results: list[Result], other_results: list[dict[str, Any]]) -> None:
    if json_path is not None:
        json_path.write_text(json.dumps([*(asdict(result) for result in results), *other_results], indent=1) + "\n")


def _measure_in_turn(names: list[str], repeats: int, seconds: float, cluster: bool) -> Iterator[list[Result]]:
    """Measure all configurations in turn. Yield the results so far after each repeat."""
    with ExitStack() as stack:
        benchmarks = [_TrainingBenchmark(name, seconds, stack) for name in names]
        for repeat in range(repeats if names else 0):
            for benchmark in benchmarks:
                row = benchmark.measure(seconds, cluster, benchmarks[0].rows)
                numbers = ", ".join(f"{key} {format_number(number)}" for key, number in row.items())
                note(f"{benchmark.name} {repeat + 1}/{repeats}: {numbers}")
            yield [benchmark.result() for benchmark in benchmarks]


class _TrainingBenchmark:
    """Benchmark of one configuration: each phase of training with its fastest layout, and a complete training run."""

    def __init__(self, name: str, seconds: float, stack: ExitStack):
        note(f"{name}: searching for the fastest batch size of each phase of training")
        self.name = name
        self.config = _with_tuned_micro_batch_size(make_bench_config(name))
        self.rows = list[dict[str, float]]()  # results of each repeat
        candidates = {
            "env_stepping": [
                partial(make_env_phase, self.config, num_envs, num_pools)
                for num_envs in BATCH_SIZES
                for num_pools in (1, CORES)
            ],
            "inference": [partial(make_inference_phase, self.config, size) for size in BATCH_SIZES],
            "learning": [partial(make_learning_phase, self.config, size) for size in micro_batch_sizes(self.config)],
        }
        self.phases = {key: select_fastest(factories, seconds)(stack) for key, factories in candidates.items()}
        self.end_to_end_run = EndToEndRun(self.config, stack)
        self.end_to_end_run.measure(seconds)  # warm-up

    def measure(self, seconds: float, cluster: bool, first_rows: list[dict[str, float]]) -> dict[str, float]:
        """Measure the phases of training and then end-to-end training. Return the results as a row.

        The row also contains speeds relative to the first configuration. `first_rows` has the rows of the first
        configuration, one per repeat. Its last row is from the current repeat, because each repeat begins with the
        first configuration.
        """
        row = {key: measure_rate(phase, seconds) for key, phase in self.phases.items()}
        row["bound"] = 1 / (1 / row["env_stepping"] + 1 / row["inference"] + 1 / row["learning"])
        row |= self.end_to_end_run.measure(3 * seconds)
        row["ratio"] = row["end_to_end"] / row["bound"]
        if cluster:
            row |= measure_on_local_cluster(_make_cluster_config(self.name, self.config), 3 * seconds)
            row["cluster_ratio"] = row["cluster"] / row["end_to_end"]
        self.rows.append(row)
        row["relative_end_to_end"] = row["end_to_end"] / first_rows[-1]["end_to_end"]
        row["relative_env_stepping"] = row["env_stepping"] / first_rows[-1]["env_stepping"]
        return row

    def result(self) -> Result:
        """Return the medians of all repeats so far."""
        medians = {key: statistics.median(row[key] for row in self.rows) for key in self.rows[0]}
        layout = {key: phase.layout for key, phase in self.phases.items()}
        return Result(config=self.name, **medians, layout=layout, repeats=self.rows)


def _make_cluster_config(name: str, local_config: Config) -> Config:
    """Return the configuration for a local Ray cluster, with one actor per core.

    All actors together have as many environments as `local_config`, rounded down to a multiple of the number of cores.
    """
    training = local_config.training
    options = {"cluster": "local", "actors": CORES, "num_envs": training.num_envs // CORES}
    return make_bench_config(name, **options, micro_batch_size=training.micro_batch_size)


def _with_tuned_micro_batch_size(config: Config) -> Config:
    """Return the configuration with the micro-batch size that auto-tuning selects for it."""
    micro_batch_size = choose_micro_batch_size(config)
    return replace(config, training=replace(config.training, micro_batch_size=micro_batch_size))


def _print_results(results: list[Result]) -> None:
    table = Table(title=f"training throughput in steps/s on {CORES} cores (medians)")
    table.add_column("configuration")
    for column in ("env stepping", "inference", "learning", "bound", "end-to-end", "ratio", "max lag", "memory"):
        table.add_column(column, justify="right")
    for r in results:
        rates = (f"{rate:,.0f}" for rate in (r.env_stepping, r.inference, r.learning, r.bound, r.end_to_end))
        table.add_row(r.config, *rates, f"{r.ratio:.2f}", f"{r.max_policy_lag:.0f}", f"{r.memory_mib:,.0f} MiB")
    stdout.print(table)
    for r in results:
        if r.cluster is not None:
            note(
                f"{r.config}: local Ray cluster: {r.cluster:,.0f} steps/s, {r.cluster_ratio:.2f} times the speed of "
                f"the local runtime; first update after {r.cluster_startup_seconds:.1f} s; driver: "
                f"{r.driver_ms_per_rollout:.2f} ms of CPU time per rollout"
            )
        if r is not results[0]:
            note(
                f"{r.config}: speed divided by the speed of {results[0].config}, median over repeats: env stepping "
                f"{r.relative_env_stepping:.3f}, end-to-end {r.relative_end_to_end:.3f}"
            )
        layouts = ", ".join(f"{key.replace('_', ' ')}: {layout}" for key, layout in r.layout.items())
        note(f"{r.config}: fastest batch sizes: {layouts}")
