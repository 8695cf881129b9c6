"""Whole trainings, measured in turns.

Machines are faster at one moment than at the next, so what is to be compared is measured in many short turns. A training that
was started anew for each would be measured while it warms up; so it is started once, and stands still between its turns: actors
and learner halt where they are and go on from there, as if nothing had been in between.
"""

import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bestiary.config import Config
from bestiary.envs.pool import Pool
from bestiary.errors import RunError
from bestiary.rollout import Step
from bestiary.runs.folder import Place, create_run
from bestiary.runtime import local
from bestiary.runtime.build import build, first_agent, make_layout, make_learner
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.learner import Gradient, Learner
from bestiary.runtime.session import Session


class Whole:
    """The local runtime as it trains, rows, episodes and all, in a thread of its own, up to its first update once made."""

    def __init__(self, config: Config, stack: ExitStack):
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.run, _ = create_run(config, Place(run_dir=str(Path(folder) / "run")))
        self.config, (self.actors, self.learner) = config, build(config)
        self.going, self.halted = threading.Event(), threading.Event()
        self.going.set()
        self.until, self.counted = 0.0, -1  # when it halts; the steps learnt from at the last update
        self.mark = (0.0, 0)  # when it halted, and the steps learnt from until then
        self.failure: BaseException | None = None
        for actor in self.actors:
            actor.pool = _Halting(actor.pool, self.going)
        self.learner.total = self._between
        self.session = Session(self.run, config, self.learner, self.actors[0].pool, dict)
        self.session.progress.shown = False
        self.thread = threading.Thread(target=self._train, name="training", daemon=True)
        stack.callback(self._end)
        self.thread.start()
        self._await()

    def measure(self, seconds: float) -> dict[str, float]:
        """Let it go on for so long, and to the end of at least one update."""
        if self.failure is not None:
            raise self.failure
        began, (_, before) = time.perf_counter(), self.mark
        self.until = began + seconds
        self.halted.clear()
        self.going.set()
        self._await()
        end, after = self.mark
        metrics = self.run.metrics
        lag = max(metrics["max_lag"][metrics["step"] > before], default=float("nan")) if metrics else float("nan")
        return {"whole": (after - before) / (end - began), "max_lag": float(lag), "memory_mib": _resident_mib()}

    def _await(self) -> None:
        """Until it has halted, and what it had asked emulators for is done as well (or two seconds have passed)."""
        self.halted.wait()
        if self.failure is not None:
            raise self.failure
        for _ in range(100):
            used = time.process_time()
            time.sleep(0.02)
            if time.process_time() - used < 0.002:
                return

    def _train(self) -> None:
        try:
            with self.session:
                local.train(self.actors, self.learner, self.session, make_layout(self.config))
            self.failure = RunError("the training that was measured is over")
        except BaseException as failure:
            self.failure = failure
        finally:
            self.halted.set()

    def _between(self, own: Gradient) -> Gradient:
        """The learner comes by here with the gradient of every update; with the first one of new rollouts, it may halt."""
        new, self.counted = self.learner.steps != self.counted, self.learner.steps
        now = time.perf_counter()
        if new and now >= self.until and not self.session.enough:
            self.mark = (now, self.learner.steps)
            self.going.clear()
            self.halted.set()
            self.going.wait()
        return own

    def _end(self) -> None:
        self.session.enough = True
        while self.thread.is_alive():
            self.going.set()  # more than once: it may be about to halt
            self.thread.join(timeout=0.1)
        for actor in self.actors:
            actor.pool.close()


class _Halting:
    """A pool whose steps are not to be had while all stands still."""

    def __init__(self, pool: Pool, going: threading.Event):
        self.pool, self.going = pool, going

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def recv(self) -> Step:
        self.going.wait()
        return self.pool.recv()


def measure_on_ray(config: Config, seconds: float) -> dict[str, float]:
    """A training on a Ray of its own, started and ended for it."""
    from bestiary.runtime import cluster
    from bestiary.runtime.bundle import Bundle
    from bestiary.runtime.ray import connected
    from bestiary.runtime.restarts import Restarts

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, connected("local") as ray:
        run, _ = create_run(config, Place(run_dir=str(Path(folder) / "run")))
        pool = config.make_pool(1, 0)
        pool.close()
        learner = make_learner(config, pool, first_agent(config, pool), torch.device("cpu"))
        with Session(run, config, learner, pool, dict) as session:
            marks = _mark_updates(session, learner, seconds)
            try:
                cluster.train(ray, Bundle.of(config, pool), learner, session, Restarts(0), 0)
            finally:
                session.enough = True
        if session.interrupts.received is not None:
            raise Interrupted(session.interrupts.received)
    (start, used, before), *_, (end, used_then, after) = _warm(marks, seconds)
    rollouts = (after - before) / (config.make_algorithm().unroll_length * config.training.pool_size)
    return {
        "cluster": (after - before) / (end - start),
        "cluster_start": marks[0][0] - began,
        "driver_ms": 1000 * (used_then - used) / rollouts,
    }


Mark = tuple[float, float, int]  # at the end of an update: the time, CPU seconds of this process, steps learnt from


def _mark_updates(session: Session, learner: Learner, seconds: float) -> list[Mark]:
    """A list that grows with every update (emulators and processes take a while until the first). The session is over after a
    warm-up of a third of the seconds, these seconds, and at least two updates in them: a slow net makes few."""
    marks: list[Mark] = []

    def clock() -> None:
        last = 0
        while not session.done:
            time.sleep(0.002)
            now = time.perf_counter()
            if learner.steps != last:
                last = learner.steps
                marks.append((now, time.process_time() - time.thread_time(), last))  # without this clock
            if marks and now > marks[0][0] + 4 / 3 * seconds and len(_warm(marks, seconds)) > 1:
                session.enough = True

    threading.Thread(target=clock, daemon=True).start()
    return marks


def _warm(marks: list[Mark], seconds: float) -> list[Mark]:
    return [mark for mark in marks if mark[0] > marks[0][0] + seconds / 3]


def _resident_mib() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return float("nan")
