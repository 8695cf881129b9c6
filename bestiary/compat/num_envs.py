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
    """Return the numbers of actors and environments on a cluster, if the original has `wanted` environment servers.

    There is one actor per server, but at most `max_actors` actors. All actors have the same number of environments: the
    smallest number that gives each actor all tasks and at least `wanted` environments in total.
    """
    actors = max(1, min(wanted // num_tasks, max_actors))
    return EnvCounts(actors, max(-(-wanted // actors), num_tasks))
