"""Connection to Ray. The option --cluster selects the Ray instance:

    local       Start a private Ray instance for this run only. It listens on the loopback interface, has no dashboard,
                and requires a random token that is not stored in any file.
    auto        Connect to the Ray cluster that `ray start` has started on this machine.
    host:port   Connect to the Ray cluster that `ray start --head` has started at this address.

Every process that can connect to Ray can run code as the user who started Ray. A cluster that does not require token
authentication is therefore refused unless --trust-open-cluster is given.
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
from pathlib import Path
from typing import Any

from bestiary.distributed import ray_watchdog
from bestiary.utils.console import note
from bestiary.utils.cpu import num_cores
from bestiary.utils.errors import UserError
from bestiary.utils.temp_dirs import make_temp_dir

CONNECT_TIMEOUT = 10.0  # maximum time to connect to a cluster, in seconds
MIN_OBJECT_STORE_BYTES = 80 * 2**20  # minimum size of the object store of a private Ray instance
MAX_OBJECT_STORE_BYTES = 2**30  # maximum size of the object store of a private Ray instance
TEMP_DIR_PREFIX = "bestiary-ray-"
MIN_RAY_VERSION = (2, 60)  # oldest version with which `private_ray_settings` was tested


def import_ray() -> Any:
    """Import Ray with usage statistics disabled.

    Raises:
        UserError: Ray is missing or too old.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # If a process is lost, several of its calls fail. The driver reports the first failure. This setting prevents Ray
    # from printing the other failures.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    try:
        import ray
    except ImportError:
        raise UserError("--cluster: Ray is not installed; run: pip install 'bestiary[cluster]'") from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < MIN_RAY_VERSION:
        raise UserError(f"--cluster: Ray {ray.__version__} is too old; run: pip install 'bestiary[cluster]'")
    return ray


@contextmanager
def connect_to_ray(cluster: str, trust_open: bool = False) -> Iterator[Any]:
    """Connect to Ray, yield the ray module, and disconnect at the end.

    Args:
        cluster: value of --cluster: local, auto or host:port (see the module docstring).
        trust_open: whether to accept a cluster that does not require token authentication.
    """
    if cluster == "local":
        with _start_private_ray() as ray:
            yield ray
        return
    ray = import_ray()
    address = _resolve_address(cluster)
    _check_authentication(cluster, address, trust_open)
    try:
        ray.init(
            address=address,
            job_config=_job_config(),
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except Exception as error:
        raise UserError(f"--cluster {cluster}: {_first_lines(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _job_config() -> Any:
    """Return settings of a Ray job: its workers import modules only from folders that this process searches.

    By default, the workers first search the working directory. Its files may come from another person.
    """
    from ray.job_config import JobConfig

    class OwnPathOnly(JobConfig):
        _py_driver_sys_path: list[str]

        def _serialize(self) -> Any:
            # Ray adds folders to the list immediately before this call. Keep only folders that this process searches.
            searched = {Path(entry).resolve() for entry in sys.path}
            self._py_driver_sys_path = [path for path in self._py_driver_sys_path if Path(path).resolve() in searched]
            return super()._serialize()

    return OwnPathOnly()


# --- private instance ---


@contextmanager
def _start_private_ray() -> Iterator[Any]:
    """Start a Ray instance for this process only, yield the ray module, and remove Ray's files at the end."""
    ray = import_ray()
    folder = make_temp_dir(TEMP_DIR_PREFIX)
    # Ray makes its folder writable for all users. So this folder, `r`, is inside a folder that only this user can open.
    (folder / "r").mkdir()
    with ray_watchdog.watch(folder), private_ray_settings():
        try:
            ray.init(
                address="local",
                job_config=_job_config(),
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder / "r"),
                num_cpus=num_cores(),
                object_store_memory=_object_store_bytes(),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            raise UserError(f"--cluster local: Ray could not be started: {_first_lines(error)}") from error
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def private_ray_settings() -> Iterator[None]:
    """Set environment variables so that a new Ray instance requires a new token and uses only the loopback interface.

    The processes of Ray inherit these variables. In this process, Ray has already read the old values when it was
    imported. Therefore this function also changes the settings in the loaded modules of Ray. At the end, all old values
    are restored.
    """
    from ray._private import ray_constants

    raylet: Any = importlib.import_module("ray._raylet")

    def reload_settings() -> None:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        # Run Ray's worker processes with normal scheduling priority. Ray's default is a lower priority.
        "RAY_worker_niceness": "0",
        # If the head process of Ray (GCS) is killed, Ray's other processes wait 15 s for a new one and then end.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    }
    previous = {name: os.environ.pop(name, None) for name in [*settings, "RAY_ADDRESS"]}
    previous_enable_cluster = ray_constants.ENABLE_RAY_CLUSTER
    try:
        os.environ.update(settings)
        ray_constants.ENABLE_RAY_CLUSTER = False
        reload_settings()
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        ray_constants.ENABLE_RAY_CLUSTER = previous_enable_cluster
        reload_settings()


def _object_store_bytes() -> int:
    """Return the size of the object store: a third of the free shared memory.

    The result is at least MIN_OBJECT_STORE_BYTES and at most MAX_OBJECT_STORE_BYTES.
    """
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        return max(MIN_OBJECT_STORE_BYTES, min(MAX_OBJECT_STORE_BYTES, free // 3))
    return MAX_OBJECT_STORE_BYTES // 4


# --- running cluster ---


def _resolve_address(cluster: str) -> str:
    """Return the address of a running cluster as host:port.

    For a cluster on this machine, the host is the address of a network interface, not the loopback address, because Ray
    itself uses such an address.

    Raises:
        UserError: there is no such cluster, or it cannot be reached.
    """
    from ray._private import services

    if cluster == "auto":
        try:
            found = services.canonicalize_bootstrap_address("auto") or ""
        except (ConnectionError, ValueError):
            found = ""
        if not found:
            raise UserError(
                "--cluster auto: no Ray cluster runs on this machine; start a cluster (see docs/cluster.md), or "
                "use --cluster local to start a private cluster for this run"
            )
        address = found
    else:
        address = cluster.removeprefix("ray://")
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise UserError(f"--cluster {cluster}: expected local, auto or host:port, for example 10.0.0.5:6379")
    address = services.canonicalize_bootstrap_address(address) or address
    host = address.rpartition(":")[0]
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
    except TimeoutError:
        raise UserError(f"--cluster {cluster}: no answer from {address} within {CONNECT_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise UserError(f"--cluster {cluster}: cannot connect to {address}: {error.strerror or error}") from error
    return address


# This script runs in a separate process, because Ray reads the authentication settings only once per process.
PROBE_SCRIPT = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"bestiary", None, timeout=10)
    print("open")
except AuthenticationError:
    print("closed")
"""


def _probe(address: str, environment: dict[str, str]) -> str:
    """Connect to a cluster from a new process with these environment variables.

    Return "open" if the cluster accepts the connection, and "closed" if the cluster refuses the connection. Return an
    empty string if there is no valid answer, for example because the server has another version of Ray.
    """
    # -P: do not import modules from the working directory. Its files may come from another person.
    command = [sys.executable, "-P", "-c", PROBE_SCRIPT, address]
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=30).stdout.decode().strip()
    except subprocess.TimeoutExpired:
        return ""


def _check_authentication(cluster: str, address: str, trust_open: bool) -> None:
    """Check that a cluster accepts the user's token, and that it refuses clients without a token.

    Raises:
        UserError: the cluster refuses the token, or it accepts every client although `trust_open` is False.
    """
    answer = _probe(address, dict(os.environ))
    if answer == "closed":
        raise UserError(
            f"--cluster {cluster}: {address} refused the authentication token; set RAY_AUTH_MODE=token and copy the "
            "token of the user who started the cluster to ~/.ray/auth_token (see docs/cluster.md)"
        )
    if answer != "open":
        raise UserError(f"--cluster {cluster}: the server at {address} is not a Ray cluster of the installed version")
    without_token = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    if _probe(address, {**without_token, "RAY_AUTH_MODE": "disabled"}) == "closed":
        return
    if not trust_open:
        raise UserError(
            f"--cluster {cluster}: {address} does not require a token, so everyone who can connect to it can run code "
            "as you; start it with RAY_AUTH_MODE=token (see docs/cluster.md), or add --trust-open-cluster"
        )
    note(f"note: {address} does not require a token; it is used because of --trust-open-cluster")


def check_every_node(ray: Any, check: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """Run `check(*arguments)` on each node of the cluster. Return the problems that were found, without duplicates."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(check)
    hostnames = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    calls = []
    for node_id in hostnames:
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        calls.append(task.options(scheduling_strategy=on_node).remote(*arguments))
    problems: list[str] = []
    for hostname, call in zip(hostnames.values(), calls, strict=True):
        try:
            problems += ray.get(call)
        except ray.exceptions.TaskUnschedulableError:
            pass  # the node has left the cluster
        except ray.exceptions.RayError as error:
            problems.append(f"Bestiary cannot run on {hostname}: {_first_lines(getattr(error, 'cause', error))}")
    return list(dict.fromkeys(problems))


def _first_lines(error: BaseException) -> str:
    """Return the first three lines of an error message, joined to one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
