"""Ray, started or joined: what it may listen to, whom it believes, and what goes wrong before any work has started.

    local       a Ray of this run's own: on the loopback interface only, no dashboard, and nobody talks to it without the
                token that it is started with, which is in no file
    auto        the Ray that `ray start` made on this machine
    ADDRESS     host:port of the one that `ray start --head` made elsewhere

Whoever can talk to a Ray can run code as the user who started it. So one that asks nobody for a token is joined only with
--trust-open-cluster.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bestiary.console import note
from bestiary.cores import cores
from bestiary.errors import UserError
from bestiary.temporary import make_folder

SECONDS = 10.0  # to wait for an answer from an address
STORE = 2**30  # bytes of shared memory of a Ray of our own, at most
PREFIX = "bestiary-ray-"
OLDEST = (2, 60)  # Ray whose settings we know


def load_ray() -> Any:
    """The library, or one line that says how to get it. Nothing is reported to anybody."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # an actor that dies takes several answers with it; one is told of
    try:
        import ray
    except ImportError:
        raise UserError("--cluster: Ray is not installed; run: pip install 'bestiary[cluster]'") from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        raise UserError(f"--cluster: Ray {ray.__version__} is too old; run: pip install 'bestiary[cluster]'")
    return ray


@contextmanager
def connected(cluster: str, trust_open: bool = False) -> Iterator[Any]:
    """Ray, ready to be used; left as it was found."""
    if cluster == "local":
        with _own_ray() as ray:
            yield ray
        return
    ray = load_ray()
    address = _find(cluster)
    _check_open(cluster, address, trust_open)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        raise UserError(f"--cluster {cluster}: {_in_a_line(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_ray() -> Iterator[Any]:
    ray = load_ray()
    folder = make_folder(PREFIX)
    (folder / "r").mkdir()  # Ray lets everybody write into the folder that it is given
    try:
        with _private_settings():
            try:
                ray.init(
                    address="local",
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder / "r"),
                    num_cpus=cores(),
                    object_store_memory=_store_bytes(),
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                )
            except Exception as error:
                raise UserError(f"--cluster local: Ray does not start: {_in_a_line(error)}") from error
            try:
                yield ray
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _private_settings() -> Iterator[None]:
    """In here, a Ray that is started wants a new token and stays on the loopback interface, as if the variables had been set
    before Ray was imported; what it starts inherits them."""
    from ray._private import ray_constants

    inner: Any = importlib.import_module("ray._raylet")

    def reread() -> None:
        inner.Config.initialize("")
        inner.AuthenticationTokenLoader.instance().reset_cache()

    private = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_worker_niceness": "0",  # Ray would let everything else on the machine go first
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",  # where the run was killed, nothing comes back: end soon
    }
    before = {name: os.environ.pop(name, None) for name in [*private, "RAY_ADDRESS"]}
    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    try:
        os.environ.update(private)
        ray_constants.ENABLE_RAY_CLUSTER = False
        reread()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        ray_constants.ENABLE_RAY_CLUSTER = several_machines
        reread()


def _store_bytes() -> int:
    """Shared memory for rollouts and weights: a third of what is free there, and no more than a run needs."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        return max(80 * 2**20, min(STORE, free // 3))
    return STORE // 4


# --- joining ---


def _find(cluster: str) -> str:
    """host:port of a cluster that answers, as Ray will use it: of what is on this machine, not the loopback interface's."""
    from ray._private import services

    if cluster == "auto":
        try:
            found = services.canonicalize_bootstrap_address("auto") or ""
        except (ConnectionError, ValueError):
            found = ""
        if not found:
            raise UserError(
                "--cluster auto: no Ray runs on this machine; start one (docs/cluster.md shows how), or let --cluster local "
                "start one for this run"
            )
        address = found
    else:
        address = cluster.removeprefix("ray://")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise UserError(f"--cluster {cluster}: expected local, auto or host:port, such as 10.0.0.5:6379")
    address = services.canonicalize_bootstrap_address(address) or address
    host = address.rpartition(":")[0]
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS).close()
    except TimeoutError:
        raise UserError(f"--cluster {cluster}: no answer from {address} within {SECONDS:.0f} s") from None
    except OSError as error:
        raise UserError(f"--cluster {cluster}: {address} cannot be reached: {error.strerror or error}") from error
    return address


ASK = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"bestiary", None, timeout=10)
    print("open")
except AuthenticationError:
    print("closed")
"""


def _ask(address: str, environment: dict[str, str]) -> str:
    """Whether a Ray answers to somebody with these variables: open or closed; nothing where it is no Ray that we know."""
    words = [sys.executable, "-c", ASK, address]
    try:
        return subprocess.run(words, env=environment, capture_output=True, timeout=30).stdout.decode().strip()
    except subprocess.TimeoutExpired:
        return ""


def _check_open(cluster: str, address: str, trusted: bool) -> None:
    """Refuse a Ray that does not know us, and one that answers to everybody."""
    if (answer := _ask(address, dict(os.environ))) == "closed":
        raise UserError(
            f"--cluster {cluster}: {address} does not take our token: it needs RAY_AUTH_MODE=token, and the token of whoever "
            "started it in ~/.ray/auth_token (docs/cluster.md)"
        )
    if answer != "open":
        raise UserError(f"--cluster {cluster}: what answers at {address} is not a Ray of this version")
    stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    if _ask(address, {**stranger, "RAY_AUTH_MODE": "disabled"}) == "closed":
        return
    if not trusted:
        raise UserError(
            f"--cluster {cluster}: {address} asks nobody for a token: everybody who reaches it can run code as you. Start it "
            "with RAY_AUTH_MODE=token (docs/cluster.md shows how), or add --trust-open-cluster, which the run remembers"
        )
    note(f"note: {address} asks nobody for a token; it is trusted, because --trust-open-cluster says so")


def on_every_machine(ray: Any, look: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """What `look` finds wrong, on any machine of the cluster."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, problems = ray.remote(num_cpus=0, max_retries=0)(look), list[str]()
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    there = [task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes]
    asked = [each.remote(*arguments) for each in there]
    for name, answer in zip(nodes.values(), asked, strict=True):
        try:
            problems += ray.get(answer)
        except ray.exceptions.TaskUnschedulableError:
            pass  # it has gone since we looked
        except ray.exceptions.RayError as error:
            problems.append(f"{name}: Bestiary does not run there: {_in_a_line(getattr(error, 'cause', error))}")
    return list(dict.fromkeys(problems))


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
