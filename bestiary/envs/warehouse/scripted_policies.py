"""Scripted policies for the warehouse: hand-written baselines for trained agents.

    policy = make_scripted_policy("nearest", pool, seed)
    pool.reset()
    while True:
        pool.send(policy.act())
        step = pool.recv()

A scripted policy reads the state of the environment, not observations. `random`, `nearest` and `committed` use only
information that agents can observe. `oldest` and `aware` also use the ages of the items, which agents cannot observe.

Letters of shapes: R rows and C columns of cells, which are numbered 0 to R*C-1; S shelf cells. Each shelf cell also has
a second number, 0 to S-1. Targets (the shelf cells to which the robots move) and variables named `shelf` contain this
second number.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from bestiary.envs.vector_env import VectorEnv
from bestiary.envs.warehouse.env import WarehouseVectorEnv
from bestiary.step import Step
from bestiary.utils.errors import UserError
from bestiary.utils.numba_jit import cached_njit
from bestiary.utils.options import suggest

# Maximum number of items in a plan of the policy `aware`. Longer plans did not increase the return on 7x7 cells.
PLAN_LENGTH = 4
# Cost of each step in a plan; the reward of an item is at most 1. Costs of 0.1 to 0.2 gave the highest return in all
# variants.
STEP_COST = 0.2


class ScriptedPolicy(Protocol):
    """Interface of scripted policies. A policy is created for one vector environment and reads its state."""

    def act(self) -> np.ndarray:
        """Return one action per environment, int64 [N], for the current state of the environments."""
        ...


class ShortestPaths:
    """The shortest paths from each cell to each shelf cell, by the movement rules of a warehouse."""

    def __init__(self, pool: WarehouseVectorEnv):
        moves = pool.rules.moves  # [R*C,4]
        self.shelf_cells = pool.shelves @ (pool.spec.size[1], 1)  # [S]
        num_cells, num_shelves = len(moves), len(self.shelf_cells)
        distance = np.full((num_cells, num_shelves), num_cells)  # [R*C,S]; first a value above all path lengths
        distance[self.shelf_cells, np.arange(num_shelves)] = 0
        while (shorter := np.minimum(distance, 1 + distance[moves].min(axis=1))).sum() < distance.sum():
            distance = shorter
        # There is no action "stay". If an item appears in the robot's cell, the robot collects it by moving into a
        # wall, or by leaving the cell and coming back. Each path therefore has at least one move.
        self.steps = 1 + distance[moves].min(axis=1)  # [R*C,S]: number of moves until the robot enters the shelf cell
        self.actions = distance[moves].argmin(axis=1)  # [R*C,S]: action of the first of these moves


class RandomPolicy:
    """Uniformly random moves."""

    def __init__(self, pool: WarehouseVectorEnv, seed: int):
        self.pool = pool
        self.rng = np.random.default_rng(seed)

    def act(self) -> np.ndarray:
        return self.rng.integers(self.pool.action_spec.n, size=self.pool.num_envs)


# (vector environment, shortest paths, shelf cells of the previous targets [N]) -> shelf cells of the new targets [N];
# -1: no target
TargetChoice = Callable[[WarehouseVectorEnv, ShortestPaths, np.ndarray], np.ndarray]


class TargetPolicy:
    """Moves the robot along a shortest path to the target, an item selected by `choose_target`.

    The robot moves at random if there is no target.
    """

    def __init__(self, choose_target: TargetChoice, pool: WarehouseVectorEnv, seed: int):
        self.choose_target = choose_target
        self.pool = pool
        self.paths = ShortestPaths(pool)
        self.targets = np.full(pool.num_envs, -1)
        self.random = RandomPolicy(pool, seed)

    def act(self) -> np.ndarray:
        self.targets[self.pool.state.clocks == 0] = -1  # a new episode starts without a target
        self.targets = self.choose_target(self.pool, self.paths, self.targets)
        moves = self.paths.actions[self.pool.state.robots, self.targets]
        return np.where(self.targets >= 0, moves, self.random.act())


def nearest(pool: WarehouseVectorEnv, paths: ShortestPaths, targets: np.ndarray) -> np.ndarray:
    """Return the new targets [N]: the shelf cell of the item that the robot reaches with the fewest moves; -1: no item.

    Of equally near items, choose the first item in row order. The previous targets, `targets`, are not used.
    """
    return _argmin_item(pool, paths, paths.steps[pool.state.robots])


def committed(pool: WarehouseVectorEnv, paths: ShortestPaths, targets: np.ndarray) -> np.ndarray:
    """Return the new targets [N]: keep a target until its shelf cell is empty, then choose the nearest item.

    `targets` are the shelf cells of the previous targets, [N]; -1: no target.
    """
    keep = (targets >= 0) & (pool.ages[np.arange(pool.num_envs), targets] >= 0)
    return np.where(keep, targets, nearest(pool, paths, targets))


def oldest(pool: WarehouseVectorEnv, paths: ShortestPaths, targets: np.ndarray) -> np.ndarray:
    """Return the new targets [N]: the shelf cell of the oldest item, even if it cannot be reached in time; -1: no item.

    Of equally old items, choose the nearest item. The previous targets, `targets`, are not used.
    """
    steps = paths.steps[pool.state.robots]
    return _argmin_item(pool, paths, steps - (steps.max() + 1) * pool.ages.astype(np.int64))


def aware(pool: WarehouseVectorEnv, paths: ShortestPaths, targets: np.ndarray) -> np.ndarray:
    """Return the new targets [N]: the shelf cell of the first item of the best plan (see `plan_targets`).

    If there is no plan, choose the nearest item. The previous targets, `targets`, are not used.
    """
    planned = np.full(pool.num_envs, -1)
    plan_targets(
        paths.steps, paths.shelf_cells, pool.state.robots, pool.ages, pool.rules.expiry, pool.rules.by_age, planned
    )
    return np.where(planned >= 0, planned, nearest(pool, paths, targets))


def _argmin_item(pool: WarehouseVectorEnv, paths: ShortestPaths, cost: np.ndarray) -> np.ndarray:
    """Return the shelf cell of the item with the smallest cost in each environment, [N]; -1: there are no items.

    `cost` [N,S] is the cost of an item in each shelf cell. Of items with equal cost, choose the first in row order.
    """
    by_row = np.argsort(paths.shelf_cells)
    has_item = pool.ages[:, by_row] >= 0
    best = np.where(has_item, cost[:, by_row], np.iinfo(np.int64).max).argmin(axis=1)
    return np.where(has_item.any(axis=1), by_row[best], -1)


@cached_njit
def plan_targets(
    steps: np.ndarray,
    shelf_cells: np.ndarray,
    robots: np.ndarray,
    ages: np.ndarray,
    expiry: int,
    by_age: bool,
    planned: np.ndarray,
) -> None:
    """Find the best plan of each robot and write the shelf cell of the plan's first item into `planned`.

    A plan is a sequence of at most PLAN_LENGTH items that the robot can reach before they expire. The value of a plan
    is the sum of the items' rewards minus STEP_COST for each step. If no plan has a value above 0, `planned` does not
    change. The search is depth-first with branch and bound. Items that do not exist yet are ignored.

    Args:
        steps: number of moves from each cell to each shelf cell, [R*C,S].
        shelf_cells: cell number of each shelf cell, [S].
        robots: cell number of each robot, [N].
        ages: age of the item in each shelf cell, [N,S]; -1: no item.
        expiry: age at which items disappear.
        by_age: if True, the reward of an item is its age divided by the age of the oldest item; if False, it is 1.
        planned: output, number of a shelf cell for each robot, [N].
    """
    num_shelves = ages.shape[1]
    # Current age of the item in each shelf cell. The value `expiry` marks a cell that is empty or already in the plan.
    age_now = np.zeros(num_shelves, np.int64)
    # The search extends the plan by one item at a time. The arrays below have one entry for each position d in the
    # plan (d = 0: the first item that the robot collects).
    value = np.zeros(PLAN_LENGTH)  # value of the part of the plan before item d
    clock = np.zeros(PLAN_LENGTH, np.int64)  # number of steps until the robot starts to move towards item d
    cell = np.zeros(PLAN_LENGTH, np.int64)  # cell from which the robot moves towards item d
    next_shelf = np.zeros(PLAN_LENGTH, np.int64)  # shelf cell that the search tries next at position d
    chosen = np.zeros(PLAN_LENGTH, np.int64)  # shelf cell of item d
    chosen_age = np.zeros(PLAN_LENGTH, np.int64)  # age of item d at the start of the plan
    for env in range(len(robots)):
        for shelf in range(num_shelves):
            # Empty shelf cells get the age `expiry`: an item of this age cannot be reached in time.
            age_now[shelf] = ages[env, shelf] if ages[env, shelf] >= 0 else expiry
        best, depth = 0.0, 0
        cell[0], next_shelf[0] = robots[env], 0
        while depth >= 0:
            if next_shelf[depth] == num_shelves:
                depth -= 1
                if depth >= 0:
                    age_now[chosen[depth]] = chosen_age[depth]
                continue
            shelf = next_shelf[depth]
            next_shelf[depth] += 1
            distance = steps[cell[depth], shelf]
            arrival = clock[depth] + distance
            if age_now[shelf] + arrival > expiry:
                continue
            reward = 1.0
            if by_age:
                oldest_age = age_now[shelf]
                for age in age_now:
                    oldest_age = max(oldest_age, age if age + arrival <= expiry else 0)
                reward = (age_now[shelf] + arrival) / (oldest_age + arrival)
            new_value = value[depth] + reward - STEP_COST * distance
            chosen[depth], chosen_age[depth] = shelf, age_now[shelf]
            if new_value > best:
                best, planned[env] = new_value, chosen[0]
            items_left = PLAN_LENGTH - 1 - depth
            if items_left > 0 and new_value + items_left * (1 - STEP_COST) > best:
                age_now[shelf] = expiry
                depth += 1
                cell[depth], clock[depth], value[depth], next_shelf[depth] = shelf_cells[shelf], arrival, new_value, 0


SCRIPTED_POLICIES: dict[str, Callable[[WarehouseVectorEnv, int], ScriptedPolicy]] = {
    "random": RandomPolicy,
    "nearest": partial(TargetPolicy, nearest),
    "committed": partial(TargetPolicy, committed),
    "oldest": partial(TargetPolicy, oldest),
    "aware": partial(TargetPolicy, aware),
}


def make_scripted_policy(name: str, pool: VectorEnv, seed: int = 0) -> ScriptedPolicy:
    """Return a new scripted policy. Raise UserError if the name is unknown or `pool` is not a warehouse."""
    if name not in SCRIPTED_POLICIES:
        hint = suggest(name, SCRIPTED_POLICIES)
        raise UserError(f"scripted:{name}: unknown scripted policy; available: {', '.join(SCRIPTED_POLICIES)}{hint}")
    if not isinstance(pool, WarehouseVectorEnv):
        raise UserError(f"scripted:{name}: only for the warehouse, not for {', '.join(pool.tasks)}")
    return SCRIPTED_POLICIES[name](pool, seed)


def play_steps(policy: ScriptedPolicy, pool: VectorEnv) -> Iterator[Step]:
    """Reset the environments and play a policy without end. Yield each Step, beginning with the result of `reset`."""
    step = pool.reset()
    while True:
        yield step
        pool.send(policy.act())
        step = pool.recv()


def play_returns(policy: ScriptedPolicy, pool: VectorEnv, episodes: int) -> np.ndarray:
    """Play at least `episodes` episodes with a policy. Return the returns of all played episodes, a float64 vector.

    Each environment plays the same number of episodes.
    """
    per_env = -(-episodes // pool.num_envs)
    returns = np.zeros((pool.num_envs, per_env))
    count = np.zeros(pool.num_envs, np.int64)  # finished episodes of each environment
    steps = play_steps(policy, pool)
    next(steps)
    while (playing := count < per_env).any():
        step = next(steps)
        returns[playing, count[playing]] += step.reward[playing]
        count[playing & step.done] += 1
    return returns.ravel()
