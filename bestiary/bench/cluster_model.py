"""A model that predicts the throughput of a cluster from the benchmark results of one machine.

    actor rate      p = 1 / (c/env_stepping + c/inference)      an actor uses one of the c cores of a machine
    learner rate    l = learners * learning                     a learner uses all cores of a machine
    network rate    n = learners * bandwidth / b                a learner receives b bytes per step
    throughput      min(N p, l, n) steps/s with N actors

`env_stepping`, `inference` and `learning` are the measured rates of the three phases of training, in steps/s. Each
phase was measured alone, on all cores of one machine. `learners` is the number of learners.

The model makes these assumptions:

    - All machines are equal to the measured machine. The cores of a machine do not slow each other down.
    - Actors and learners run on different machines.
    - The work of the driver and the summation of gradients over learners take no time.
    - Sending the weights takes no time, because they are small compared with the rollouts. Their size is printed, so
      that this can be checked.

A real cluster is usually slower than predicted. It can be faster if its machines are faster than the measured machine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bestiary.config.config import Config
from bestiary.distributed.serialisation import iterate_arrays, pack_rollout
from bestiary.rollout import Rollout
from bestiary.utils.console import note, stdout
from bestiary.utils.errors import UserError


@dataclass(frozen=True)
class Machine:
    """Throughput of one machine for each phase of training, in steps/s. Each phase is measured alone, on all cores."""

    cores: float  # number of cores of the machine
    env_stepping: float
    inference: float
    learning: float

    @property
    def actor_rate(self) -> float:
        """Throughput of one actor, which uses one core, in steps/s."""
        return 1 / (self.cores / self.env_stepping + self.cores / self.inference)


@dataclass(frozen=True)
class Prediction:
    """Predicted throughput of a cluster."""

    actors: int
    steps_per_second: float
    bottleneck: str  # "actors", "learners" or "network"


def predict_throughput(
    machine: Machine, actors: int, learners: int, bytes_per_step: float, gbit_per_second: float
) -> Prediction:
    """Return the predicted throughput of a cluster and its bottleneck.

    Args:
        machine: throughput of one machine of the cluster.
        actors: number of actors.
        learners: number of learners.
        bytes_per_step: number of bytes that a learner receives for each step.
        gbit_per_second: network bandwidth of each machine that runs a learner.
    """
    limits = {
        "actors": actors * machine.actor_rate,
        "learners": learners * machine.learning,
        "network": learners * gbit_per_second * 1e9 / 8 / bytes_per_step,
    }
    bottleneck = min(limits, key=limits.__getitem__)
    return Prediction(actors, limits[bottleneck], bottleneck)


def measure_message_sizes(config: Config) -> tuple[float, int]:
    """Return the number of bytes per step that are sent to a learner, and the size of the weights in bytes."""
    algorithm = config.make_algorithm()
    pool = config.make_vector_env(2, 0)
    pool.close()
    agent = config.make_agent(pool)
    state = tuple(torch.zeros_like(s) for s in agent.initial_state(2))
    rollout = Rollout.empty(algorithm.sequence_length, 2, pool.observation_spec, pool.measures_spec, state)
    rollout_bytes = sum(array.nbytes for array in iterate_arrays(pack_rollout(rollout, pool.frame_stacks)))
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in agent.state_dict().values())
    return rollout_bytes / (algorithm.sequence_length * 2), weight_bytes


def read_machine(path: Path, name: str) -> Machine:
    """Read the throughput of the configuration `name` from a result file of `bestiary bench --json`.

    Raises:
        UserError: the file cannot be read, is not a result file, or has no result for the configuration.
    """
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text())
        by_config = {result["config"]: result for result in results if "config" in result}
        if name not in by_config:
            available = ", ".join(by_config) or "no configuration"
            raise UserError(f"--results {path}: the file has no result for {name}; it has {available}")
        result = by_config[name]
        return Machine(*(float(result[key]) for key in ("cores", "env_stepping", "inference", "learning")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--results {path}: not a result file of bestiary bench --json ({error})") from error


def print_predictions(
    name: str, config: Config, machine: Machine, actor_counts: list[int], learners: int, gbit_per_second: float
) -> None:
    """Print a table of the predicted throughput for each number of actors in `actor_counts`."""
    bytes_per_step, weight_bytes = measure_message_sizes(config)
    learners_text = f"{learners} learner{'s' * (learners != 1)}"
    table = Table(title=f"{name}: predicted maximum throughput with {learners_text}, {gbit_per_second:g} Gbit/s")
    for column in ("actors", "steps/s", "bottleneck", "MB/s"):
        table.add_column(column, justify="left" if column == "bottleneck" else "right")
    for actors in actor_counts:
        prediction = predict_throughput(machine, actors, learners, bytes_per_step, gbit_per_second)
        rate = prediction.steps_per_second
        table.add_row(f"{actors:,}", f"{rate:,.0f}", prediction.bottleneck, f"{rate * bytes_per_step / 1e6:,.1f}")
    stdout.print(table)
    actor_traffic = machine.actor_rate * bytes_per_step / 1e6
    note(
        f"{name}: one actor: {machine.actor_rate:,.0f} steps/s, {actor_traffic:.2f} MB/s; one learner: "
        f"{machine.learning:,.0f} steps/s; weights: {weight_bytes / 1e6:.1f} MB per version"
    )
