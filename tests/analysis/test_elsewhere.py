"""An agent elsewhere than it was trained, scripted players, and where an agent looks."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.influence import InfluenceAgent
from bestiary.agents.torsos import TORSOS
from bestiary.analysis.evaluate import evaluate, evaluate_player
from bestiary.analysis.movie import attention_map, film, overlay
from bestiary.cli import run_command
from bestiary.envs import make
from bestiary.errors import UserError
from bestiary.runs.folder import Run

SHORT: dict[str, Any] = {"algo": "ppo", "runtime": "serial", "num_envs": 4, "rollout_length": 16, "steps": 128}


@pytest.fixture(scope="module")
def attentive(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A warehouse agent, barely trained, whose memory attends to its inputs."""
    folder = tmp_path_factory.mktemp("attentive") / "run"
    options = {**SHORT, "agent": "iam", "agent.dset": "attention", "memory.hidden": 8, "torso.sizes": (16,)}
    return bestiary.train("warehouse", run_dir=str(folder), **options)


def test_options_given_to_eval_replace_the_trainings(attentive: Run) -> None:
    other = attentive.with_env({"spawn": "0", "expiry": "3"})
    assert (other.config.env_options.spawn, other.config.env_options.expiry) == (0.0, 3)
    assert attentive.config.env_options.spawn is None
    assert evaluate(other, episodes=4).mean == 0  # nothing ever appears
    assert evaluate(attentive, episodes=4).mean > 0
    with pytest.raises(UserError, match=r"spawn 2: must be at most 1"):
        attentive.with_env({"spawn": "2"})


def test_the_protocol_has_the_options_that_were_played(attentive: Run) -> None:
    result = evaluate(attentive.with_env({"spawn": "0.2"}), episodes=4)
    assert result.path is not None
    assert json.loads(result.path.read_text())["protocol"]["environment_options"]["spawn"] == 0.2


def test_a_users_environment_stays_the_trusted_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options must not be a way round the check of users' own code."""
    source = (Path(__file__).parents[2] / "examples" / "maze_env.py").read_text()
    (tmp_path / "maze.py").write_text(source)
    bestiary.train("maze.py:Maze", run_dir="r", runtime="serial", num_envs=4, steps=80)
    (tmp_path / "maze.py").write_text("raise SystemExit('changed code was run')\n")
    assert run_command(["eval", "r", "--episodes", "2", "--max-steps", "50", "--trust-code", "--size", "4"]) in (0, 1)
    assert "changed code was run" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words",
    [
        "eval {run} --episodes 4 --spawn 0.1 --legacy",
        "eval --spawn 0.1 --legacy {run} --episodes 4",
        "eval --spawn=0.1 --legacy=on --episodes=4 {run}",
        "eval --spawn 0.1 --env.legacy on {run} --episodes 4 --num-envs 2 --seed 3",
    ],
)
def test_options_come_in_any_order(attentive: Run, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words.format(run=attentive.path).split()) == 0
    path = sorted(attentive.path.glob("evaluations/*.json"), key=lambda path: path.stat().st_mtime_ns)[-1]
    played = json.loads(path.read_text())["protocol"]["environment_options"]
    assert (played["spawn"], played["legacy"]) == (0.1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval {run} --spwan 1", "unknown option --spwan; did you mean --spawn"),
        ("eval {run} --spawn 2", "--spawn 2: must be at most 1"),
        ("eval {run} --env atari/Pong", "another family"),
        ("eval", "which run?"),
        ("eval --spawn 1", "1: there is no such run"),
        ("eval scripted:nearest", "scripted:nearest: which environment does it play?"),
        ("eval scripted:nearst --env warehouse", "did you mean nearest"),
        ("eval scripted:nearest --env toy/chain", "scripted:nearest plays the warehouse, not toy/chain"),
        ("eval scripted:nearest --env warehouse --greedy", "are for trained agents"),
        ("movie scripted:nearest", "scripted players are evaluated"),
    ],
)
def test_mistakes(attentive: Run, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(words.format(run=attentive.path).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_help_shows_the_environments_options(attentive: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_command(["eval", str(attentive.path), "--help"])
    assert "--expiry" in capsys.readouterr().out


def test_scripted_players_are_evaluated() -> None:
    results = {name: evaluate_player(name, "warehouse", {}, episodes=64) for name in ("random", "nearest")}
    assert results["nearest"].mean > results["random"].mean + 20
    path = results["nearest"].path
    assert path is not None
    assert path.parts[:2] == ("runs", "scripted-nearest-warehouse")
    assert json.loads(path.read_text())["protocol"]["environment_options"]["frame_stack"] == 1
    assert evaluate_player("nearest", "warehouse", {"spawn": 0.0}, episodes=2).mean == 0


# --- attention ---


def test_a_movie_of_attention_differs_from_one_without(attentive: Run) -> None:
    plain, looked = film(attentive, out="a.gif", length=5), film(attentive, out="b.gif", length=5, attention=True)
    assert plain.read_bytes() != looked.read_bytes()


@pytest.mark.parametrize("options", [{}, {"frame_stack": 3}, {"observation": "image"}, {"size": (5, 9)}], ids=str)
def test_every_input_of_a_warehouse_has_a_place(options: dict[str, Any]) -> None:
    pool: Any = make("warehouse", num_envs=1, **options)
    (spec,) = pool.observation_spec.values()
    places = pool.input_cells
    assert len(places) == np.prod(spec.shape)
    assert (places.max(axis=0) + 1 == pool.world.size).all()
    weights = np.zeros((1, len(places)))
    weights[0, -1] = 1

    class Torso:
        torso = None

    cells, box = attention_map(weights, Torso, pool)
    assert cells[tuple(places[-1])] == 1
    assert cells.sum() == 1
    assert box == (0, 0, 1, 1)
    even, _ = attention_map(np.full_like(weights, 1 / len(places)), Torso, pool)
    assert not even.any()  # who looks everywhere alike looks nowhere in particular


@pytest.mark.parametrize("torso", ["shallow", "resnet"])
def test_cells_of_a_map_lie_over_the_pixels_that_they_see(torso: str) -> None:
    """The gradient of one cell is centred where the overlay is red when all attention is on that cell."""
    pool: Any = make("atari/Breakout", num_envs=1)
    pool.close()
    agent: Any = InfluenceAgent(pool.observation_spec, pool.action_spec, torso=TORSOS[torso])
    _, height, width = agent.torso.map_shape
    for row, column in ((0, 0), (height // 2, width // 2), (height - 1, width - 1)):
        image = torch.rand(1, *pool.observation_spec["image"].shape, requires_grad=True)
        agent.torso.convolutions(image)[0, :, row, column].sum().backward()
        assert image.grad is not None
        seen = image.grad[0].abs().sum(0).nonzero().float()  # [pixels,2]
        middle = (seen.amax(0) + seen.amin(0)) / 2 + 0.5
        inside = ((seen.amin(0) > 0) & (seen.amax(0) < 83)).tolist()  # else the picture's edge cuts it off
        weights = np.zeros((1, height * width))
        weights[0, row * width + column] = 1
        drawn = overlay(np.zeros((84, 84, 3), np.uint8), *attention_map(weights, agent, pool))[..., 0].astype(float)
        for axis, profile in enumerate((drawn.sum(1), drawn.sum(0))):
            if inside[axis]:
                centre = (profile * (np.arange(84) + 0.5)).sum() / profile.sum()
                assert centre == pytest.approx(float(middle[axis]), abs=3)


def test_blank_moments_of_a_flickering_game_are_drawn_dark() -> None:
    options: dict[str, Any] = {"steps": 100, "num_envs": 2, "batch_size": 2, "unroll_length": 5, "runtime": "serial"}
    run = bestiary.train("atari/Breakout", run_dir="r", flicker=0.5, **options)
    frames = imageio.imread(film(run, out="f.gif", length=40))
    light = frames.reshape(len(frames), -1).mean(1)
    assert 8 < (light < light.max() / 2).sum() < 32
    whole = imageio.imread(film(run.with_env({"flicker": 0.0}), out="w.gif", length=40))
    assert whole.reshape(len(whole), -1).mean(1).min() > light.max() / 2


def test_an_agent_is_not_shown_what_it_cannot_see(attentive: Run) -> None:
    with pytest.raises(UserError, match=r"--frame-stack: the agent of .* sees vector float32\[73\].*would see .*146"):
        attentive.with_env({"frame_stack": "2"})


def test_an_overlay_is_red_where_the_map_is_high() -> None:
    cells = np.zeros((7, 7))
    cells[0, 6] = 1
    picture = overlay(np.full((70, 70, 3), 100, np.uint8), cells)
    assert picture.shape == (70, 70, 3)
    assert (picture[60, 5] == 100).all()
    assert picture[4, 65, 0] > 150
    assert picture[4, 65, 2] < 60


def test_attention_of_an_agent_that_has_none(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="its agent has no attention to draw"):
        film(catch_runs[0], attention=True)
