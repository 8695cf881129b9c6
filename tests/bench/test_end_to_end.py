"""End-to-end benchmark: a training run that is paused between measurements."""

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from bestiary.bench.configs import make_bench_config
from bestiary.bench.end_to_end import EndToEndRun, _PausableEnv
from bestiary.envs import make_env
from bestiary.rollout import Step
from bestiary.utils.errors import RunError


@pytest.mark.parametrize("name", ["toy", "warehouse-fnn"])  # IMPALA; PPO, which alternates collecting and learning
def test_run_makes_no_progress_between_measurements(name: str) -> None:
    config = make_bench_config(name, micro_batch_size=8)
    with ExitStack() as stack:
        run = EndToEndRun(config, stack)
        assert run.learner.steps == 0
        counts = []
        for _ in range(3):
            assert run.measure(0.1)["end_to_end"] > 0
            counts.append((run.learner.steps, *(actor.steps for actor in run.actors)))
            time.sleep(0.1)
            assert counts[-1] == (run.learner.steps, *(actor.steps for actor in run.actors))
        assert counts[0] < counts[1] < counts[2]
    assert not run.thread.is_alive()


def test_recv_blocks_while_the_run_is_paused() -> None:
    running = threading.Event()
    received = list[Step]()
    pool = _PausableEnv(make_env("toy/catch", num_envs=2), running)
    pool.reset()
    pool.send(np.zeros(2, np.int64))
    thread = threading.Thread(target=lambda: received.append(pool.recv()), daemon=True)
    thread.start()
    thread.join(timeout=0.2)
    assert not received
    running.set()
    thread.join(timeout=10)
    assert len(received) == 1


def test_finished_run_raises_an_error() -> None:
    with ExitStack() as stack:
        run = EndToEndRun(make_bench_config("toy", micro_batch_size=8, steps=2_000), stack)
        for _ in range(2):
            with pytest.raises(RunError, match="increase its number of steps"):
                run.measure(5.0)


def test_exceptions_of_the_run_are_raised_by_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RunError("the disk is full")

    with ExitStack() as stack:
        run = EndToEndRun(make_bench_config("toy", micro_batch_size=8), stack)
        monkeypatch.setattr(run.session, "run_due_tasks", fail)
        with pytest.raises(RunError, match="the disk is full"):
            run.measure(0.1)
