"""Training options whose defaults are derived from other options, and checks that training options fit together.

If the user does not set the number of environments or the maximum policy lag, the value depends on the algorithm, the
number of tasks and the runtime. The options of components are not derived here: each component has a method for this
(see `agents/run_context.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bestiary.algorithms.base import Algorithm, size_problems, updates_per_learn
from bestiary.config.origins import GIVEN
from bestiary.config.training_options import Training, unused_options

DEFAULT_MAX_LAG = 16  # in learner updates


def derive_runtime(training: Training, sources: Mapping[str, str], problems: list[str]) -> Training:
    """Select the cluster runtime if `--cluster` is given. Append problems with runtime options to `problems`.

    `sources` maps each training option that has been set to its source. If an option has no effect in the chosen
    runtime, it is reported only if the user has set it directly. Options set by a preset, a config file or another run
    are not reported.
    """
    if training.cluster is not None and "runtime" not in sources:
        training = dataclasses.replace(training, runtime="cluster")
    if training.cluster is not None and training.runtime != "cluster":
        problems.append(
            f"--cluster {training.cluster} cannot be combined with --runtime {training.runtime}; remove one of them"
        )
    elif training.cluster is None and training.runtime == "cluster":
        problems.append(
            "--runtime cluster: no cluster given; add --cluster local, --cluster auto or --cluster HOST:PORT"
        )
    for name in sorted(unused_options(training.runtime)):
        value = getattr(training, name)
        if sources.get(name) == GIVEN and value != getattr(Training(), name):
            problems.append(_describe_unused(name, value, training.runtime))
    if training.inference == "central" and training.lag is not None:
        problems.append(
            f"--lag {training.lag}: not supported with --inference central, which always uses the newest weights; "
            "remove --lag or use --inference actor"
        )
    if training.min_actors > training.actors:
        problems.append(f"--min-actors {training.min_actors}: must be at most --actors {training.actors}")
    return training


def _describe_unused(name: str, value: Any, runtime: str) -> str:
    """Return the error message for an option that has no effect in the chosen runtime."""
    flag = f"--{name.replace('_', '-')}"
    runtimes = next(f.metadata["runtimes"] for f in dataclasses.fields(Training) if f.name == name)
    advice = "add --cluster" if runtimes == ("cluster",) else f"use --runtime {runtimes[0]}"
    if name == "record":
        return f"{flag}: not supported on a cluster; record games afterwards with bestiary eval RUN --record"
    if name in ("actor_threads", "actor_device") and runtime == "cluster":
        return (
            f"{flag} {value}: not supported on a cluster, where an actor has --pools threads and uses only CPUs; "
            "for inference on a GPU use --inference central"
        )
    return f"{flag} {value}: has no effect with --runtime {runtime}; remove it or {advice}"


def derive_max_lag(training: Training, algorithm: Algorithm) -> Training:
    """Return the training options with `max_lag` set. A value that the user has set is not changed.

    The value is DEFAULT_MAX_LAG, or a larger value on a cluster with many pools (vector environments). The larger value
    lets all pools collect rollouts at the same time, even if the fastest pool is twice as fast as the slowest.
    """
    n, pools = training.pool_size, training.total_pools
    if training.max_lag is not None or n == 0 or algorithm.validate(n, pools) or size_problems(algorithm, n, pools):
        return training
    needed = 0
    if training.runtime == "cluster" and not algorithm.on_policy:
        rollouts = algorithm.rollouts_per_learn(n, pools)
        batches_in_flight = -(-(max(2, rollouts) + pools) // rollouts)
        needed = 2 * batches_in_flight * updates_per_learn(algorithm, n, pools)
    return dataclasses.replace(training, max_lag=max(DEFAULT_MAX_LAG, needed))


def derive_num_envs(training: Training, algorithm: Algorithm, num_tasks: int) -> int:
    """Return the smallest valid number of environments that is not below the default (`training.num_envs`).

    A number is valid if the algorithm supports it and if it is a multiple of pools x tasks. All pools then have the
    same size, and all tasks have equally many environments in each pool. If no valid number is found, return the
    default.
    """
    pools = 1 if training.runtime == "serial" else training.pools
    for n in range(training.num_envs, 20 * training.num_envs):
        if n % (pools * num_tasks) == 0 and not algorithm.validate(n // pools, training.total_pools):
            return n
    return training.num_envs


def check_batches(training: Training, algorithm: Algorithm, num_tasks: int, problems: list[str]) -> None:
    """Check that environments, pools, tasks, batches, learners and policy lag fit together. Append to `problems`."""
    n, pools = training.num_envs, 1
    if training.runtime != "serial":
        pools = training.pools
        if n % pools:
            near = max(1, round(n / pools)) * pools
            problems.append(f"--num-envs {n}: must be a multiple of --pools {pools}; try {near}")
            return
    if n % (pools * num_tasks):
        near = max(1, round(n / (pools * num_tasks))) * pools * num_tasks
        factors = f"{num_tasks} tasks x {pools} pools" if pools > 1 else f"{num_tasks} tasks"
        problems.append(f"--num-envs {n}: must be a multiple of {pools * num_tasks} ({factors}); try {near}")
        return
    if training.runtime != "serial":
        if training.actor_threads > pools:
            problems.append(f"--actor-threads {training.actor_threads}: must be at most --pools {pools}")
        n, pools = training.pool_size, training.total_pools
    found = algorithm.validate(n, pools) or size_problems(algorithm, n, pools)
    problems += found
    if found or training.runtime == "serial":
        return
    if training.learners > 1 and not algorithm.can_split(training.learners, n, pools):
        problems.append(_describe_split_problem(algorithm, training.learners, n, pools))
    if (algorithm.on_policy or training.lag is not None) and training.min_actors:
        problems.append(
            f"--min-actors {training.min_actors}: not supported with on-policy algorithms or --lag, "
            "which need all actors; remove --min-actors"
        )
    _check_lag(training, algorithm, n, pools, problems)


def _check_lag(training: Training, algorithm: Algorithm, n: int, pools: int, problems: list[str]) -> None:
    """Check that --lag and --max-lag are not too small.

    If a batch has R rollouts, --lag must be at least R - 1. Otherwise the actors would wait for an update, and this
    update would wait for their rollouts. On-policy algorithms allow only --lag 0.

    If the algorithm makes U updates with the same rollouts, --max-lag must be at least U - 1, because the policy lag of
    the rollouts is at least U - 1 in the last of these updates.
    """
    updates = updates_per_learn(algorithm, n, pools)
    rollouts = algorithm.rollouts_per_learn(n, pools)
    if algorithm.on_policy:
        if training.lag:
            problems.append(f"--lag {training.lag}: must be 0, because this algorithm is on-policy; remove --lag")
    elif training.lag is not None:
        if training.lag < rollouts - 1:
            problems.append(
                f"--lag {training.lag}: must be at least {rollouts - 1} (a batch consists of {rollouts} rollouts)"
            )
    elif training.max_lag is not None and training.max_lag < updates - 1:
        problems.append(
            f"--max-lag {training.max_lag}: must be at least {updates - 1} (the learner makes up to {updates} updates "
            "with the same rollouts)"
        )


def _describe_split_problem(algorithm: Algorithm, learners: int, num_envs: int, pools: int) -> str:
    """Return the error message for `--learners` if a batch cannot be split evenly among this number of learners."""
    possible = [count for count in range(1, 2 * learners) if algorithm.can_split(count, num_envs, pools)]
    if possible in ([], [1]):
        return f"--learners {learners}: this algorithm supports only one learner; use --learners 1"
    unit = min(num_envs, algorithm.batch_size(num_envs, pools))
    nearest = min(possible, key=lambda count: abs(count - learners))
    return (
        f"--learners {learners}: each batch must be split evenly, in units of {unit} trajectories; "
        f"try --learners {nearest}"
    )
