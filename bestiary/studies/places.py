"""Where the runs of a study are made: in processes of this machine, or in Ray's, wherever the cluster has room.

Each command of a run is one process either way, whose standard input we hold: when that is closed, by us or because we are
gone, the command saves its run and ends (`worker.py`).
"""

import math
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from bestiary.cores import VARIABLE
from bestiary.errors import UserError
from bestiary.runtime.answers import first_line
from bestiary.runtime.bundle import unlike, versions
from bestiary.runtime.ray import on_every_machine
from bestiary.runtime.room import elsewhere
from bestiary.studies.attempts import open_log
from bestiary.studies.trial import Trial


class Process(Protocol):
    """A command at work."""

    lost: str  # why it ended, where that was not by itself

    def poll(self) -> int | None:
        """Its exit status, once it has one."""

    def stop(self) -> None:
        """Let it save and end."""

    def kill(self) -> None: ...

    def wait(self) -> None: ...


class Place(Protocol):
    def room(self) -> int:
        """For how many runs at a time."""

    def start(self, trial: Trial, command: list[str]) -> Process: ...


def begin(log: Path, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """A command in a process whose signals come from us alone, not from the terminal."""
    words = [sys.executable, "-m", "bestiary.studies.worker", *command]
    with open_log(log, command) as output:
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, **options
        )


# --- here ---


class Here:
    def __init__(self, jobs: int):
        self.jobs = jobs

    def room(self) -> int:
        return self.jobs

    def start(self, trial: Trial, command: list[str]) -> Process:
        return LocalProcess(begin(trial.log, command))


class LocalProcess:
    lost = ""

    def __init__(self, process: "subprocess.Popen[bytes]"):
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> None:
        self.process.wait()


# --- on a cluster ---


class OnCluster:
    """Ray decides which machine makes which run. They all write into the study's folder, so they all must see it."""

    def __init__(self, ray: Any, folder: Path, cpus: float, gpus: float):
        self.ray, self.cpus, self.gpus = ray, cpus, gpus
        self.folder, self.here = folder.resolve(), Path.cwd()
        self.unfit: set[str] = set()  # nodes that cannot make runs
        self.mark = self.folder / f".seen-{secrets.token_hex(8)}"
        self._check_room()
        self.mark.touch()
        try:
            self._check_machines()
        finally:
            self.mark.unlink()
        lenient = {
            "env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}
        }  # they shall save and end by themselves
        self.errand = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=2, runtime_env=lenient)(Errand)

    def _check_room(self) -> None:
        """One run must fit on some machine."""
        for name, flag, wanted in (("CPU", "--cpus-per-run", self.cpus), ("GPU", "--gpus-per-run", self.gpus)):
            most = max((node["Resources"].get(name, 0) for node in self.ray.nodes() if node["Alive"]), default=0)
            if wanted > most:
                raise UserError(f"{flag} {wanted:g}: no machine of the cluster has so many; the largest has {most:g}")

    def _check_machines(self) -> None:
        problems = on_every_machine(self.ray, look_around, str(self.mark), str(self.here), versions())
        if problems:
            raise UserError(*problems)

    def room(self) -> int:
        """Machines that join meanwhile count, too."""
        wanted = [(name, n) for name, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n]
        nodes = [n["Resources"] for n in self.ray.nodes() if n["Alive"] and n["NodeID"] not in self.unfit]
        return max(1, sum(math.floor(min(node.get(name, 0) / n for name, n in wanted)) for node in nodes))

    def start(self, trial: Trial, command: list[str]) -> Process:
        errand = self.errand.options(scheduling_strategy=elsewhere(self.unfit)).remote(
            self.folder / "study.toml", self.here, versions(), self.cpus
        )
        return RemoteProcess(self.ray, errand, trial.log.resolve(), command, self.unfit)


def look_around(mark: str, here: str, wanted: dict[str, str]) -> list[str]:
    """What is wrong with this machine, seen from the one that the study is started on."""
    name, problems = socket.gethostname(), unlike(wanted)
    if not Path(mark).exists() or not os.access(Path(mark).parent, os.W_OK):
        problems.append(
            f"{name} does not see, or may not write, {Path(mark).parent}: put the study on shared storage (--dir)"
        )
    if not Path(here).is_dir():
        problems.append(f"{name} has no folder {here}, where the study is started: start it on shared storage")
    return problems


class Unfit(Exception):
    """A machine, which joined after all were looked at, cannot make a run."""

    def __init__(self, node: str, why: str):
        super().__init__(node, why)
        self.node, self.why = node, why


class Errand:
    """In a Ray actor: one command, and how to stop it."""

    process: "subprocess.Popen[bytes] | None" = None
    stopped = False

    def __init__(self, mark: Path, here: Path, wanted: dict[str, str], cpus: float):
        self.mark, self.here, self.wanted, self.cpus = mark, here, wanted, cpus

    def perform(self, log: Path, command: list[str]) -> int:
        import ray

        if self.stopped:
            return -15
        if problems := look_around(str(self.mark), str(self.here), self.wanted):
            raise Unfit(ray.get_runtime_context().get_node_id(), problems[0])
        environment = {**os.environ, VARIABLE: str(max(1, math.floor(self.cpus)))}
        self.process = begin(log, command, cwd=self.here, env=environment)
        return self.process.wait()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


class RemoteProcess:
    def __init__(self, ray: Any, errand: Any, log: Path, command: list[str], unfit: set[str]):
        """`unfit`: where it could not begin is added to these."""
        self.ray, self.errand, self.unfit, self.lost = ray, errand, unfit, ""
        self.status: int | None = None
        self.reference = errand.perform.remote(log, command)

    def poll(self) -> int | None:
        if self.status is None and self.ray.wait([self.reference], timeout=0)[0]:
            try:
                self.status = self.ray.get(self.reference)
            except self.ray.exceptions.RayTaskError as error:
                self.status, self.lost = 1, first_line(error.cause)
                if isinstance(error.cause, Unfit):
                    self.lost = error.cause.why
                    self.unfit.add(error.cause.node)
            except self.ray.exceptions.RayError:
                self.status, self.lost = 1, "its machine is gone"
            self.ray.kill(self.errand)
        return self.status

    def stop(self) -> None:
        if self.status is None:
            self.errand.stop.remote()

    def kill(self) -> None:
        self.ray.kill(self.errand)

    def wait(self) -> None:
        self.ray.wait([self.reference])
