"""Zoo agents are accepted wherever a run is, and are read-only."""

import subprocess
import sys

import numpy as np
import pytest

import bestiary
from bestiary.agents.policy_runner import run_policy
from bestiary.api import resume
from bestiary.evaluation.evaluate import evaluate
from bestiary.evaluation.video import record_video
from bestiary.runs import zoo
from bestiary.runs.run import open_run
from bestiary.utils.errors import UserError


@pytest.fixture
def catch(catch_runs, tmp_path, monkeypatch):
    """Create a zoo with one agent, and return the run of the agent."""
    monkeypatch.setattr(zoo, "ZOO_FOLDER", tmp_path / "package" / "zoo")
    source = catch_runs[0]
    zoo.add_agent(source.path, source.checkpoints[-1].path, "catch")
    return source


def test_zoo_agent_has_the_weights_and_metrics_of_the_run(catch):
    agent_run = bestiary.load("zoo/catch")
    for name, tensor in catch.agent().state_dict().items():
        assert tensor.equal(agent_run.agent().state_dict()[name])
    assert agent_run.steps == catch.steps
    assert (agent_run.metrics["step"] == catch.metrics["step"]).all()


def test_evaluation_and_video_do_not_change_the_package(catch, tmp_path):
    before = sorted(zoo.ZOO_FOLDER.rglob("*"))
    run = bestiary.load("zoo/catch")
    evaluate(run, episodes=5)
    video = record_video(run)
    assert sorted(zoo.ZOO_FOLDER.rglob("*")) == before
    assert video.parts[:2] == ("runs", "zoo-catch")
    assert len(list((tmp_path / "runs/zoo-catch/evaluations").glob("*.json"))) == 1


def test_zoo_agent_cannot_be_trained(catch):
    with pytest.raises(UserError, match="zoo/catch is part of the package and read-only"):
        resume(bestiary.load("zoo/catch"), steps=10**6)


def test_wrong_name_gets_a_suggestion(catch):
    with pytest.raises(UserError, match="did you mean zoo/catch"):
        open_run("zoo/cach")


def test_damaged_weights_are_refused(catch):
    path = next(zoo.ZOO_FOLDER.rglob("model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        bestiary.load("zoo/catch").agent()


def test_existing_agent_is_not_replaced(catch):
    with pytest.raises(UserError, match="exists already"):
        zoo.add_agent(catch.path, catch.checkpoints[-1].path, "catch")


def test_run_is_added_from_the_command_line(catch_runs):
    """Without arguments the command prints its usage; an existing name is refused."""
    command = [sys.executable, "-m", "bestiary.runs.zoo"]
    usage = subprocess.run(command, capture_output=True, text=True)
    assert usage.returncode == 1
    assert "RUN NAME" in usage.stderr
    refused = subprocess.run([*command, str(catch_runs[0].path), "pong"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "exists already" in refused.stderr


def test_pong_agent_of_the_package():
    """The agent is ahead after 700 steps, at which random play is far behind."""
    run = bestiary.load("zoo/pong")
    assert run.metrics["return"][-1] > 18
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert size < 8_000_000
    pool = run.config.make_vector_env(2, 5)
    score = np.zeros(2)
    for t, (record, _) in enumerate(run_policy(run.agent(), pool, greedy=False, seed=1)):
        score += record.step.reward
        if t == 700:
            break
    pool.close()
    assert (score > 0).all()
