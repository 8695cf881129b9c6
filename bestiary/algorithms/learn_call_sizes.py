"""The numbers of rollouts, trajectories and updates of a learn call, and the resulting policy lag.

A learn call receives whole rollouts, one trajectory per environment of a pool, and forms batches of `batch_size`
trajectories. If the number of trajectories is not a multiple of the batch size, the learner keeps the remaining
trajectories and puts them before the trajectories of the next call. An on-policy algorithm uses all trajectories at
once, so no trajectory waits.
"""

from dataclasses import dataclass
from math import gcd
from typing import Self

from bestiary.algorithms.base import Algorithm


@dataclass(frozen=True)
class LearnSizes:
    """The sizes of the learn calls of a run."""

    rollouts: int  # number of rollouts per learn call
    batch_size: int  # number of new trajectories per update
    epochs: int  # maximum number of updates that use a trajectory
    pool_size: int  # number of environments of the smallest pool
    largest_pool_size: int  # number of environments of the largest pool
    on_policy: bool

    @classmethod
    def of(cls, algorithm: Algorithm, num_envs: int, pools: int, largest_pool_size: int | None = None) -> Self:
        """Return the sizes of an algorithm.

        `num_envs` is the number of environments in the smallest pool, and `largest_pool_size` the number in the largest
        pool. If `largest_pool_size` is None, all pools have `num_envs` environments.
        """
        return cls(
            algorithm.rollouts_per_learn(num_envs, pools),
            algorithm.batch_size(num_envs, pools),
            algorithm.epochs,
            num_envs,
            largest_pool_size or num_envs,
            algorithm.on_policy,
        )

    @property
    def max_waiting(self) -> int:
        """The maximum number of trajectories that wait for the next learn call. It is 0 if batches fit exactly."""
        if self.on_policy:
            return 0
        # All numbers of waiting trajectories are multiples of `unit`. Pools of different sizes differ by 1 environment,
        # so `unit` is then 1.
        unit = gcd(self.rollouts * self.pool_size, self.batch_size) if self.pool_size == self.largest_pool_size else 1
        return self.batch_size - unit

    def max_updates(self, calls: int = 1) -> int:
        """Return the maximum number of updates in this number of consecutive learn calls.

        For PPG, only the updates of the policy count, not the updates of the value function and of the auxiliary phase.
        """
        trajectories = calls * self.rollouts * self.largest_pool_size + self.max_waiting
        if self.on_policy:
            return trajectories * self.epochs // self.batch_size
        return trajectories // self.batch_size * self.epochs

    def max_policy_lag(self, calls: int) -> int:
        """Return the maximum policy lag of a rollout, in updates.

        The rollout is collected with the weights before the first of `calls` learn calls, and the last of these calls
        receives the rollout. Without waiting trajectories, the lag is highest in the last update. A trajectory that
        waits is used in the first update of the following call, and then once in each epoch of that call.
        """
        if not self.max_waiting:
            return self.max_updates(calls) - 1
        return self.max_updates(calls) + (self.epochs - 1) * (self.max_updates() // self.epochs)

    def max_calls(self, max_lag: int, limit: int) -> int:
        """Return the largest number of calls, at most `limit`, for which `max_policy_lag` is at most `max_lag`."""
        return max((calls for calls in range(1, limit + 1) if self.max_policy_lag(calls) <= max_lag), default=0)
