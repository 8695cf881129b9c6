"""Placement of processes on the nodes of a cluster: checks before a run starts, and scheduling strategies for Ray."""

import math
from typing import Any

from bestiary.config.config import Config
from bestiary.config.training_options import Training
from bestiary.distributed.ray_connection import check_every_node
from bestiary.distributed.shipped_config import package_versions, version_mismatches
from bestiary.training.factory import max_rollouts_in_flight
from bestiary.utils.console import note, warn
from bestiary.utils.errors import RunError, UserError

PLACEMENT_TIMEOUT = 120.0  # maximum time to place a process on a node and complete its setup, in seconds
LARGE_LAG = 100  # a note is printed if --max-lag is larger than this number of updates


def check_cluster(ray: Any, config: Config) -> None:
    """Check that all nodes have the same software, and that the cluster has enough resources for a run.

    Raises:
        UserError: a node has other package versions, or the cluster has too few CPUs or GPUs.
    """
    training = config.training
    if training.cluster != "local" and (problems := check_every_node(ray, version_mismatches, package_versions())):
        raise UserError(*problems)
    gpus_per_process(ray, training)
    _check_learner_size(ray, training)
    _check_cpus(ray, training)
    _report_policy_lag(config)


def _check_cpus(ray: Any, training: Training) -> None:
    """Check that the cluster has enough free CPUs for the learners and the minimum number of actors."""
    min_actors = training.min_actors or training.actors
    learner_cpus = training.learners * training.learner_threads
    free = ray.available_resources().get("CPU", 0)
    if free >= min_actors + learner_cpus:
        return
    total = ray.cluster_resources().get("CPU", 0)
    nodes = sum(node["Alive"] for node in ray.nodes())
    max_actors = max(0, math.floor(free) - learner_cpus)
    learner_text = f" and {learner_cpus} for --learner-threads" if learner_cpus else ""
    problem = (
        f"--actors {training.actors}: needs {min_actors} CPUs{learner_text}; the cluster has {total:.0f} on "
        f"{nodes} node{'s' * (nodes != 1)}, {free:.0f} of them free; use at most --actors {max_actors}"
    )
    if training.cluster != "local":
        problem += ", or --min-actors N to start with N actors and add the others when nodes join"
    raise UserError(problem)


def _check_learner_size(ray: Any, training: Training) -> None:
    """Check that the nodes have enough CPUs for all learners. A learner cannot use the CPUs of several nodes."""
    sizes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    threads = training.learner_threads
    if threads and sum(size // threads for size in sizes) < training.learners:
        raise UserError(
            f"--learner-threads {threads}: each learner (--learners {training.learners}) needs {threads} CPUs of one "
            f"node; the nodes have {', '.join(f'{size:.0f}' for size in sorted(sizes, reverse=True))} CPUs; "
            "use a smaller --learner-threads"
        )


def gpus_per_process(ray: Any, training: Training) -> float:
    """Return the number of GPUs per learner and for the inference server: 1, 0.5 (two processes share a GPU) or 0.

    Raises:
        UserError: the cluster has too few GPUs.
    """
    available = ray.cluster_resources().get("GPU", 0)
    needed = training.learners + (training.inference == "central")
    if training.device == "cpu" or (training.device == "auto" and available == 0):
        return 0
    if 2 * available < needed:
        raise UserError(
            f"--device {training.device}: {needed} processes need a GPU, and at most 2 processes can share a GPU; the "
            f"cluster has {available:.0f} GPUs; use --device cpu"
        )
    return 1 if available >= needed else 0.5


def _report_policy_lag(config: Config) -> None:
    """Warn if --max-lag is so small that vector environments must wait for the learner. Print a note if it is large."""
    training = config.training
    algorithm = config.make_algorithm()
    if algorithm.on_policy or training.lag is not None:
        return
    max_in_flight = max_rollouts_in_flight(algorithm, training)
    hint = f"larger batches ({algorithm.batch_size_hint}) reduce the number of updates per rollout"
    if max_in_flight < training.total_pools:
        warn(
            f"--max-lag {training.max_lag}: only {max_in_flight} of {training.total_pools} vector environments can "
            f"collect rollouts at the same time; {hint}; with --max-lag none, all can collect at the same time"
        )
    elif training.max_lag is not None and training.max_lag > LARGE_LAG:
        note(f"note: with this number of actors the policy lag can reach {training.max_lag} updates; {hint}")


# --- scheduling ---


def placement_error(process: str) -> RunError:
    """Return the error for a process that Ray has not placed on a node in time."""
    return RunError(
        f"the cluster had no free resources for {process} within {PLACEMENT_TIMEOUT:.0f} s; another job may use them"
    )


def avoid_nodes(excluded: set[str]) -> Any:
    """Return a scheduling strategy that places a process on any node except those with the IDs in `excluded`."""
    from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

    if not excluded:
        return "SPREAD"
    return NodeLabelSchedulingStrategy({"ray.io/node-id": NotIn(*sorted(excluded))})


def prefer_driver_node(ray: Any) -> Any:
    """Return a scheduling strategy that uses the driver's node or, if it has no free resources, another node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
