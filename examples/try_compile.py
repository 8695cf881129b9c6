"""Would torch.compile make learning faster here? Decisions learnt a second, eager and compiled, with one worker and one a core.

python examples/try_compile.py [shallow|resnet] [wrapper]

Each way is measured in turn, three times, on groups of trajectories such as a training's gradient workers get. `wrapper` calls
the compiled kernels from C++. What it came to on two cores is in docs/performance.md.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch._inductor.config as inductor

from bestiary.resolve import resolve
from bestiary.runtime.build import build

torso = sys.argv[1] if len(sys.argv) > 1 else "shallow"
GROUP = {"shallow": 4, "resnet": 2}[torso]
CORES = os.cpu_count() or 1

(actor,), learner = build(resolve({"env": "atari/Pong", "torso": torso, "num_envs": 8 * CORES, "runtime": "serial"}))
actor.start()
groups = list(actor.collect().groups(GROUP))
actor.pool.close()

agent: Any = learner.agent
eager = agent.torso
inductor.cpp_wrapper = "wrapper" in sys.argv
compiled = torch.compile(eager, dynamic=False)


def decisions_a_second(workers: int, seconds: float = 8.0) -> float:
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(learner.gradient, groups))  # warm
        start, done = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds:
            list(threads.map(learner.gradient, groups))
            done += sum(group.length * group.num_envs for group in groups)
    return done / elapsed


for _ in range(3):
    for name, agent.torso in (("eager", eager), ("compiled", compiled)):
        one, all_cores = decisions_a_second(1), decisions_a_second(CORES)
        print(f"{torso}, {name:<9} 1 worker {one:6.0f}   {CORES} workers {all_cores:6.0f}", flush=True)
