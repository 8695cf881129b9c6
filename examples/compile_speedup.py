"""Compare the learning throughput of an eager and a compiled torso (torch.compile), with one thread and one per core.

    python examples/compile_speedup.py [shallow|resnet] [wrapper]

The eager and the compiled torso are measured in turn, three times, on micro-batches like those of the learner. With the
argument `wrapper`, the compiled kernels are called from C++. Results on two cores are in docs/performance.md.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor

from bestiary.config.resolve import resolve
from bestiary.training.factory import make_actors_and_learner

torso = sys.argv[1] if len(sys.argv) > 1 else "shallow"
MICRO_BATCH_SIZE = {"shallow": 4, "resnet": 2}[torso]
CORES = os.cpu_count() or 1

config = resolve({"env": "atari/Pong", "torso": torso, "num_envs": 8 * CORES, "runtime": "serial"})
(actor,), learner = make_actors_and_learner(config)
actor.start()
micro_batches = list(actor.collect().split(MICRO_BATCH_SIZE))
actor.pool.close()

gradient = partial(learner.micro_batch_gradient, learner.parameters, learner.algorithm.loss)
agent: Any = learner.agent
eager = agent.torso
inductor.cpp_wrapper = "wrapper" in sys.argv
compiled = torch.compile(eager, dynamic=False)


def measure_rate(num_threads: int, seconds: float = 8.0) -> float:
    """Return the speed at which `num_threads` threads compute gradients of micro-batches, in steps/s."""
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(gradient, micro_batches))  # warm-up
        start = time.perf_counter()
        steps = 0
        while (elapsed := time.perf_counter() - start) < seconds:
            list(threads.map(gradient, micro_batches))
            steps += sum(micro_batch.length * micro_batch.num_envs for micro_batch in micro_batches)
    return steps / elapsed


for _ in range(3):
    for name, agent.torso in (("eager", eager), ("compiled", compiled)):
        one_thread, all_cores = measure_rate(1), measure_rate(CORES)
        print(f"{torso}, {name:<9} 1 thread {one_thread:6.0f}   {CORES} threads {all_cores:6.0f} steps/s", flush=True)
