"""Measure the speed of the three phases of training: environment stepping, inference and learning.

Each phase is measured alone, on all cores, with the same code that training uses. `make_env_phase`,
`make_inference_phase` and `make_learning_phase` build a phase, and `measure_rate` measures it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bestiary.config.config import Config
from bestiary.envs.vector_env import VectorEnv
from bestiary.training.actor import Actor
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils.cpu import num_cores

CORES = num_cores()
BATCH_SIZES = (8, 16, 32, 64, 128)  # sizes that are tried for a vector environment and for an inference batch
STEPS_PER_CALL = 10  # number of steps of each environment in one call of `Phase.run`


@dataclass(frozen=True)
class Phase:
    """A phase of training (stepping, inference or learning) with one layout: a batch size and a number of threads."""

    layout: str  # text of the layout; for example "2 x 32 environments": each of 2 threads steps 32 environments
    run: Callable[[], int]  # function that performs some steps of the phase and returns the number of steps


PhaseFactory = Callable[[ExitStack], Phase]


def make_env_phase(config: Config, num_envs: int, num_pools: int, stack: ExitStack) -> Phase:
    """Return a Phase that only steps vector environments, with random actions.

    Args:
        config: configuration of the training run.
        num_envs: number of environments in each vector environment.
        num_pools: number of vector environments. Each is stepped by its own thread and may use more threads internally.
        stack: exit stack that closes the environments and ends the threads.
    """
    pools = [config.make_vector_env(num_envs, seed) for seed in range(num_pools)]
    rng = np.random.default_rng(0)
    for pool in pools:
        stack.callback(pool.close)
        pool.reset()
    all_actions = rng.integers(0, pools[0].action_spec.n, (STEPS_PER_CALL, num_envs))
    threads = stack.enter_context(ThreadPoolExecutor(num_pools))

    def step(pool: VectorEnv) -> int:
        for actions in all_actions:
            pool.send(actions)
            pool.recv()
        return all_actions.size

    return Phase(f"{num_pools} x {num_envs} environments", lambda: sum(threads.map(step, pools)))


class _FrozenEnv:
    """Vector environment that never steps (`send` does nothing), so that an actor spends its time only on inference."""

    def __init__(self, pool: Any):
        self.num_envs = pool.num_envs
        self.observation_spec = pool.observation_spec
        self.action_spec = pool.action_spec
        self.measures_spec = pool.measures_spec
        self.tasks = pool.tasks
        self.step = pool.reset()

    def reset(self) -> Any:
        return self.step

    def send(self, actions: np.ndarray) -> None:
        pass


def make_inference_phase(config: Config, batch_size: int, stack: ExitStack) -> Phase:
    """Return a Phase that only performs inference: one actor thread per core, with environments that do not step."""
    pool = config.make_vector_env(batch_size, 0)
    frozen_env = _FrozenEnv(pool)
    pool.close()
    agent = config.make_agent(pool)
    actors = [Actor(agent, frozen_env, 20, seed=i) for i in range(CORES)]  # type: ignore[arg-type]
    for actor in actors:
        actor.start()
    threads = stack.enter_context(ThreadPoolExecutor(CORES, initializer=lambda: torch.set_num_threads(1)))

    def infer(actor: Actor) -> int:
        for t in range(STEPS_PER_CALL):
            actor.t = t
            actor.act()
        return STEPS_PER_CALL * batch_size

    return Phase(f"batch size {batch_size}", lambda: sum(threads.map(infer, actors)))


def make_learning_phase(config: Config, micro_batch_size: int, stack: ExitStack) -> Phase:
    """Return a Phase that only learns: a learner with one thread per core learns repeatedly from the same rollouts."""
    actors, learner = make_actors_and_learner(config)
    actor = actors[0]
    actor.start()
    num_rollouts = learner.algorithm.rollouts_per_learn(actor.pool.num_envs, len(actors))
    rollouts = [actor.collect() for _ in range(num_rollouts)]
    for actor in actors:
        actor.pool.close()
    learner.micro_batch_size = micro_batch_size
    threads = stack.enter_context(ThreadPoolExecutor(CORES, initializer=lambda: torch.set_num_threads(1)))
    learner.parallel_map = threads.map

    def learn() -> int:
        learner.learn(rollouts)
        return sum(rollout.num_steps for rollout in rollouts)

    return Phase(f"micro-batch size {micro_batch_size}", learn)


def micro_batch_sizes(config: Config) -> list[int]:
    """Return the micro-batch sizes to try: all powers of two up to the batch size divided by the number of cores.

    With these sizes, each core gets at least one micro-batch. If a batch has fewer trajectories than there are cores,
    return [1].
    """
    training = config.training
    batch_size = config.make_algorithm().batch_size(training.pool_size, training.total_pools)
    return [2**k for k in range((batch_size // CORES).bit_length())] or [1]


def select_fastest(candidates: Sequence[PhaseFactory], seconds: float) -> PhaseFactory:
    """Build each candidate, measure it for `seconds` / 3 and close it. Return the fastest candidate."""

    def rate(make_phase: PhaseFactory) -> float:
        with ExitStack() as stack:
            return measure_rate(make_phase(stack), seconds / 3)

    return max(candidates, key=rate)


def measure_rate(phase: Phase, seconds: float) -> float:
    """Run a phase once as a warm-up, and then repeatedly for the given time. Return its speed in steps/s."""
    phase.run()
    start = time.perf_counter()
    steps = 0
    while (elapsed := time.perf_counter() - start) < seconds:
        steps += phase.run()
    return steps / elapsed
