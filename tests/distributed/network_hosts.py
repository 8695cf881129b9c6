"""Hosts with their own network addresses on one machine, made of Linux network namespaces, for tests.

Each host is a network namespace. A further namespace contains the switch (a bridge) to which the hosts are connected.
Each host also has its own folder for temporary files, because Ray stores there which node runs on this host. All other
files are the same. Nothing is changed in the network of the machine itself.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LOSS_RULES = """
table inet loss {
    chain input {
        type filter hook input priority 0;
        iifname "uplink" numgen random mod 100 < %d drop
    }
}
"""


def run(*command: str, content: str | None = None) -> None:
    """Run a command and raise CalledProcessError if it fails."""
    subprocess.run(command, input=content, text=True, check=True, capture_output=True, timeout=30)


class Network:
    """A context that owns the namespaces. It skips the test if they cannot be made."""

    def __init__(self) -> None:
        self.prefix = f"bst{os.getpid()}"
        self.switch = f"{self.prefix}s"
        self.hosts: list[Host] = []
        self.folder = Path(tempfile.mkdtemp(prefix="net"))  # short, because the paths of sockets are limited
        self.token = secrets.token_hex(16)

    def __enter__(self) -> "Network":
        try:
            run("ip", "netns", "add", self.switch)
            run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"network namespaces cannot be made here (this needs root and iproute2): {error}")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*(host.name for host in self.hosts), self.switch):
            for pid in namespace_pids(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for host in self.hosts:
            for process in host.processes:
                process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add_host(self) -> "Host":
        """Add a host. The first one has the address 10.77.0.1, the second one 10.77.0.2, and so on."""
        host = Host(self, len(self.hosts) + 1)
        self.hosts.append(host)
        run("ip", "netns", "add", host.name)
        run("ip", "-n", host.name, "link", "set", "lo", "up")
        link = ("link", "add", "uplink", "type", "veth", "peer", "name", host.port, "netns", self.switch)
        run("ip", "-n", host.name, *link)
        run("ip", "-n", self.switch, "link", "set", host.port, "master", "bridge", "up")
        run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "uplink")
        run("ip", "-n", host.name, "link", "set", "uplink", "up")
        return host


class Host:
    """One host of a network."""

    def __init__(self, network: Network, number: int):
        self.network = network
        self.name = f"{network.prefix}h{number}"
        self.port = f"port{number}"  # its end of the cable at the switch
        self.address = f"10.77.0.{number}"
        self.processes: list[subprocess.Popen[str]] = []
        self.temporary = network.folder / "t"  # in each host, this is another folder
        self.mounted = network.folder / str(number)
        for folder in (self.temporary, self.mounted):
            folder.mkdir(exist_ok=True)

    def start(self, *command: str, stderr: Path | None = None) -> "subprocess.Popen[str]":
        """Start a Python command (for example "-m", "bestiary", ...) on this host."""
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.network.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": str(self.temporary),
        }
        mount = f'mount --bind {self.mounted} {self.temporary} && exec "$@"'  # visible only for this process
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(stderr.open("a")) if stderr is not None else subprocess.DEVNULL
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "sh", "-c", mount, "sh", sys.executable, *command],
                env={**os.environ, **settings},
                stdout=subprocess.DEVNULL,
                stderr=output,
                text=True,
            )
        self.processes.append(process)
        return process

    def start_ray(self, head: "Host | None" = None, cpus: int = 0) -> None:
        """Start Ray on this host: the head node if `head` is None, otherwise a node of its cluster."""
        role = [
            "--head",
            "--port",
            "6379",
            "--include-dashboard",
            "false",
            "--temp-dir",
            str(self.temporary / "r"),
        ]
        if head is not None:
            role = ["--address", f"{head.address}:6379"]
        memory = ["--object-store-memory", str(100 * 2**20)]
        node = ["--node-ip-address", self.address, "--num-cpus", str(cpus), *memory, "--block"]
        self.start("-m", "ray.scripts.scripts", "start", *role, *node)

    def find_processes(self, name: str) -> list[psutil.Process]:
        """Return the processes on this host whose name starts with `name`, for example "ray::RolloutWorker"."""
        found = []
        for pid in namespace_pids(self.name):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name().startswith(name):
                    found.append(psutil.Process(pid))
        return found

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Context in which the cable of this host is disconnected."""
        run("ip", "-n", self.network.switch, "link", "set", self.port, "down")
        try:
            yield
        finally:
            run("ip", "-n", self.network.switch, "link", "set", self.port, "up")

    def lose_packets(self, percent: int) -> None:
        """Drop a part of the packets that arrive at this host. Skip the test if neither netem nor nftables is there."""
        try:
            run(
                "tc",
                "-n",
                self.network.switch,
                "qdisc",
                "add",
                "dev",
                self.port,
                "root",
                "netem",
                "loss",
                f"{percent}%",
            )
            return
        except (OSError, subprocess.CalledProcessError):
            pass  # the kernel has no netem
        try:
            run("ip", "netns", "exec", self.name, "nft", "-f", "-", content=LOSS_RULES % percent)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"packets cannot be dropped here (this needs netem or nftables): {error}")


def namespace_pids(name: str) -> list[int]:
    """Return the IDs of all processes in a network namespace."""
    result = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [int(line) for line in result.stdout.split()]


def wait_until_reachable(host: Host, other: Host, port: int = 6379, seconds: float = 60) -> None:
    """Wait until `other` accepts connections of `host` at a port."""
    script = f"import socket; socket.create_connection(({other.address!r}, {port}), timeout=2)"
    deadline = time.monotonic() + seconds
    for _ in itertools.count():
        if host.start("-c", script).wait() == 0:
            return
        assert time.monotonic() < deadline, f"{other.address}:{port} cannot be reached"
        time.sleep(0.5)
