"""Small training options, a faulty environment, and training with actions in a second thread, for the cluster tests."""

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
from bestiary.runs.run import Run
from bestiary.training.interrupts import Interrupted

SMALL: dict[str, Any] = {
    "num_envs": 8,
    "batch_size": 4,
    "rollout_length": 5,
    "log_every": 40,
    "micro_batch_size": 2,
    "torso.width": 16,
}

FAULTY_ENV = """
import gymnasium, numpy as np, pathlib, time
from gymnasium.spaces import Box, Discrete


class FaultyEnv(gymnasium.Env):
    '''Fails if a file "raise" (once), "always" or "stall" (once) exists. Steps are slow, to keep the CPU load low.'''

    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    reward_scale = 1.0

    def __init__(self, *, folder: str = "nowhere"):
        self.folder, self.steps = pathlib.Path(folder), 0

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        time.sleep(0.002)
        for fault in ("raise", "always", "stall"):
            if (self.folder / fault).exists():
                if fault != "always":
                    (self.folder / fault).unlink(missing_ok=True)
                if fault == "stall":
                    time.sleep(1000)
                raise OSError("simulated fault")
        observation = np.full(2, self.steps % 10 / 10, np.float32)
        return observation, self.reward_scale * float(action), self.steps % 10 == 0, False, {}


class LargeRewardEnv(FaultyEnv):
    reward_scale = 100.0
"""


def write_faulty_env() -> str:
    """Write the plug-in file of the faulty environment and return the name of the environment."""
    Path("faulty_env.py").write_text(FAULTY_ENV)
    return "faulty_env.py:FaultyEnv"


def wait_until(condition: Callable[[], Any], seconds: float = 300) -> None:
    """Block until a condition is true; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.1)


class ActionThread(threading.Thread):
    """Run `act` while the main thread trains, then send SIGINT to stop the training."""

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
    """Train in the folder `r` until `act`, which runs in another thread, has returned; return the run."""
    thread = ActionThread(act)
    threading.Timer(0.5, thread.start).start()
    with pytest.raises(Interrupted):
        bestiary.train(*envs, run_dir="r", **{**SMALL, "steps": "100M", **options})
    thread.join(timeout=10)
    if thread.error is not None:
        raise thread.error
    return bestiary.load("r")


def last_metric(column: str) -> float:
    """Return the last logged value of a metric of the run in the folder `r`; 0 if there is none yet."""
    values = Run(Path("r")).metrics.get(column, np.zeros(0))
    return float(values[-1]) if len(values) else 0.0


def wait_for_steps(count: int) -> None:
    """Block until the run in the folder `r` has logged more than `count` further steps."""
    start = last_metric("step")
    wait_until(lambda: last_metric("step") > start + count)
