"""Training on hosts with their own network addresses: driver and learner on one host, actors on the others."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bestiary.runs.run import Run, open_run
from tests.distributed.helpers import last_metric, wait_for_steps, wait_until, write_faulty_env
from tests.distributed.network_hosts import Host, Network, namespace_pids, wait_until_reachable

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

OPTIONS = ("--num-envs", "8", "--batch-size", "4", "--rollout-length", "5", "--log-every", "40", "--torso.width", "16")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def start_cluster(network: Network, cpus: int) -> tuple[Host, Host]:
    """Return a host for the driver, which has no CPU for actors, and a host with `cpus` CPUs for actors."""
    first, second = network.add_host(), network.add_host()
    first.start_ray()
    wait_until_reachable(second, first)
    second.start_ray(first, cpus)
    return first, second


def start_training(host: Host, *options: str) -> "subprocess.Popen[str]":
    """Start a training in the folder `r` on a host, and wait until it has computed updates."""
    arguments = ["train", write_faulty_env(), "--cluster", f"{host.address}:6379", *OPTIONS, *options]
    command = ["-m", "bestiary", *arguments, "--micro-batch-size", "2", "--steps", "100M", "--run-dir", "r"]
    for _ in range(20):
        process = host.start(*command, stderr=Path("errors.txt"))
        while process.poll() is None:
            if last_metric("step") > 0:
                assert len(host.find_processes("ray::LearnerWorker")) == 1
                return process
            time.sleep(0.2)
        assert "CPUs; the cluster has" in Path("errors.txt").read_text(), Path("errors.txt").read_text()
        time.sleep(1)  # the second host has not joined the cluster yet
    raise AssertionError(Path("errors.txt").read_text())


def stop_training(process: "subprocess.Popen[str]") -> Run:
    """Stop the training with SIGTERM and return its run."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    run = open_run("r")
    assert run.checkpoints[-1].find_damage() is None
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()
    assert "Traceback" not in Path("errors.txt").read_text()
    return run


def test_actors_run_on_the_second_host_and_on_a_third_host_that_joins_later(network: Network) -> None:
    first, second = start_cluster(network, cpus=1)
    training = start_training(first, "--actors", "2", "--min-actors", "1")
    wait_until(lambda: len(second.find_processes("ray::RolloutWorker")) == 1)
    third = network.add_host()
    third.start_ray(first, cpus=1)
    wait_until(lambda: len(third.find_processes("ray::RolloutWorker")) == 1)
    wait_for_steps(400)
    assert stop_training(training).metrics["restarts"][-1] == 0


def test_training_continues_after_the_link_was_cut_for_half_a_minute(network: Network) -> None:
    """The actors of the host that cannot be reached are replaced, and the replacements are counted."""
    first, second = start_cluster(network, cpus=1)
    training = start_training(first, "--actors", "1", "--actor-timeout", "10")
    with second.cut_off():
        time.sleep(30)
    wait_until(lambda: last_metric("restarts") >= 1)
    steps = last_metric("step")

    def has_continued() -> bool:
        # If Ray has declared the node lost, it ends its processes on this node when the link is back.
        if not namespace_pids(second.name):
            second.start_ray(first, cpus=1)
        return last_metric("step") > steps + 400

    wait_until(has_continued)
    run = stop_training(training)
    assert 1 <= run.metrics["restarts"][-1] <= 5


def test_training_with_packet_loss(network: Network) -> None:
    first, second = start_cluster(network, cpus=1)
    training = start_training(first, "--actors", "1")
    second.lose_packets(percent=5)
    first.lose_packets(percent=5)
    wait_for_steps(1_000)
    assert stop_training(training).metrics["restarts"][-1] == 0
