"""Training options whose defaults are derived from other options, and checks that training options fit together.

If the user does not set the number of environments or the maximum policy lag, the value depends on the algorithm, the
number of tasks and the runtime. The options of components are not derived here: each component has a method for this
(see `agents/run_context.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from bestiary.algorithms.base import Algorithm, size_problems
from bestiary.algorithms.learn_call_sizes import LearnSizes
from bestiary.config.origins import GIVEN
from bestiary.config.training_options import Training, unused_options

DEFAULT_MAX_LAG = 16  # in learner updates


def learn_sizes(algorithm: Algorithm, training: Training) -> LearnSizes:
    """Return the sizes of the learn calls of a run."""
    return LearnSizes.of(algorithm, training.pool_size, training.total_pools, training.pool_sizes[0])


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


def derive_pools(training: Training, sources: Mapping[str, str], num_tasks: int) -> Training:
    """Return the training options with fewer pools, if a pool could not have an environment of each task.

    The number of pools that the user has set is not changed.
    """
    if training.runtime == "serial" or "pools" in sources or "num_envs" not in sources:
        return training
    return dataclasses.replace(training, pools=max(1, min(training.pools, training.num_envs // num_tasks)))


def derive_max_lag(training: Training, algorithm: Algorithm) -> Training:
    """Return the training options with `max_lag` set. A value that the user has set is not changed.

    The value is DEFAULT_MAX_LAG, or a larger value in two cases. (1) If the learner makes many updates with each
    rollout, the policy lag grows with each of these updates. (2) A cluster with many pools (vector environments) needs
    a larger value, so that all pools can collect rollouts at the same time, even if the fastest pool is twice as fast
    as the slowest.
    """
    n, pools = training.pool_size, training.total_pools
    if training.max_lag is not None or n == 0 or algorithm.validate(n, pools) or size_problems(algorithm, n, pools):
        return training
    sizes = learn_sizes(algorithm, training)
    needed = 0 if algorithm.on_policy else sizes.max_policy_lag(calls=1)
    if training.runtime == "cluster" and not algorithm.on_policy:
        # While the learner uses the rollouts of a call (R, or 2 if R is 1), each pool collects one rollout. This number
        # of rollouts is converted to learn calls and rounded up.
        calls_in_flight = -(-(max(2, sizes.rollouts) + pools) // sizes.rollouts)
        needed = max(needed, 2 * calls_in_flight * sizes.max_updates())
    return dataclasses.replace(training, max_lag=max(DEFAULT_MAX_LAG, needed))


def derive_num_envs(training: Training, algorithm: Algorithm, num_tasks: int) -> int:
    """Return the smallest suitable number of environments that is not below the default (`training.num_envs`).

    A number is suitable if batches fit exactly and if it is a multiple of pools x tasks. All pools then have the same
    size, and all tasks have equally many environments in each pool. If no such number is found, return the default.
    """
    pools = 1 if training.runtime == "serial" else training.pools
    for n in range(training.num_envs, 20 * training.num_envs):
        sizes = (n // pools, training.total_pools)
        if n % (pools * num_tasks) == 0 and algorithm.fits_exactly(*sizes) and not algorithm.validate(*sizes):
            return n
    return training.num_envs


def check_batches(training: Training, algorithm: Algorithm, num_tasks: int, problems: list[str]) -> None:
    """Check that environments, pools, tasks, batches, learners and policy lag fit together. Append to `problems`."""
    pools = 1 if training.runtime == "serial" else training.pools
    if training.num_envs < pools * num_tasks:
        needed = f"{num_tasks} environments, one per task" if num_tasks > 1 else "1 environment"
        problems.append(
            f"--num-envs {training.num_envs}: each of the {pools} pools needs at least {needed}; "
            f"use at least --num-envs {pools * num_tasks}"
            if pools > 1
            else f"--num-envs {training.num_envs}: the run has {num_tasks} tasks; use at least --num-envs {num_tasks}"
        )
        return
    if training.runtime != "serial" and training.actor_threads > pools:
        problems.append(f"--actor-threads {training.actor_threads}: must be at most --pools {pools}")
    n, pools = training.pool_size, training.total_pools
    found = algorithm.validate(n, pools) or size_problems(algorithm, n, pools)
    problems += found
    if found or training.runtime == "serial":
        return
    if training.learners > 1 and not training.has_equal_pools:
        problems.append(
            f"--num-envs {training.num_envs}: with --learners {training.learners}, it must be a multiple of --pools "
            f"{training.pools}; try {training.pool_sizes[0] * training.pools}"
        )
    elif training.learners > 1 and not algorithm.can_split(training.learners, n, pools):
        problems.append(_describe_split_problem(algorithm, training.learners, n, pools))
    if (algorithm.on_policy or training.lag is not None) and training.min_actors:
        problems.append(
            f"--min-actors {training.min_actors}: not supported with on-policy algorithms or --lag, "
            "which need all actors; remove --min-actors"
        )
    sizes = learn_sizes(algorithm, training)
    _check_lag(training, algorithm, sizes, problems)


def _check_lag(training: Training, algorithm: Algorithm, sizes: LearnSizes, problems: list[str]) -> None:
    """Check that --lag and --max-lag are not too small.

    If a learn call needs R rollouts, --lag must be at least R - 1. Otherwise the actors would wait for an update, and
    this update would wait for their rollouts. On-policy algorithms allow only --lag 0.

    --max-lag must be at least the policy lag of a rollout that is used as early as possible: the rollout is collected
    with the weights before a learn call, and this call receives it. Its lag is not 0 if the call makes several updates.
    """
    rollouts = sizes.rollouts
    lag = sizes.max_policy_lag(calls=1)
    if algorithm.on_policy:
        if training.lag:
            problems.append(f"--lag {training.lag}: must be 0, because this algorithm is on-policy; remove --lag")
    elif training.lag is not None:
        if training.lag < rollouts - 1:
            problems.append(
                f"--lag {training.lag}: must be at least {rollouts - 1} (a batch consists of {rollouts} rollouts)"
            )
    elif training.max_lag is not None and training.max_lag < lag:
        problems.append(
            f"--max-lag {training.max_lag}: must be at least {lag} (the learner makes up to {sizes.max_updates()} "
            "updates with the same rollouts)"
        )


def _describe_split_problem(algorithm: Algorithm, learners: int, num_envs: int, pools: int) -> str:
    """Return the error message for `--learners` if a batch cannot be split evenly among this number of learners."""
    possible = [count for count in range(1, 2 * learners) if algorithm.can_split(count, num_envs, pools)]
    if possible in ([], [1]):
        return f"--learners {learners}: this algorithm supports only one learner; use --learners 1"
    nearest = min(possible, key=lambda count: abs(count - learners))
    return (
        f"--learners {learners}: the trajectories of each batch must be split evenly among the learners, which is not "
        f"possible with {learners} learners; try --learners {nearest}"
    )
