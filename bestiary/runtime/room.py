"""Whether a cluster has room for a run and machines that are like this one, what so many actors mean for the lag, and where on
it processes go."""

import math
from typing import Any

from bestiary.config import Config, Training
from bestiary.console import note, warn
from bestiary.errors import RunError, UserError
from bestiary.runtime.build import rollouts_in_flight
from bestiary.runtime.bundle import unlike, versions
from bestiary.runtime.ray import on_every_machine

FOUND_WITHIN = 120.0  # seconds that a process may take to have its place and be made


def check_machines(ray: Any, config: Config) -> None:
    """Refuse more actors than there is room for, and machines that are not like this one, before anything is started."""
    training = config.training
    if training.cluster != "local" and (problems := on_every_machine(ray, unlike, versions())):
        raise UserError(*problems)
    gpus_each(ray, training)
    _check_learners(ray, training)
    needed = (training.min_actors or training.actors) + training.learners * training.workers
    have, free = ray.cluster_resources().get("CPU", 0), ray.available_resources().get("CPU", 0)
    if free < needed:
        machines = sum(node["Alive"] for node in ray.nodes())
        room = max(0, math.floor(free) - training.learners * training.workers)
        learning = f" and {training.learners * training.workers} for --workers" if training.workers else ""
        raise UserError(
            f"--actors {training.actors}: needs {training.min_actors or training.actors} CPUs{learning}; the cluster has "
            f"{have:.0f} on {machines} machine{'s' * (machines != 1)}, {free:.0f} of them free: room for {room}"
            + (
                ""
                if training.cluster == "local"
                else "; --min-actors N begins with fewer and uses machines that join later"
            )
        )
    _say_what_lag_means(config)


def _check_learners(ray: Any, training: Training) -> None:
    """Each learner must fit on one machine."""
    sizes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    if training.workers and sum(size // training.workers for size in sizes) < training.learners:
        raise UserError(
            f"--workers {training.workers}: a learner needs so many CPUs on one machine, and there are --learners "
            f"{training.learners}; the machines have {', '.join(f'{size:.0f}' for size in sorted(sizes, reverse=True))}"
        )


def gpus_each(ray: Any, training: Training) -> float:
    """GPUs for each learner and for the process that decides for all: a whole one, half of one, or none."""
    have = ray.cluster_resources().get("GPU", 0)
    wanted = training.learners + (training.inference == "central")
    if training.device == "cpu" or (training.device == "auto" and have == 0):
        return 0
    if 2 * have < wanted:
        raise UserError(
            f"--device {training.device}: {wanted} processes want a GPU, the cluster has {have:.0f}; --device cpu"
        )
    return 1 if have >= wanted else 0.5


def _say_what_lag_means(config: Config) -> None:
    training, algorithm = config.training, config.make_algorithm()
    if algorithm.on_policy or training.lag is not None:
        return
    larger, at_once = algorithm.larger_batches, rollouts_in_flight(algorithm, training)
    if at_once < training.all_pools:
        warn(
            f"--max-lag {training.max_lag} lets only {at_once} of {training.all_pools} pools play at once; larger batches "
            f"({larger}) make fewer updates, --max-lag none lets all play"
        )
    elif training.max_lag is not None and training.max_lag > 100:
        note(
            f"note: so many actors make decisions up to {training.max_lag} updates old before they are learnt from; larger "
            f"batches ({larger}) make fewer updates"
        )


# --- where processes go ---


def no_room(what: str) -> RunError:
    return RunError(f"no room for {what} within {FOUND_WITHIN:.0f} s: something else has taken it on this cluster")


def elsewhere(unfit: set[str]) -> Any:
    """Anywhere but on some nodes."""
    from ray.util.scheduling_strategies import NodeLabelSchedulingStrategy, NotIn

    return NodeLabelSchedulingStrategy({"ray.io/node-id": NotIn(*sorted(unfit))}) if unfit else "SPREAD"


def here(ray: Any) -> Any:
    """On the driver's machine, if that can be."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
