"""Requests that a cluster cannot satisfy are refused before a run folder is created."""

from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from tests.distributed.ray_cluster import RayCluster

pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--actors 9", ["--actors 9", "needs 9 CPUs", "has 2 on 1 node", "2 of them free", "at most --actors 2"]),
        ("--learner-threads 9", ["--learner-threads 9", "--learners 1", "9 CPUs", "the nodes have 2"]),
        (
            "--actors 2 --learner-threads 1",
            ["--actors 2", "needs 2 CPUs and 1 for --learner-threads", "has 2 on 1 node", "at most --actors 1"],
        ),
    ],
)
def test_too_few_cpus(
    ray_cluster: RayCluster, flags: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "toy/catch", "--cluster", ray_cluster.address, "--run-dir", "r", *flags.split()]
    assert run_command(command) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in expected), error
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--cluster 127.0.0.1:9", ["--cluster 127.0.0.1:9", "cannot connect", "Connection refused"]),
        ("--cluster somewhere", ["--cluster somewhere", "local, auto or host:port"]),
        ("--cluster local --runtime serial", ["--cluster local", "--runtime serial"]),
        ("--runtime cluster", ["--runtime cluster", "--cluster local"]),
        ("--actors 2", ["--actors", "--cluster"]),
        ("--cluster local --learners 3", ["--learners 3", "try --learners 2"]),
        ("--cluster local --learners 2 --algo clear", ["--learners 2", "--learners 1"]),
        ("--cluster local --actor-threads 2", ["--actor-threads", "cluster"]),
        ("--cluster local --actors 2 --min-actors 3", ["--min-actors 3", "--actors 2"]),
        ("--cluster local --lag 1 --inference central", ["--lag 1", "--inference central"]),
        ("--cluster local --lag 1 --min-actors 1", ["--min-actors 1", "--lag"]),
    ],
)
def test_invalid_cluster_options_are_refused_in_one_line(
    flags: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "toy/catch", "--run-dir", "r", *flags.split()]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert all(text in error for text in expected), error
    assert not Path("r").exists()
