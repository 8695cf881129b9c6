"""Faults on a real Ray of several nodes, by doing them; whatever a test kills is replaced by the run or by the next test."""

from pathlib import Path

import pytest

import bestiary
from bestiary.cli import run_command
from bestiary.errors import RunError
from bestiary.runs.folder import Run
from bestiary.runtime.train import resume
from tests.clusters import newest, train_while, wait_until, world
from tests.nodes import Nodes

pytestmark = pytest.mark.xdist_group("ray")


def test_a_killed_actor_and_a_lost_node_are_replaced_and_the_run_can_be_resumed(nodes: Nodes) -> None:
    """... and a node that joins late is used."""

    def act() -> None:
        wait_until(lambda: newest("step") > 200)
        assert len(nodes.processes("Player")) == 2
        nodes.add()
        wait_until(lambda: len(nodes.processes("Player")) == 4)
        first = next(player for player in nodes.processes("Player") if nodes.on_head(player))
        first.kill()
        wait_until(lambda: newest("restarts") == 1)
        wait_until(lambda: len(nodes.processes("Player")) == 4)
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)
        nodes.lose()
        wait_until(lambda: newest("restarts") == 2)  # one, of a machine with two players
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)

    run = train_while(act, world(), cluster=nodes.address, actors=4, min_actors=2)
    assert run.metrics["max_lag"].max() <= run.config.training.max_lag
    assert run.metrics["max_queue"].max() <= 8 + 2  # never more than may be in flight
    shares = [run.metrics[name] for name in ("actor_environment", "actor_inference", "actor_wait", "learner_wait")]
    assert all((share >= 0).all() and share.any() for share in shares)
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()
    restarts, steps = run.metrics["restarts"][-1], run.steps
    assert run.checkpoints[-1].problem() is None
    run = resume(run, steps=steps + 400)
    assert run.steps == steps + 400
    assert run.metrics["restarts"][-1] == restarts == 2
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()


def test_environments_that_raise_or_stall_are_rebuilt_until_that_is_too_often(nodes: Nodes, tmp_path: Path) -> None:
    def act() -> None:
        wait_until(lambda: newest("step") > 200)
        Path("raise").touch()
        wait_until(lambda: newest("restarts") == 1)
        Path("stall").touch()
        wait_until(lambda: newest("restarts") == 2)
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)

    options = {"cluster": nodes.address, "actors": 2, "folder": str(tmp_path), "actor_timeout": 3, "max_restarts": 3}
    run = train_while(act, world(), **options)
    Path("always").touch()
    with pytest.raises(RunError, match=r"world.py, line \d+: OSError: the world is gone.*4 within ten minutes"):
        resume(run)
    assert bestiary.load("r").checkpoints[-1].problem() is None


def test_a_killed_learner_takes_the_group_back_to_the_newest_checkpoint(nodes: Nodes) -> None:
    def act() -> None:
        wait_until(lambda: Run(Path("r")).steps > 0)
        nodes.processes("Student")[-1].kill()  # the other is most likely waiting for it, to add up
        wait_until(lambda: newest("restarts") == 1)
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)

    run = train_while(act, world(), cluster=nodes.address, learners=2, save_every=200)
    assert (run.metrics["step"][1:] > run.metrics["step"][:-1]).all()  # what was lost has left no rows
    assert (run.episodes["step"][1:] >= run.episodes["step"][:-1]).all()
    assert run.metrics["restarts"][-1] == 1


# --- machines with another Bestiary ---


def other_bestiary(folder: Path) -> dict[str, str]:
    """Variables of a node whose Bestiary is another one: a copy of this with another number."""
    old = folder / "old" / "bestiary"
    old.mkdir(parents=True)
    package = Path(bestiary.__file__).parent
    for path in package.iterdir():
        if path.name != "__init__.py":
            (old / path.name).symlink_to(path)
    (old / "__init__.py").write_text((package / "__init__.py").read_text().replace(bestiary.__version__, "0.0.9"))
    return {"PYTHONPATH": str(old.parent)}


@pytest.mark.slow
def test_another_version_on_a_node_is_refused_in_a_line(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.add(env_vars=other_bestiary(tmp_path))
    try:
        words = ["train", "toy/catch", "--cluster", nodes.address, "--actors", "4", "--steps", "1k", "--run-dir", "r"]
        assert run_command(words) == 2
    finally:
        nodes.lose()
    errors = capsys.readouterr().err.strip().splitlines()
    assert "has bestiary 0.0.9, and" in errors[-1]
    assert not Path("r").exists()


@pytest.mark.slow
def test_another_version_on_a_node_that_joins_late_is_left_alone(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def heard() -> bool:
        told.append(capsys.readouterr().err)
        return "no actor will be on that machine" in "".join(told)

    def act() -> None:
        wait_until(lambda: newest("step") > 200)
        nodes.add(env_vars=other_bestiary(tmp_path))
        wait_until(heard)
        before = newest("step")
        wait_until(lambda: newest("step") > before + 400)

    told: list[str] = []
    try:
        run = train_while(act, world(), cluster=nodes.address, actors=3, min_actors=1)
    finally:
        nodes.lose()
    assert "has bestiary 0.0.9, and" in "".join(told)
    assert run.metrics["restarts"][-1] == 0
