"""Bestiary: a fast actor-learner platform for deep reinforcement-learning research.

run = bestiary.train("atari/Pong", memory="lstm", steps="5M", seed=1)    # the same options as the command line
run = bestiary.load("runs/latest")
run.episodes, run.metrics, run.agent(), run.evaluate(episodes=100)
"""

import os
from typing import TYPE_CHECKING, Any

# Before torch is imported: every thread of ours runs its own operations alone; parallelism is between threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bestiary.envs import make
    from bestiary.runs.folder import Run

__all__ = ["Run", "__version__", "load", "make", "train"]


def train(
    *envs: str, name: str | None = None, run_dir: str | None = None, if_exists: str = "error", **options: Any
) -> "Run":
    """Train a new run and return it. Options are the command line's: `sticky=0.25`, `memory={"name": "lstm", "hidden": 512}`,
    `preset="hello"`, `config="runs/a/config.toml"`; dotted ones may also be written `**{"memory.hidden": 512}`."""
    from bestiary.errors import UserError
    from bestiary.resolve import layers, resolve
    from bestiary.runs.folder import Place
    from bestiary.runtime.train import start

    given, origin = layers({**({"env": list(envs)} if envs else {}), **options})
    if if_exists not in ("error", "resume", "new"):
        raise UserError(f"if_exists={if_exists!r}: expected error, resume or new")
    return start(resolve(given, origin), Place(name, run_dir, if_exists))


def load(path: str, trust_code: bool = False) -> "Run":
    """Open a run folder."""
    from bestiary.runs.folder import open_run

    return open_run(path, trust_code)


def __getattr__(name: str) -> Any:
    if name == "make":
        from bestiary.envs import make

        return make
    if name == "Run":
        from bestiary.runs.folder import Run

        return Run
    raise AttributeError(f"module 'bestiary' has no attribute {name!r}")
