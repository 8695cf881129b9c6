"""A real Ray of several nodes on one machine, for tests."""

import contextlib
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest


class Nodes:
    """A Ray of one node, to which others are added and from which they are lost."""

    def __init__(self, **head: Any) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # with a short name, for the sockets in it
        (self.folder / "ray").mkdir()
        arguments = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "RAY_TMPDIR", str(self.folder)
            )  # the note of where it is would be for all of the machine elsewhere
            self.cluster = Cluster(initialize_head=True, head_node_args={**arguments, **head}, shutdown_at_exit=False)
        self.address = self.cluster.address
        self.others: list[Any] = []

    def add(self, **arguments: Any) -> None:
        self.others.append(self.cluster.add_node(num_cpus=2, include_dashboard=False, **arguments))

    def processes(self, name: str) -> list[psutil.Process]:
        """Ray's actors of a class, on all of these nodes and on no others that this machine may have."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if process.name().startswith(f"ray::{name}") else []
        return found

    def on_head(self, process: psutil.Process) -> bool:
        return process.ppid() == self.cluster.head_node.all_processes["raylet"][0].process.pid

    def lose(self) -> None:
        """The last one that was added: all of its processes at once."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)
        while sum(node["Alive"] for node in self.cluster.global_state.node_table()) > 1 + len(self.others):
            time.sleep(0.1)  # until Ray has noticed

    def close(self) -> None:
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def own_address() -> str:
    """One of this machine's that is not the loopback interface's."""
    found = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    others = [address for address in found if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no network")
    return others[0]
