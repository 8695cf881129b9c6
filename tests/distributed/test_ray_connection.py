"""Private Ray instances and connections to running clusters: access control, clean-up and error messages."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bestiary.cli.main import run_command
from bestiary.distributed.ray_connection import PROBE_SCRIPT, TEMP_DIR_PREFIX
from bestiary.runs.run import open_run
from tests.distributed.ray_cluster import RayCluster, external_address
from tests.integration.test_faults import BESTIARY, bestiary_command, wait_until

pytestmark = pytest.mark.xdist_group("ray")
TRAIN = ["train", "toy/catch", "--cluster", "local", "--num-envs", "4", "--rollout-length", "5", "--log-every", "20"]


def temporary_folders(pid: int) -> list[str]:
    """Return the names of the temporary folders that a process has created for Ray."""
    return [path.name for path in Path(tempfile.gettempdir()).glob(f"{TEMP_DIR_PREFIX}{pid}-*")]


# --- private instance ---


def test_a_private_ray_is_inaccessible_to_others_ends_with_its_run_and_the_run_can_be_resumed() -> None:
    command = [*BESTIARY, *TRAIN, "--steps", "100M", "--save-every", "200", "--run-dir", "r"]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: Path("r/checkpoints/latest").exists(), 120)
        processes = psutil.Process(driver.pid).children(recursive=True)

        shared_memory = {Path(m.path) for p in processes for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
        assert shared_memory

        # Other users cannot open its sockets and files.
        (folder,) = [Path(tempfile.gettempdir()) / name for name in temporary_folders(driver.pid)]
        assert folder.stat().st_mode & 0o077 == 0

        # No process listens on an external interface, and the server requires the token.
        listening = [c.laddr for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        (server,) = [process for process in processes if "gcs_server" in process.name()]
        (port,) = {c.laddr.port for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
        without_token = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        probe = subprocess.run(
            [sys.executable, "-c", PROBE_SCRIPT, f"127.0.0.1:{port}"],
            env=without_token,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert probe.stdout.strip() == "closed", probe.stderr

        # The token is in no file of the run, and usage statistics are disabled.
        worker = next(p for p in processes if p.name().startswith("ray::RolloutWorker"))
        environment = worker.environ()
        assert len(environment["RAY_AUTH_TOKEN"]) >= 32
        assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
        driver.send_signal(signal.SIGSTOP)  # so that it does not save and rename a checkpoint while the files are read
        for path in [path for path in Path("r").rglob("*") if path.is_file()]:
            assert environment["RAY_AUTH_TOKEN"].encode() not in path.read_bytes()
        worker.suspend()
    finally:
        driver.kill()
        driver.communicate()

    # The watchdog of the killed driver ends its processes, also those that do not react, and removes its folder.
    wait_until(lambda: temporary_folders(driver.pid) == [])
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not any(path.exists() for path in shared_memory)

    resumed = subprocess.Popen(
        [*BESTIARY, "resume", "r", "--steps", str(open_run("r").steps + 200)], stderr=subprocess.PIPE, text=True
    )

    processes = []

    def resumed_has_ended() -> bool:
        processes.extend(psutil.Process(resumed.pid).children(recursive=True))
        return resumed.poll() is not None

    wait_until(resumed_has_ended, 120)
    assert resumed.returncode == 0, resumed.communicate()[1]
    assert psutil.wait_procs(set(processes), timeout=120)[1] == []
    assert temporary_folders(resumed.pid) == []


@pytest.mark.slow
def test_ctrl_c_saves_the_run_and_leaves_no_processes_or_files() -> None:
    driver = subprocess.Popen(
        [*BESTIARY, *TRAIN, "--steps", "100M", "--run-dir", "r"], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: Path("r/metrics.csv").exists(), 120)
    processes = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 130
    assert "bestiary resume r" in errors
    assert "Traceback" not in errors
    assert open_run("r").steps > 0
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert temporary_folders(driver.pid) == []


@pytest.mark.slow
def test_workers_that_ray_kills_to_save_memory_count_as_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray reports them with another exception than workers that died by themselves."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    driver = subprocess.run(
        [*BESTIARY, *TRAIN, "--steps", "100M", "--run-dir", "r", "--max-restarts", "2"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert driver.returncode == 1
    assert "restart 3 within 10 minutes" in driver.stderr
    assert "--max-restarts 2" in driver.stderr
    assert "Traceback" not in driver.stderr


WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from bestiary.cli.main import main; main(sys.argv[1:])"


def test_a_missing_ray_is_reported_in_one_line() -> None:
    command = [sys.executable, "-c", WITHOUT_RAY, *TRAIN, "--run-dir", "r"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    (error,) = result.stderr.splitlines()
    assert "Ray is not installed" in error
    assert "pip install 'bestiary[cluster]'" in error
    assert not Path("r").exists()


def test_all_tests_with_ray_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """Otherwise each test process starts its own cluster. Some versions of pytest-xdist ignore the group marker."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("the tests run in a single process")
    assert request.node.nodeid.endswith("@ray")


# --- running cluster ---


@pytest.fixture
def open_address() -> Iterator[str]:
    """Start a Ray server (GCS) that requires no token, without nodes that could run code; yield its address."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host = external_address()
    server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    options = {"config_list": b64encode(b"{}").decode(), "gcs_server_port": port, "node-ip-address": host}
    options |= {"session-name": "x", "ray-commit": "x", "metrics-agent-port": 0}
    command = [str(server), *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(
        command, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield f"{host}:{port}"
    process.kill()
    process.wait()


def accepts_connections(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def run_without_ray_settings(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command without the environment variables of the Ray cluster of the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run([*BESTIARY, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def test_a_cluster_without_authentication_is_used_only_with_trust_open_cluster(
    open_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: accepts_connections(open_address))
    assert run_command(["train", "toy/catch", "--cluster", open_address, "--run-dir", "r"]) == 2
    error = capsys.readouterr().err
    assert f"{open_address} does not require a token" in error
    assert "--trust-open-cluster" in error
    port = open_address.rpartition(":")[2]
    for host in ("127.0.0.1", socket.gethostname()):  # other names of the same cluster do not make it private
        refused = run_without_ray_settings(["train", "toy/catch", "--cluster", f"{host}:{port}", "--run-dir", "r"])
        assert refused.returncode == 2
        assert "does not require a token" in refused.stderr
    assert not Path("r").exists()
    saved_config = bestiary_command(
        "train", "toy/catch", "--cluster", open_address, "--trust-open-cluster", "--dry-run"
    ).stdout
    assert "trust_open_cluster = true" in saved_config


def test_a_cluster_that_refuses_the_token_is_reported(
    ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the token of another cluster, which is not valid here")
    assert run_command(["train", "toy/catch", "--cluster", ray_cluster.address, "--run-dir", "r"]) == 2
    error = capsys.readouterr().err
    assert f"{ray_cluster.address} refused the authentication token" in error
    assert "RAY_AUTH_MODE=token" in error
    assert not Path("r").exists()
