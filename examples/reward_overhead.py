"""Measure the time per step that reward components take in River Raid.

    python examples/reward_overhead.py

The time is measured inside the steps. Comparing a run with components and a run without components would not work: on
a noisy machine, even two equal runs differ by more than the time of the components.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bestiary.bench.configs import make_bench_config

STEPS = 1_500
NUM_ENVS = 32


def main() -> None:
    pool: Any = make_bench_config("riverraid-rewards").make_vector_env(NUM_ENVS, 7)
    seconds = {"components": 0.0, "game": 0.0, "recv": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            seconds[name] += time.perf_counter() - start
            return result

        return call

    compute_components = pool.pool._compute_components
    pool.pool._compute_components = timed("components", compute_components)
    pool.pool.recv = timed("game", pool.pool.recv)  # steps the games and computes the components
    recv = timed("recv", pool.recv)  # also computes the rewards
    pool.reset()
    start = time.perf_counter()
    for actions in np.random.default_rng(0).integers(0, pool.action_spec.n, (STEPS, NUM_ENVS)):
        pool.send(actions)
        recv()
    total = time.perf_counter() - start
    pool.close()
    overhead = seconds["recv"] - seconds["game"] + seconds["components"]
    microseconds = 1e6 / (STEPS * NUM_ENVS)
    print(f"{overhead * microseconds:.1f} of {total * microseconds:.0f} microseconds per step ({overhead / total:.1%})")


if __name__ == "__main__":
    main()
