"""What reward components cost in River Raid: the time that measuring and weighing them takes, within the steps themselves.

    python examples/reward_cost.py

Two configurations measured one after the other differ by more than this on a noisy machine, even where they are the same.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bestiary.bench import configured

STEPS, ENVS = 1_500, 32


def main() -> None:
    pool: Any = configured("riverraid-rewards").make_pool(ENVS, 7)
    spent = {"measuring": 0.0, "game": 0.0, "all": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            spent[name] += time.perf_counter() - start
            return result

        return call

    pool.inner._measure = timed("measuring", pool.inner._measure)
    pool.inner.recv = timed("game", pool.inner.recv)
    recv = timed("all", pool.recv)
    pool.reset()
    start = time.perf_counter()
    for actions in np.random.default_rng(0).integers(0, pool.action_spec.n, (STEPS, ENVS)):
        pool.send(actions)
        recv()
    total = time.perf_counter() - start
    pool.close()
    own = spent["all"] - spent["game"] + spent["measuring"]
    decisions = STEPS * ENVS
    print(f"{own / decisions * 1e6:.1f} of {total / decisions * 1e6:.0f} microseconds of a decision: {own / total:.1%}")


if __name__ == "__main__":
    main()
