"""Faults on a real Ray cluster: killed processes, lost nodes, failing environments, and nodes with another version."""

from pathlib import Path

import psutil
import pytest

import bestiary
from bestiary.api import resume
from bestiary.cli.main import run_command
from bestiary.runs.run import Run
from bestiary.utils.errors import RunError
from tests.distributed.helpers import last_metric, train_while, wait_for_steps, wait_until, write_faulty_env
from tests.distributed.ray_cluster import RayCluster

pytestmark = pytest.mark.xdist_group("ray")


def test_killed_actors_and_lost_nodes_are_replaced_and_the_run_can_be_resumed(ray_cluster: RayCluster) -> None:
    """A node that joins later is used, too."""

    def act() -> None:
        wait_until(lambda: last_metric("step") > 200)
        wait_until(lambda: len(ray_cluster.processes("RolloutWorker")) == 2)
        ray_cluster.add_node()
        wait_until(lambda: len(ray_cluster.processes("RolloutWorker")) == 4)
        workers = ray_cluster.processes("RolloutWorker")
        next(worker for worker in workers if ray_cluster.is_on_head_node(worker)).kill()
        wait_until(lambda: last_metric("restarts") == 1)
        wait_until(lambda: len(ray_cluster.processes("RolloutWorker")) == 4)
        wait_for_steps(400)
        ray_cluster.kill_node()
        wait_until(lambda: last_metric("restarts") == 2)  # one restart for a node with two workers
        wait_for_steps(400)

    run = train_while(act, write_faulty_env(), cluster=ray_cluster.address, actors=4, min_actors=2)
    assert run.metrics["max_policy_lag"].max() <= run.config.training.max_lag
    assert run.metrics["max_queue"].max() <= 8 + 2  # never more than the rollouts that may be in flight
    fractions = [run.metrics[name] for name in ("actor_environment", "actor_inference", "actor_wait", "learner_wait")]
    assert all((fraction >= 0).all() and fraction.any() for fraction in fractions)
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()
    restarts, steps = run.metrics["restarts"][-1], run.steps
    assert run.checkpoints[-1].find_damage() is None
    run = resume(run, steps=steps + 400)
    assert run.steps == steps + 400
    assert run.metrics["restarts"][-1] == restarts == 2
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()


def test_environments_that_raise_or_stall_are_rebuilt_until_the_restart_limit(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    def act() -> None:
        wait_until(lambda: last_metric("step") > 200)
        Path("raise").touch()
        wait_until(lambda: last_metric("restarts") == 1)
        Path("stall").touch()
        wait_until(lambda: last_metric("restarts") == 2)
        wait_for_steps(400)

    options = {"cluster": ray_cluster.address, "actors": 2, "actor_timeout": 3, "max_restarts": 3}
    run = train_while(act, write_faulty_env(), folder=str(tmp_path), **options)
    Path("always").touch()
    with pytest.raises(RunError, match=r"faulty_env.py, line \d+: OSError: simulated fault.*4 within 10 minutes"):
        resume(run)
    assert bestiary.load("r").checkpoints[-1].find_damage() is None


def test_after_the_loss_of_a_learner_training_resumes_from_the_newest_checkpoint(ray_cluster: RayCluster) -> None:
    def act() -> None:
        wait_until(lambda: Run(Path("r")).steps > 0)
        # The other learner is most likely waiting for this one in an all-reduce.
        ray_cluster.processes("LearnerWorker")[-1].kill()
        wait_until(lambda: last_metric("restarts") == 1)
        wait_for_steps(400)

    run = train_while(act, write_faulty_env(), cluster=ray_cluster.address, learners=2, save_every=200)
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()  # the rows of lost updates were removed
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()
    assert run.metrics["restarts"][-1] == 1


def test_a_learner_that_is_stopped_but_not_dead_is_replaced(
    ray_cluster: RayCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    def act() -> None:
        wait_until(lambda: Run(Path("r")).steps > 0)
        (learner,) = ray_cluster.processes("LearnerWorker")
        learner.suspend()
        wait_until(lambda: last_metric("restarts") == 1)
        wait_until(lambda: not psutil.pid_exists(learner.pid))
        wait_for_steps(400)

    run = train_while(act, write_faulty_env(), cluster=ray_cluster.address, save_every=200, learner_timeout=3)
    assert "learner 0" in (text := capfd.readouterr().err)
    assert "has not answered" in text
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()
    assert run.metrics["restarts"][-1] == 1


@pytest.mark.slow
def test_an_inference_server_that_is_stopped_but_not_dead_is_replaced(ray_cluster: RayCluster) -> None:
    def act() -> None:
        wait_until(lambda: last_metric("step") > 200)
        (server,) = ray_cluster.processes("InferenceServer")
        server.suspend()
        wait_until(lambda: last_metric("restarts") > 0)
        wait_for_steps(400)

    options = {"cluster": ray_cluster.address, "inference": "central", "actor_timeout": 5}
    run = train_while(act, "toy/catch", **options)
    assert run.steps > 0


# --- nodes with another version of Bestiary ---


def install_other_version(folder: Path) -> dict[str, str]:
    """Write a copy of Bestiary with another version number; return the environment variables of a node that uses it."""
    other = folder / "other" / "bestiary"
    other.mkdir(parents=True)
    package = Path(bestiary.__file__).parent
    for path in package.iterdir():
        if path.name != "__init__.py":
            (other / path.name).symlink_to(path)
    (other / "__init__.py").write_text((package / "__init__.py").read_text().replace(bestiary.__version__, "0.0.9"))
    return {"PYTHONPATH": str(other.parent)}


@pytest.mark.slow
def test_a_node_with_another_version_is_refused_in_one_line(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_cluster.add_node(env_vars=install_other_version(tmp_path))
    command = ["train", "toy/catch", "--cluster", ray_cluster.address, "--actors", "4", "--steps", "1k"]
    try:
        assert run_command([*command, "--run-dir", "r"]) == 2
    finally:
        ray_cluster.kill_node()
    errors = capsys.readouterr().err.strip().splitlines()
    assert "has bestiary 0.0.9" in errors[-1]
    assert not Path("r").exists()


@pytest.mark.slow
def test_a_node_with_another_version_that_joins_later_is_not_used(
    ray_cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output: list[str] = []

    def node_is_excluded() -> bool:
        output.append(capsys.readouterr().err)
        return "this node will not be used" in "".join(output)

    def act() -> None:
        wait_until(lambda: last_metric("step") > 200)
        ray_cluster.add_node(env_vars=install_other_version(tmp_path))
        wait_until(node_is_excluded)
        wait_for_steps(400)

    try:
        run = train_while(act, write_faulty_env(), cluster=ray_cluster.address, actors=3, min_actors=1)
    finally:
        ray_cluster.kill_node()
    assert "has bestiary 0.0.9" in "".join(output)
    assert run.metrics["restarts"][-1] == 0
