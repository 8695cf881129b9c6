"""A Ray of a run's own, and one that is joined: who can reach it, what is left of it, and what is refused."""

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

from bestiary.cli import run_command
from bestiary.runs.folder import open_run
from bestiary.runtime.ray import ASK, PREFIX
from tests.nodes import own_address
from tests.test_faults import BESTIARY, bestiary_command, wait_until

pytestmark = pytest.mark.xdist_group("ray")
TRAIN = ["train", "toy/catch", "--cluster", "local", "--num-envs", "4", "--unroll-length", "5", "--log-every", "20"]


def left_behind(pid: int) -> list[str]:
    return [path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}{pid}-*")]


def test_a_ray_of_its_own_is_private_ends_with_its_run_and_the_run_can_be_resumed() -> None:
    words = [*BESTIARY, *TRAIN, "--steps", "100M", "--save-every", "200", "--run-dir", "r"]
    driver = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: Path("r/checkpoints/latest").exists(), 120)
        crew = psutil.Process(driver.pid).children(recursive=True)

        shared = {Path(m.path) for p in crew for m in p.memory_maps() if m.path.startswith("/dev/shm/")}
        assert shared

        # nobody else gets at its sockets and files
        (folder,) = [Path(tempfile.gettempdir()) / name for name in left_behind(driver.pid)]
        assert folder.stat().st_mode & 0o077 == 0

        # nothing listens beyond this machine, and nothing answers without the token
        listening = [c.laddr for p in crew for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        (server,) = [process for process in crew if "gcs_server" in process.name()]
        (port,) = {c.laddr.port for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        asked = subprocess.run(
            [sys.executable, "-c", ASK, f"127.0.0.1:{port}"], env=stranger, capture_output=True, text=True, timeout=60
        )
        assert asked.stdout.strip() == "closed", asked.stderr

        # the token is in no file of the run, and nothing is reported to anybody
        environment = next(p for p in crew if p.name().startswith("ray::Player")).environ()
        assert len(environment["RAY_AUTH_TOKEN"]) >= 32
        assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
        for path in [path for path in Path("r").rglob("*") if path.is_file()]:
            assert environment["RAY_AUTH_TOKEN"].encode() not in path.read_bytes()
    finally:
        driver.kill()
        driver.communicate()

    resumed = subprocess.Popen(
        [*BESTIARY, "resume", "r", "--steps", str(open_run("r").steps + 200)], stderr=subprocess.PIPE, text=True
    )

    def ended() -> bool:
        crew.extend(psutil.Process(resumed.pid).children(recursive=True))
        return resumed.poll() is not None

    wait_until(ended, 120)
    assert resumed.returncode == 0, resumed.communicate()[1]
    assert psutil.wait_procs(set(crew), timeout=120)[1] == []  # of the killed one, too
    assert left_behind(resumed.pid) == []
    assert left_behind(driver.pid) == []  # swept up by the next one
    assert not any(path.exists() for path in shared)


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_nothing() -> None:
    driver = subprocess.Popen(
        [*BESTIARY, *TRAIN, "--steps", "100M", "--run-dir", "r"], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: Path("r/metrics.csv").exists(), 120)
    crew = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 130
    assert "to go on: bestiary resume r" in errors
    assert "Traceback" not in errors
    assert open_run("r").steps > 0
    assert psutil.wait_procs(crew, timeout=30)[1] == []
    assert left_behind(driver.pid) == []


@pytest.mark.slow
def test_what_ray_kills_to_save_memory_is_counted_and_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tells of it by another error than of what died by itself."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    driver = subprocess.run(
        [*BESTIARY, *TRAIN, "--steps", "100M", "--run-dir", "r", "--max-restarts", "2"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert driver.returncode == 1
    assert "restart 3 within ten minutes (--max-restarts 2)" in driver.stderr
    assert "Traceback" not in driver.stderr


WITHOUT = "import sys; sys.modules['ray'] = None; from bestiary.cli import main; main(sys.argv[1:])"


def test_no_ray_installed() -> None:
    words = [sys.executable, "-c", WITHOUT, *TRAIN, "--run-dir", "r"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "bestiary: --cluster: Ray is not installed; run: pip install 'bestiary[cluster]'\n"
    assert not Path("r").exists()


def test_tests_of_one_group_share_a_process(request: pytest.FixtureRequest) -> None:
    """Those that need Ray would otherwise start one in each; there are versions of pytest that do not see to it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is one process only")
    assert request.node.nodeid.endswith("@ray")


@pytest.fixture
def open_address() -> Iterator[str]:
    """What joining sees of a Ray that asks for no token: the server that knows its nodes, which has none to run code on."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host = own_address()
    server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    options = {"config_list": b64encode(b"{}").decode(), "gcs_server_port": port, "node-ip-address": host}
    options |= {"session-name": "x", "ray-commit": "x", "metrics-agent-port": 0}
    words = [str(server), *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(
        words, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield f"{host}:{port}"
    process.kill()
    process.wait()


def answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def outside(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """What a command does that knows nothing of any Ray of these tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run([*BESTIARY, *words], env=environment, capture_output=True, text=True, timeout=300)


def test_an_open_cluster_is_joined_only_when_it_is_trusted(
    open_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_until(lambda: answers(open_address))
    assert run_command(["train", "toy/catch", "--cluster", open_address, "--run-dir", "r"]) == 2
    errors = capsys.readouterr().err
    assert f"{open_address} asks nobody for a token" in errors
    for name in ("127.0.0.1", socket.gethostname()):  # it is no more private for being called so
        refused = outside(
            ["train", "toy/catch", "--cluster", f"{name}:{open_address.rpartition(':')[2]}", "--run-dir", "r"]
        )
        assert refused.returncode == 2
        assert "asks nobody for a token" in refused.stderr
    assert not Path("r").exists()
    remembered = bestiary_command(
        "train", "toy/catch", "--cluster", open_address, "--trust-open-cluster", "--dry-run"
    ).stdout
    assert "trust_open_cluster = true" in remembered
