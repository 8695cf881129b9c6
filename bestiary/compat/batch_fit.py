"""Find a number of environments that fits the batches, if a translated command line states a number of actors.

The original programs, such as PolyBeast of TorchBeast, allow any number of actors. Bestiary needs a number of
environments with which batches of the given size can be assembled.
"""

from typing import NamedTuple

from bestiary.algorithms.base import Algorithm
from bestiary.config.derived_options import check_batches
from bestiary.config.training_options import Training
from bestiary.utils.errors import UserError

POOLS = (2, 1, 3)  # numbers of pools to try, in this order
MAX_FACTOR = 50  # at most this multiple of the wanted number of environments is tried


class Fit(NamedTuple):
    """Numbers of environments and pools with which batches can be assembled.

    On a cluster, `num_envs` and `pools` are the numbers of each actor.
    """

    num_envs: int
    pools: int
    actors: int = 1


def fit_num_envs(wanted: int, algorithm: Algorithm, num_tasks: int) -> Fit:
    """Return the smallest valid number of environments that is at least `wanted`, and its number of pools."""
    for num_envs in range(wanted, MAX_FACTOR * max(wanted, num_tasks) + 1):
        for pools in POOLS:
            if _is_valid(Training(num_envs=num_envs, pools=pools), algorithm, num_tasks):
                return Fit(num_envs, pools)
    raise UserError(f"no number of environments near {wanted} fits the batches; choose another batch size")


def fit_actors(wanted: int, algorithm: Algorithm, num_tasks: int, cluster: str, max_actors: int) -> Fit:
    """Return the numbers of actors and environments on a cluster, if the original has `wanted` environment servers.

    There is one actor per server, but at most `max_actors` actors. All actors have the same number of environments: the
    smallest valid number with which all actors together have at least `wanted` environments.
    """
    actors = min(wanted, max_actors)
    first = -(-wanted // actors)
    for num_envs in range(first, MAX_FACTOR * max(first, num_tasks) + 1):
        training = Training(runtime="cluster", cluster=cluster, actors=actors, num_envs=num_envs, pools=1)
        if _is_valid(training, algorithm, num_tasks):
            return Fit(num_envs, 1, actors)
    raise UserError(f"no number of environments near {wanted} fits the batches; choose another batch size")


def _is_valid(training: Training, algorithm: Algorithm, num_tasks: int) -> bool:
    problems: list[str] = []
    check_batches(training, algorithm, num_tasks, problems)
    return not problems
