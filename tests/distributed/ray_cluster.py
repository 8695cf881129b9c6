"""A real Ray cluster of several nodes on one machine, for tests."""

import contextlib
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest


class RayCluster:
    """A Ray cluster that starts with one node. Tests add nodes to it and remove them."""

    def __init__(self, **head_options: Any) -> None:
        from ray.cluster_utils import Cluster

        self.folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # short, because the paths of sockets are limited
        (self.folder / "ray").mkdir()
        options = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False, **head_options}
        with pytest.MonkeyPatch.context() as patch:
            # Ray stores the address of the cluster here. In the default folder, other processes would find it.
            patch.setenv("RAY_TMPDIR", str(self.folder))
            self.cluster = Cluster(initialize_head=True, head_node_args=options, shutdown_at_exit=False)
        self.address = self.cluster.address
        self.added_nodes: list[Any] = []

    def add_node(self, **options: Any) -> None:
        self.added_nodes.append(self.cluster.add_node(num_cpus=2, include_dashboard=False, **options))

    def kill_node(self) -> None:
        """Kill all processes of the node that was added last, and wait until Ray has noticed."""
        self.cluster.remove_node(self.added_nodes.pop(), allow_graceful=False)
        while sum(node["Alive"] for node in self.cluster.global_state.node_table()) > 1 + len(self.added_nodes):
            time.sleep(0.1)

    def processes(self, class_name: str) -> list[psutil.Process]:
        """Return the processes of a Ray actor class on all nodes of this cluster."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(f"ray::{class_name}"):
                    found.append(process)
        return found

    def is_on_head_node(self, process: psutil.Process) -> bool:
        return process.ppid() == self.cluster.head_node.all_processes["raylet"][0].process.pid

    def close(self) -> None:
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def external_address() -> str:
    """Return an IPv4 address of this machine that is not a loopback address; skip the test if there is none."""
    addresses = [a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family == socket.AF_INET]
    external = [address for address in addresses if not address.startswith("127.")]
    if not external:
        pytest.skip("this machine has no network")
    return external[0]
