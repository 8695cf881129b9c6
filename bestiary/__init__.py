"""Bestiary: an actor-learner platform for deep reinforcement-learning research.

    run = bestiary.train("atari/Pong", memory="lstm", steps="5M", seed=1)  # same options as `bestiary train`
    run = bestiary.load("runs/latest")
    run.metrics, run.episodes, run.agent()
    bestiary.evaluate(run, episodes=100)
    run.policy(greedy=True).act(observation)                               # act in your own loop
    bestiary.make_vec("warehouse", num_envs=8) # a Gymnasium vector environment
    bestiary.testing.check_env("my_env.py:Maze") # checkers for your own components

The module `bestiary.api` defines these functions. The modules `bestiary.api` and `bestiary.testing` are imported at
first use, so that `import bestiary` is fast.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from bestiary.utils.local_config import ignore_numba_file

# Bestiary runs PyTorch operations in its own threads, one thread per core. If each operation also started OpenMP
# threads, there would be more threads than cores. OMP_NUM_THREADS must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Call this function before Numba is imported. All processes of Bestiary (commands, trials, workers of a cluster) import
# this module first.
ignore_numba_file()

__version__ = "0.2.0"

if TYPE_CHECKING:
    from bestiary import testing as testing
    from bestiary.api import (
        Evaluation,
        Policy,
        Run,
        RunError,
        Table,
        UserError,
        evaluate,
        load,
        make_env,
        make_vec,
        resume,
        to_sb3,
        train,
    )

__all__ = [
    "Evaluation",
    "Policy",
    "Run",
    "RunError",
    "Table",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "make_env",
    "make_vec",
    "resume",
    "testing",
    "to_sb3",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("bestiary.testing")
    if name not in __all__:
        raise AttributeError(f"module 'bestiary' has no attribute {name!r}")
    from bestiary import api

    return getattr(api, name)
