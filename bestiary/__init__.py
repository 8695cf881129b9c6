"""Bestiary: an actor-learner platform for deep reinforcement-learning research.

    run = bestiary.train("atari/Pong", memory="lstm", steps="5M", seed=1)  # same options as `bestiary train`
    run = bestiary.load("runs/latest")
    run.metrics, run.episodes, run.agent()
    bestiary.evaluate(run, episodes=100)
    bestiary.testing.check_env("my_env.py:Maze")                           # checkers for your own components

`bestiary.api` defines these functions. It and `bestiary.testing` are imported at first use, so that `import bestiary`
is fast.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Each thread uses one core: Bestiary runs several operations in parallel threads, so one operation is not split into
# OpenMP threads. This must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

__version__ = "0.2.0"

if TYPE_CHECKING:
    from bestiary import testing as testing
    from bestiary.api import Run, evaluate, load, make_env, resume, train

__all__ = ["Run", "__version__", "evaluate", "load", "make_env", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("bestiary.testing")
    if name not in __all__:
        raise AttributeError(f"module 'bestiary' has no attribute {name!r}")
    from bestiary import api

    return getattr(api, name)
