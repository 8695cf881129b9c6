"""What a user left open and other choices decide: batches that suit the tasks, environments that suit the batches, how far
ahead actors may be; and whether all of it goes together."""

import dataclasses
from typing import Any

from bestiary.algorithms.algorithm import Algorithm, updates
from bestiary.algorithms.clipping import fitting_scale
from bestiary.config import CLUSTER, Training
from bestiary.envs.rewards import RewardedPool
from bestiary.options import construct


def settle_reward(options: Any, critic: str | None) -> Any:
    """`--algo.reward auto`: clamped, unless the critic takes care of scales."""
    if getattr(options, "reward", None) != "auto":
        return options
    return dataclasses.replace(options, reward="none" if critic == "popart" else "abs_one")


def settle_scale(options: Any, pools: list[RewardedPool]) -> Any:
    """`--algo.reward-scale none`, with a reward of one's own that is clipped: as much as fits into the clip."""
    if getattr(options, "reward_scale", 1.0) is not None or not pools or getattr(options, "reward", "none") == "none":
        return options
    if pools[0].rewards.trained is None:
        return options
    return dataclasses.replace(
        options, reward_scale=min(fitting_scale(pool.trained, pool.components) for pool in pools)
    )


def settle_span(options: Any, algorithm: Algorithm) -> Any:
    """`--memory.span none`, of a memory that begins anew with every unroll: as long as the algorithm's unrolls."""
    if getattr(options, "span", 0) is not None:
        return options
    return dataclasses.replace(options, span=algorithm.unroll_length)


def settle_runtime(training: Training, chosen: bool, problems: list[str]) -> Training:
    """`--cluster X` chooses the runtime, too; and the options of a cluster need one."""
    if training.cluster is not None and not chosen:
        training = dataclasses.replace(training, runtime="cluster")
    if training.cluster is not None and training.runtime != "cluster":
        problems.append(
            f"--cluster {training.cluster} and --runtime {training.runtime} contradict each other: say --runtime cluster, "
            "or --cluster none"
        )
    elif training.cluster is None and training.runtime == "cluster":
        problems.append("--runtime cluster: which? --cluster local, auto or an address")
    if training.runtime != "cluster":
        given = [name for name in CLUSTER[1:] if getattr(training, name) != getattr(Training(), name)]
        problems += [f"--{name.replace('_', '-')}: has an effect only on a cluster (--cluster)" for name in given]
        return training
    if training.actor_threads or training.actor_device != "auto":
        flag = "--actor-threads" if training.actor_threads else "--actor-device"
        problems.append(
            f"{flag}: actors of a cluster have a thread a pool and act on CPUs; --inference central is for GPUs"
        )
    if training.record:
        problems.append(
            "--record: only runs of one machine write down their games; bestiary eval RUN --record does, too"
        )
    if training.inference == "central" and training.lag is not None:
        problems.append(
            f"--lag {training.lag}: with --inference central every decision is made with the newest weights; --lag none, or "
            "--inference actor"
        )
    if training.min_actors > training.actors:
        problems.append(f"--min-actors {training.min_actors}: there are --actors {training.actors}")
    return training


def settle_max_lag(training: Training, algorithm: Algorithm) -> Training:
    """`--max-lag none`: 16; and on a cluster as much as lets all of its pools play at once, none of them faster than twice
    the slowest."""
    n, pools = training.pool_size, training.all_pools
    if training.max_lag is not None or n == 0 or algorithm.problems(n, pools):
        return training
    needed = 0
    if training.runtime == "cluster" and not algorithm.on_policy:
        joined = algorithm.rollouts(n, pools)
        needed = 2 * -(-(max(2, joined) + pools) // joined) * updates(algorithm, n, pools)
    return dataclasses.replace(training, max_lag=max(16, needed))


def settle_batch(algorithm: Any, options: Any, training: Training, tasks: int, fixed: bool) -> Any:
    """Of several tasks, an update has as many trajectories of each as it would have of one alone: else their gradients drown in
    each other's noise. Where the number of environments is `fixed`, the most that fit a pool."""
    if not isinstance(getattr(options, "batch_size", None), int) or not training.pool_size:
        return options
    larger = [dataclasses.replace(options, batch_size=each * tasks) for each in range(options.batch_size, 0, -1)]

    def fits(options: Any) -> bool:
        made, n = construct(algorithm, options=options), training.pool_size
        shareable = training.learners == 1 or _shareable(made, training.learners, n)
        return shareable and not made.problems(n, training.all_pools)

    return next((each for each in larger if not fixed or fits(each)), options)


def enough_envs(training: Training, algorithm: Algorithm, tasks: int) -> int:
    """The least number of environments, from the default up, that can be shared out among so many tasks."""
    pools = 1 if training.runtime == "serial" else training.pools
    for n in range(training.num_envs, 20 * training.num_envs):
        if n % (pools * tasks) == 0 and not algorithm.problems(n // pools, training.all_pools):
            return n
    return training.num_envs


def check_batches(training: Training, algorithm: Algorithm, tasks: int, problems: list[str]) -> None:
    n, pools = training.num_envs, 1
    if training.runtime != "serial":
        pools = training.pools
        if n % pools:
            problems.append(f"--num-envs {n} does not divide into --pools {pools} of the same size")
            return
    if n % (pools * tasks):
        near = max(1, round(n / (pools * tasks))) * pools * tasks
        spread = f"{tasks} tasks in {pools} pools" if pools > 1 else f"{tasks} tasks"
        problems.append(f"--num-envs {n}: {spread} need a multiple of {pools * tasks}; try {near}")
        return
    if training.runtime != "serial":
        if training.actor_threads > pools:
            problems.append(f"--actor-threads {training.actor_threads}: each needs a pool, and there are {pools}")
        n, pools = training.pool_size, training.all_pools
    elif training.lag is not None:
        problems.append(f"--lag {training.lag}: is for --runtime local; in serial the lag is what one thread makes it")
    problems += (found := algorithm.problems(n, pools))
    if found or training.runtime == "serial":
        return
    if training.learners > 1 and not _shareable(algorithm, training.learners, n):
        problems.append(_cannot_share(algorithm, training.learners, n))
    if (algorithm.on_policy or training.lag is not None) and training.min_actors:
        problems.append(
            f"--min-actors {training.min_actors}: here every rollout has its place, so all actors must be there"
        )
    made, joined = updates(algorithm, n, pools), algorithm.rollouts(n, pools)
    if algorithm.on_policy:
        if training.lag:
            problems.append(
                f"--lag {training.lag}: this algorithm learns only from its newest weights, so its lag is 0"
            )
    elif training.lag is not None:
        if training.lag < joined - 1:
            problems.append(f"--lag {training.lag}: a batch is made of {joined} rollouts; at least {joined - 1}")
    elif training.max_lag is not None and training.max_lag < made - 1:
        problems.append(f"--max-lag {training.max_lag}: one rollout brings {made} updates; at least {made - 1}")


def _shareable(algorithm: Algorithm, learners: int, num_envs: int) -> bool:
    share = getattr(algorithm, "share", None)  # a user's own algorithm need not have one
    return share is not None and share(learners) is not None and num_envs % learners == 0


def _cannot_share(algorithm: Algorithm, learners: int, num_envs: int) -> str:
    fitting = [count for count in range(1, 2 * learners) if _shareable(algorithm, count, num_envs)]
    if fitting in ([], [1]):
        return f"--learners {learners}: this algorithm learns in one place; --learners 1"
    least = min(num_envs, algorithm.batch_size(num_envs, 1))
    return (
        f"--learners {learners}: each batch is shared out evenly, {least} trajectories at a time; "
        f"try --learners {min(fitting, key=lambda count: abs(count - learners))}"
    )
