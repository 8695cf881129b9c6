"""Executors: start the commands of a study as processes on this machine or on the machines of a Ray cluster.

The `bestiary study` process holds the standard input of each command open. If `bestiary study` closes this input, or
ends for any reason, the command saves its run and ends (`command_process.py`).
"""

import math
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from bestiary.distributed.faults import error_summary
from bestiary.distributed.placement import avoid_nodes
from bestiary.distributed.ray_connection import check_every_node
from bestiary.distributed.shipped_config import package_versions, plugin_refs, version_mismatches
from bestiary.studies.run_log import open_log
from bestiary.studies.trial import Trial
from bestiary.utils import trust
from bestiary.utils.cpu import CORES_VARIABLE
from bestiary.utils.errors import UserError
from bestiary.utils.plugin_names import PluginRef
from bestiary.utils.plugin_sources import PluginSource


class Process(Protocol):
    """A running command of a trial."""

    error: str  # cause of the command's end, if outside the command, for example "the machine was lost"; else ""

    def poll(self) -> int | None:
        """Return the exit status, or None if the command is still running."""

    def stop(self) -> None:
        """Ask the command to save its run and end."""

    def kill(self) -> None: ...

    def wait(self) -> None: ...


class Executor(Protocol):
    """An object that starts commands and limits how many of them run at the same time."""

    def capacity(self) -> int:
        """Return the number of commands that can run at the same time."""

    def start(self, trial: Trial, command: list[str]) -> Process: ...


def start_command(log: Path, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a `bestiary` command whose output is appended to the file `log`.

    The process has its own session, so that it receives no signals from the terminal.
    """
    # -P: do not import modules from the working directory. Its files may come from another person.
    arguments = [sys.executable, "-P", "-m", "bestiary.studies.command_process", *command]
    with open_log(log, command) as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


# --- this machine ---


class LocalExecutor:
    """Executor that runs up to `jobs` commands at the same time as processes of this machine."""

    def __init__(self, jobs: int):
        self.jobs = jobs

    def capacity(self) -> int:
        return self.jobs

    def start(self, trial: Trial, command: list[str]) -> Process:
        return LocalProcess(start_command(trial.log, command))


class LocalProcess:
    """A command that runs in a process of this machine."""

    error = ""

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


# --- Ray cluster ---


class RayExecutor:
    """Executor that runs commands on the machines of a Ray cluster. All machines must share the folder of the study."""

    def __init__(self, ray: Any, folder: Path, cpus_per_run: float, gpus_per_run: float):
        self.ray = ray
        self.folder = folder.resolve()
        self.working_dir = Path.cwd()
        self.cpus_per_run = cpus_per_run
        self.gpus_per_run = gpus_per_run
        self.unsuitable_nodes: set[str] = set()  # ids of nodes on which a command could not be started
        self._check_resources()
        self._check_machines()
        # By default, when a worker process of Ray exits, Ray kills the command that this worker process has started.
        # This variable prevents the kill, so that the command can save its run before it ends.
        runtime_env = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}
        remote = ray.remote(num_cpus=cpus_per_run, num_gpus=gpus_per_run, max_concurrency=2, runtime_env=runtime_env)
        self.job_class = remote(RemoteJob)

    def _check_resources(self) -> None:
        """Raise UserError if one run needs more CPUs or GPUs than the largest machine of the cluster has."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        wanted = (("CPU", "--cpus-per-run", self.cpus_per_run), ("GPU", "--gpus-per-run", self.gpus_per_run))
        for name, flag, count in wanted:
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if count > largest:
                raise UserError(f"{flag} {count:g}: the largest machine of the cluster has {largest:g} {name}s")

    def _check_machines(self) -> None:
        """Raise UserError if a machine cannot run commands of the study (see `check_machine`)."""
        marker = self.folder / f".seen-{secrets.token_hex(8)}"
        marker.touch()
        try:
            problems = check_every_node(self.ray, check_machine, str(marker), str(self.working_dir), package_versions())
        finally:
            marker.unlink()
        if problems:
            raise UserError(*problems)

    def capacity(self) -> int:
        """Return the number of runs that can be trained at the same time on the current machines of the cluster.

        The result is at least 1, even if no machine is large enough now. Ray then makes the run wait until a machine is
        free or joins the cluster.
        """
        wanted = [(name, n) for name, n in (("CPU", self.cpus_per_run), ("GPU", self.gpus_per_run)) if n]
        nodes = [n["Resources"] for n in self.ray.nodes() if n["Alive"] and n["NodeID"] not in self.unsuitable_nodes]
        return max(1, sum(math.floor(min(node.get(name, 0) / n for name, n in wanted)) for node in nodes))

    def start(self, trial: Trial, command: list[str]) -> Process:
        placement = avoid_nodes(self.unsuitable_nodes)
        job = self.job_class.options(scheduling_strategy=placement).remote(
            self.folder / "study.toml",
            self.working_dir,
            package_versions(),
            self.cpus_per_run,
            [(ref, source) for ref in plugin_refs(trial.config) if (source := trust.registered(ref.path)) is not None],
        )
        return RemoteProcess(self.ray, job, trial.log.resolve(), command, self.unsuitable_nodes)


def check_machine(marker: str, working_dir: str, versions: dict[str, str]) -> list[str]:
    """Return the reasons why this machine cannot run commands of the study, or [] if it can.

    `marker` is the path of a file in the folder of the study. If this machine has no file with this path, it does not
    share the folder. `versions` are the package versions of the machine that started the study.
    """
    name, folder = socket.gethostname(), Path(marker).parent
    problems = version_mismatches(versions)
    if not Path(marker).exists() or not os.access(folder, os.W_OK):
        problems.append(f"{name} cannot read or write {folder}; choose a folder on shared storage with --dir")
    if not Path(working_dir).is_dir():
        problems.append(f"{name} has no folder {working_dir}; start the study from a folder on shared storage")
    return problems


class UnsuitableMachine(Exception):
    """Raised by a RemoteJob if its machine cannot run the command.

    All machines are checked when the study starts, so this concerns machines that joined the cluster later.
    """

    def __init__(self, node: str, reason: str):
        super().__init__(node, reason)
        self.node = node
        self.reason = reason


class RemoteJob:
    """Ray actor that runs one command. `stop` may be called while `run` is waiting for the command."""

    process: "subprocess.Popen[bytes] | None" = None
    stopped = False

    def __init__(
        self,
        marker: Path,
        working_dir: Path,
        versions: dict[str, str],
        cpus: float,
        plugins: list[tuple[PluginRef, PluginSource]],
    ):
        self.marker = marker
        self.working_dir = working_dir
        self.versions = versions
        self.cpus = cpus
        self.plugins = plugins  # the run's plug-ins with their contents, which the user trusts

    def run(self, log: Path, command: list[str]) -> int:
        """Run the command and return its exit status. Raise UnsuitableMachine if this machine cannot run it."""
        import ray

        if self.stopped:
            return -15
        if problems := check_machine(str(self.marker), str(self.working_dir), self.versions):
            raise UnsuitableMachine(ray.get_runtime_context().get_node_id(), problems[0])
        for ref, source in self.plugins:
            trust.trust_content(ref.path, source, ref.attribute)
        environment = {**os.environ, CORES_VARIABLE: str(max(1, math.floor(self.cpus)))}
        self.process = start_command(log, command, cwd=self.working_dir, env=environment)
        return self.process.wait()

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


class RemoteProcess:
    """A command that a RemoteJob runs on another machine.

    The `bestiary study` process controls the command with this object.

    If the machine cannot run the command, the id of its node is added to `unsuitable_nodes`, a set that all objects of
    this class share.
    """

    def __init__(self, ray: Any, job: Any, log: Path, command: list[str], unsuitable_nodes: set[str]):
        self.ray = ray
        self.job = job
        self.unsuitable_nodes = unsuitable_nodes
        self.error = ""
        self.status: int | None = None
        self.reference = job.run.remote(log, command)

    def poll(self) -> int | None:
        if self.status is None and self.ray.wait([self.reference], timeout=0)[0]:
            try:
                self.status = self.ray.get(self.reference)
            except self.ray.exceptions.RayTaskError as error:
                self.status = 1
                self.error = error_summary(error.cause)
                if isinstance(error.cause, UnsuitableMachine):
                    self.error = error.cause.reason
                    self.unsuitable_nodes.add(error.cause.node)
            except self.ray.exceptions.RayError:
                self.status = 1
                self.error = "the machine was lost"
            self.ray.kill(self.job)
        return self.status

    def stop(self) -> None:
        if self.status is None:
            self.job.stop.remote()

    def kill(self) -> None:
        self.ray.kill(self.job)

    def wait(self) -> None:
        self.ray.wait([self.reference])
