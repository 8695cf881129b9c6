"""What tests of the cluster train, and how they do things to it meanwhile."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.runs.folder import Run
from bestiary.runtime.interrupts import Interrupted

SMALL: dict[str, Any] = {
    "num_envs": 8,
    "batch_size": 4,
    "unroll_length": 5,
    "log_every": 40,
    "group_size": 2,
    "torso.width": 16,
}


WORLD = """
import gymnasium, numpy as np, pathlib, time
from gymnasium.spaces import Box, Discrete


class World(gymnasium.Env):
    '''Takes its time, so that tests that wait leave the cores to others.'''

    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    scale = 1.0

    def __init__(self, *, folder: str = "nowhere"):
        self.folder, self.clock = pathlib.Path(folder), 0

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.clock += 1
        time.sleep(0.002)
        for trouble in ("raise", "always", "stall"):
            if (self.folder / trouble).exists():
                if trouble != "always":
                    (self.folder / trouble).unlink(missing_ok=True)
                if trouble == "stall":
                    time.sleep(1000)
                raise OSError("the world is gone")
        observation = np.full(2, self.clock % 10 / 10, np.float32)
        return observation, self.scale * float(action), self.clock % 10 == 0, False, {}


class Large(World):
    scale = 100.0
"""


def world() -> str:
    Path("world.py").write_text(WORLD)
    return "world.py:World"


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


class Meanwhile(threading.Thread):
    """Does things while a training goes on in the main thread, and ends it with Ctrl-C."""

    def __init__(self, act: Callable[[], None]):
        super().__init__(daemon=True)
        self.act = act
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.act()
        except BaseException as error:
            self.error = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def train_while(act: Callable[[], None], *envs: str, **options: Any) -> Run:
    """Train for ever, until `act` has returned."""
    thread = Meanwhile(act)
    threading.Timer(0.5, thread.start).start()
    with pytest.raises(Interrupted):
        bestiary.train(*envs, run_dir="r", **{**SMALL, "steps": "100M", **options})
    thread.join(timeout=10)
    if thread.error is not None:
        raise thread.error
    return bestiary.load("r")


def newest(column: str) -> float:
    """Of the run that is being trained."""
    values = Run(Path("r")).metrics.get(column, np.zeros(0))
    return float(values[-1]) if len(values) else 0.0
