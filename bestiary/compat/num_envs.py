"""Find the numbers of actor processes and environments for a command line that contains a number of actors."""

from typing import NamedTuple


class EnvCounts(NamedTuple):
    """The number of actor processes on a cluster, and the number of environments per actor process."""

    actors: int
    num_envs: int


def count_envs(wanted: int, num_tasks: int) -> int:
    """Return the number of environments: `wanted`, or one per task if `wanted` is smaller."""
    return max(wanted, num_tasks)


def count_cluster_envs(wanted: int, num_tasks: int, max_actors: int) -> EnvCounts:
    """Return the number of actors on a cluster, and the number of environments of each actor.

    `wanted` is the number of environment servers of the original program. Each actor plays all tasks, so it has at
    least `num_tasks` environments. There are `wanted // num_tasks` actors, but at least one and at most `max_actors`.
    All actors have the same number of environments: the smallest number with which each actor has at least `num_tasks`
    environments and all actors together have at least `wanted` environments.
    """
    actors = max(1, min(wanted // num_tasks, max_actors))
    return EnvCounts(actors, max(-(-wanted // actors), num_tasks))
