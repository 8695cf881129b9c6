"""End-to-end benchmark: the throughput of complete training runs.

The speed of a machine varies over time. Therefore the configurations are measured in turn, and each of them is measured
several times for a short time. A new run is slow at first, so each run is started only once and is paused between its
measurements.
"""

import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from bestiary.config.config import Config
from bestiary.envs.vector_env import VectorEnv, VectorEnvWrapper
from bestiary.rollout import Step
from bestiary.runs.loggers import Loggers
from bestiary.runs.run import RunLocation, create_run
from bestiary.training import local
from bestiary.training.callbacks.base import Callback
from bestiary.training.callbacks.metrics import MetricsWriter
from bestiary.training.callbacks.progress import ProgressDisplay
from bestiary.training.callbacks.reward_monitor import RewardMonitor
from bestiary.training.factory import make_actors_and_learner, make_initial_agent, make_learner, make_thread_layout
from bestiary.training.interrupts import Interrupted
from bestiary.training.learner import Gradient, Learner
from bestiary.training.session import Session
from bestiary.utils.errors import RunError


class EndToEndRun:
    """A training run in its own thread. It uses the local runtime and writes all CSV tables.

    The constructor starts the run and pauses it at the first update. Each call of `measure` continues the run for some
    time. When the ExitStack `stack` is closed, the run stops and its folder is deleted.
    """

    def __init__(self, config: Config, stack: ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.config = config
        self.run, _ = create_run(config, RunLocation(run_dir=str(Path(folder) / "run")))
        self.actors, self.learner = make_actors_and_learner(config)
        self.running = threading.Event()  # cleared while the run is paused
        self.running.set()
        self.paused = threading.Event()  # set while the run is paused or after it has ended
        self.pause_time = 0.0  # after this time, the run pauses at the next update that uses new rollouts
        self.last_update_steps = -1  # step count of the learner at the last update
        self.last_pause = (0.0, 0)  # time of the last pause, and step count of the learner at this time
        self.failure: BaseException | None = None
        for actor in self.actors:
            actor.pool = _PausableEnv(actor.pool, self.running)
        self.learner.all_reduce_gradient = self._pause_if_due
        self.session = Session(self.run, config, self.learner, dict, _make_logging_callbacks())
        self.thread = threading.Thread(target=self._train, name="training", daemon=True)
        stack.callback(self._stop)
        self.thread.start()
        self._wait_until_paused()

    def measure(self, seconds: float) -> dict[str, float]:
        """Continue training for the given time and at least one update.

        Return the training speed (steps/s), the maximum policy lag and the memory use (MiB). The lag is read from the
        new rows of the metrics table; it is NaN if there is no new row.
        """
        if self.failure is not None:
            raise self.failure
        start = time.perf_counter()
        _, steps_before = self.last_pause
        self.pause_time = start + seconds
        self.paused.clear()
        self.running.set()
        self._wait_until_paused()
        end, steps_after = self.last_pause
        metrics = self.run.metrics
        max_policy_lag = float("nan")
        if metrics:
            new_rows = metrics["step"] > steps_before
            max_policy_lag = float(max(metrics["max_policy_lag"][new_rows], default=max_policy_lag))
        return {
            "end_to_end": (steps_after - steps_before) / (end - start),
            "max_policy_lag": max_policy_lag,
            "memory_mib": _resident_mib(),
        }

    def _wait_until_paused(self) -> None:
        """Wait until the run is paused. Then wait, for at most 2 s, until the environments have finished their steps.

        The steps are finished when the process uses almost no CPU time.
        """
        self.paused.wait()
        if self.failure is not None:
            raise self.failure
        for _ in range(100):
            cpu_time = time.process_time()
            time.sleep(0.02)
            if time.process_time() - cpu_time < 0.002:
                return

    def _train(self) -> None:
        try:
            with self.session:
                local.train(self.actors, self.learner, self.session, make_thread_layout(self.config))
            self.failure = RunError("the measured training run has ended; increase its number of steps")
        except BaseException as failure:
            self.failure = failure
        finally:
            self.paused.set()

    def _pause_if_due(self, gradient: Gradient) -> Gradient:
        """After `pause_time`, pause the run at the next update that uses new rollouts. Return the gradient unchanged.

        The constructor replaces `learner.all_reduce_gradient` by this method, so the learner calls it in every update.
        """
        has_new_rollouts = self.learner.steps != self.last_update_steps
        self.last_update_steps = self.learner.steps
        now = time.perf_counter()
        if has_new_rollouts and now >= self.pause_time and not self.session.stop_requested:
            self.last_pause = (now, self.learner.steps)
            self.running.clear()
            self.paused.set()
            self.running.wait()
        return gradient

    def _stop(self) -> None:
        self.session.stop_requested = True
        while self.thread.is_alive():
            self.running.set()  # set repeatedly, because the run may pause once more
            self.thread.join(timeout=0.1)
        for actor in self.actors:
            actor.pool.close()


def _make_logging_callbacks() -> list[Callback]:
    """Return the callbacks that write the CSV tables. A benchmark uses no other callbacks, such as validation."""
    reward_monitor = RewardMonitor()
    return [reward_monitor, MetricsWriter(reward_monitor, Loggers())]


class _PausableEnv(VectorEnvWrapper):
    """Wrapper of a vector environment. Its method `recv` waits while the run is paused."""

    def __init__(self, pool: VectorEnv, running: threading.Event):
        super().__init__(pool)
        self.running = running

    def recv(self) -> Step:
        self.running.wait()
        return self.pool.recv()


class UpdateSample(NamedTuple):
    """Time and step count of a training run after an update."""

    time: float
    cpu_seconds: float  # CPU time of this process, without the thread that takes these samples
    steps: int  # step count of the learner


def measure_on_local_cluster(config: Config, seconds: float) -> dict[str, float]:
    """Start a local Ray cluster, measure a training run on it, and stop the cluster.

    Return the end-to-end rate, the time until the first update, and the CPU time of the driver per rollout.
    """
    from bestiary.distributed.driver import Driver
    from bestiary.distributed.faults import RestartCounter
    from bestiary.distributed.ray_connection import connect_to_ray
    from bestiary.distributed.shipped_config import ShippedConfig

    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, connect_to_ray("local") as ray:
        run, _ = create_run(config, RunLocation(run_dir=str(Path(folder) / "run")))
        learner = make_learner(config, make_initial_agent(config), torch.device("cpu"))
        with Session(run, config, learner, dict, [*_make_logging_callbacks(), ProgressDisplay()]) as session:
            samples = _sample_updates(session, learner, seconds)
            try:
                Driver(ray, ShippedConfig.from_config(config), learner, session, RestartCounter(0), 0).run()
            finally:
                session.stop_requested = True
        if session.interrupts.received is not None:
            raise Interrupted(session.interrupts.received)
    first, *_, last = _after_warm_up(samples, seconds)
    steps = last.steps - first.steps
    rollouts = steps / (config.make_algorithm().sequence_length * config.training.pool_size)
    return {
        "cluster": steps / (last.time - first.time),
        "cluster_startup_seconds": samples[0].time - start_time,
        "driver_ms_per_rollout": 1000 * (last.cpu_seconds - first.cpu_seconds) / rollouts,
    }


def _sample_updates(session: Session, learner: Learner, seconds: float) -> list[UpdateSample]:
    """Start a thread that appends a sample to a list after each update. Return this list.

    A warm-up of `seconds` / 3 starts at the first update, so the time to start all processes is not measured. The
    measurement follows. It takes `seconds`, or longer if it does not yet contain two updates. Then the thread stops the
    session.
    """
    samples: list[UpdateSample] = []

    def sample() -> None:
        last_steps = 0
        while not session.done:
            time.sleep(0.002)
            now = time.perf_counter()
            if learner.steps != last_steps:
                last_steps = learner.steps
                samples.append(UpdateSample(now, time.process_time() - time.thread_time(), last_steps))
            if samples and now > samples[0].time + 4 / 3 * seconds and len(_after_warm_up(samples, seconds)) > 1:
                session.stop_requested = True

    threading.Thread(target=sample, daemon=True).start()
    return samples


def _after_warm_up(samples: list[UpdateSample], seconds: float) -> list[UpdateSample]:
    """Return the samples without the warm-up, which is the first `seconds` / 3 after the first sample."""
    return [sample for sample in samples if sample.time > samples[0].time + seconds / 3]


def _resident_mib() -> float:
    """Return the resident memory of this process in MiB, or NaN if the system does not provide it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return float("nan")
