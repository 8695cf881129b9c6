"""Agents that come with the package: valid wherever a run is, and only read."""

import numpy as np
import pytest

import bestiary
from bestiary import zoo
from bestiary.analysis.evaluate import evaluate
from bestiary.analysis.movie import film
from bestiary.analysis.play import play
from bestiary.errors import UserError
from bestiary.runs.folder import open_run
from bestiary.runtime.train import resume


@pytest.fixture
def catch(catch_runs, tmp_path, monkeypatch):
    """A zoo with one agent in it."""
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "package" / "zoo")
    source = catch_runs[0]
    zoo.ship(source.path, source.checkpoints[-1].path, "catch")
    return source


def test_the_agent_is_the_one_that_was_trained(catch):
    shipped = bestiary.load("zoo/catch")
    for name, tensor in catch.agent().state_dict().items():
        assert tensor.equal(shipped.agent().state_dict()[name])
    assert shipped.steps == catch.steps
    assert (shipped.metrics["step"] == catch.metrics["step"]).all()


def test_playing_it_leaves_the_package_alone(catch, tmp_path):
    before = sorted(zoo.FOLDER.rglob("*"))
    shipped = bestiary.load("zoo/catch")
    evaluate(shipped, episodes=5)
    movie = film(shipped)
    assert sorted(zoo.FOLDER.rglob("*")) == before
    assert movie.parts[:2] == ("runs", "zoo-catch")
    assert len(list((tmp_path / "runs/zoo-catch/evaluations").glob("*.json"))) == 1


def test_it_is_not_trained_on(catch):
    with pytest.raises(UserError, match="zoo/catch came with the package and is only read"):
        resume(bestiary.load("zoo/catch"), steps=10**6)


def test_a_wrong_name_gets_the_right_one(catch):
    with pytest.raises(UserError, match="did you mean zoo/catch"):
        open_run("zoo/cach")


def test_damage_is_noticed(catch):
    path = next(zoo.FOLDER.rglob("model.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        bestiary.load("zoo/catch").agent()


def test_an_agent_is_never_replaced_silently(catch):
    with pytest.raises(UserError, match="exists already"):
        zoo.ship(catch.path, catch.checkpoints[-1].path, "catch")


def test_the_pong_agent_that_comes_with_the_package():
    """Enough of a game to see that it knows what it does: within 700 decisions it is ahead, where chance is far behind."""
    run = bestiary.load("zoo/pong")
    assert run.metrics["return"][-1] > 18
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    assert size < 8_000_000
    pool = run.config.make_pool(2, 5)
    score = np.zeros(2)
    for t, (step, _) in enumerate(play(run.agent(), pool, greedy=False, seed=1)):
        score += step.reward
        if t == 700:
            break
    pool.close()
    assert (score > 0).all()
