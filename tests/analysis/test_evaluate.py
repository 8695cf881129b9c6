"""Evaluation: the games that count, the statistics, and what is written down."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.analysis.evaluate import _role, evaluate
from bestiary.analysis.evaluation import Part, summarise
from bestiary.analysis.games import play_games
from bestiary.cli import run_command
from bestiary.errors import RunError, UserError
from bestiary.rollout import Episode
from bestiary.runs.folder import Run


def test_every_environment_plays_its_share(catch_runs: list[Run]) -> None:
    result = evaluate(catch_runs[0], episodes=10, num_envs=4)
    counts = np.bincount([e.env for e in result.episodes])
    np.testing.assert_array_equal(counts, [3, 3, 2, 2])
    assert result.statistics["game"]["n"] == 10


def test_the_files_hold_the_result_and_the_protocol(catch_runs: list[Run]) -> None:
    result = evaluate(catch_runs[0], episodes=20, greedy=True, seed=3, checkpoint=2_000)
    assert result.path is not None
    written = json.loads(result.path.read_text())
    protocol = written["protocol"]
    assert protocol["policy"] == "greedy"
    assert (protocol["games"], protocol["seed"], protocol["environment"]) == (20, 3, ["toy/catch"])
    assert abs(protocol["checkpoint_steps"] - 2_000) < 400
    with result.path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert np.mean([float(r["game_return"]) for r in rows]) == pytest.approx(written["statistics"]["game"]["mean"])


def test_the_same_seed_plays_the_same_games_and_nothing_is_overwritten(catch_runs: list[Run]) -> None:
    one, two, other = (evaluate(catch_runs[0], episodes=30, seed=s) for s in (7, 7, 8))
    assert one.episodes == two.episodes != other.episodes
    assert one.path != two.path


def test_lives_and_games_are_told_apart() -> None:
    run = bestiary.train("atari/Breakout", run_dir="r", steps=80, num_envs=4, batch_size=4)
    result = evaluate(run, episodes=3, num_envs=3)
    assert result.statistics["game"]["n"] == 3
    assert result.statistics["life"]["n"] == 15  # five lives a game
    for env in range(3):
        lives = [e for e in result.episodes if e.env == env]
        assert sum(e.ret for e in lives) == pytest.approx(lives[-1].game_return)
        assert [e.game_over for e in lives] == [False] * 4 + [True]


ENDLESS = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
class Endless(gymnasium.Env):
    observation_space, action_space, ends = Box(-1, 1, (2,)), Discrete(2), False
    def __init__(self, *, every: int = 0):
        self.every, self.clock = every, 0
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.clock += 1
        return np.zeros(2, np.float32), 1.0, bool(self.every) and self.clock % self.every == 0, False, {}
"""


def test_games_that_do_not_end_are_given_up_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    never = bestiary.train("endless.py:Endless", run_dir="never", steps=100, runtime="serial", num_envs=2, batch_size=2)
    with pytest.raises(RunError, match="no game ended within 50 steps"):
        evaluate(never, episodes=3, max_steps=50)
    late = bestiary.train(
        "endless.py:Endless", every=40, run_dir="late", steps=100, runtime="serial", num_envs=2, batch_size=2
    )
    assert evaluate(late, episodes=3, max_steps=41).statistics["game"]["n"] == 3
    with pytest.raises(RunError, match="no game ended within 39 steps"):
        evaluate(late, episodes=3, max_steps=39)
    assert "3 of 3 games had not ended after 50 steps and do not count" in capsys.readouterr().err
    with pytest.raises(RunError, match="no game ended"):
        evaluate(never, episodes=3, num_envs=2, max_steps=50)
    assert "2 of 3 games had not ended after 50 steps and do not count; 1 more" in capsys.readouterr().err


def test_summary_statistics() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    s = summarise(values)
    assert (s["mean"], s["median"], s["min"], s["max"], s["n"], s["distinct"]) == (4.0, 3.0, 1.0, 10.0, 5, 5)
    assert s["sd"] == pytest.approx(np.std(values, ddof=1))
    rng = np.random.default_rng(1)
    means = rng.choice(values, (20_000, 5)).mean(axis=1)  # the bootstrap, by hand
    np.testing.assert_allclose([s["ci_low"], s["ci_high"]], np.percentile(means, [2.5, 97.5]), atol=0.25)
    assert summarise([5.0])["sd"] == 0


def test_a_run_without_checkpoint_cannot_be_evaluated(catch_runs: list[Run], tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text((catch_runs[0].path / "config.toml").read_text())
    with pytest.raises(UserError, match="has no checkpoint yet"):
        bestiary.load(str(tmp_path / "empty")).evaluate(1)


@pytest.fixture(scope="module")
def mazes(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An agent of two ProcGen games, hardly trained."""
    return bestiary.train(
        "procgen/{maze,leaper}:easy",
        run_dir=str(tmp_path_factory.mktemp("procgen") / "two"),
        steps=640,
        save_every=320,
        levels="0:4",
        num_envs=8,
        batch_size=4,
        torso={"name": "mlp", "width": 16},
        popart=True,
    )


def test_a_part_for_each_task_and_range_of_levels(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(mazes, episodes=6, num_envs=3, levels=("0:4", "10:12", "20:23"))
    assert [(p.task, p.levels, p.role) for p in result.parts[:3]] == [
        ("procgen/maze:easy", "0:4", "train"),
        ("procgen/maze:easy", "10:12", "test"),
        ("procgen/maze:easy", "20:23", "test"),
    ]
    assert len(result.parts) == 6
    for part in result.parts:
        levels = [int(e.measures["level"]) for e in part.episodes]
        first, last = map(int, str(part.levels).split(":"))
        counts = np.bincount(np.array(levels) - first, minlength=last - first)
        assert counts.sum() == 6
        assert counts.max() - counts.min() <= 1  # each level equally often
    maze, leaper, both = result.over_splits()
    tests = [p.mean for p in result.parts[1:3]]
    assert maze["test"] == pytest.approx(np.mean(tests))
    assert maze["test_sd"] == pytest.approx(np.std(tests, ddof=1))
    assert maze["normalised_test"] == pytest.approx((np.mean(tests) - 5) / 5)
    assert both["normalised_test"] == pytest.approx((maze["normalised_test"] + leaper["normalised_test"]) / 2)
    assert result.path is not None
    written = json.loads(result.path.read_text())
    assert written["over_splits"][2]["task"] == "all"
    assert written["parts"][1]["statistics"]["normalised"]["n"] == 6
    result.show()
    assert "over the splits" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no common mean"):
        _ = result.mean


def test_every_checkpoint_in_one_table(mazes: Run) -> None:
    result = evaluate(mazes, episodes=2, num_envs=2, every_checkpoint=True)
    assert [(p.checkpoint, p.task) for p in result.parts] == [
        (steps, f"procgen/{game}:easy") for steps in (320, 640) for game in ("maze", "leaper")
    ]
    assert result.path is not None
    with result.path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["checkpoint"] for row in rows} == {"320", "640"}
    assert len(rows) == 8
    assert result.figure == result.path.with_suffix(".png")
    assert imageio.imread(result.figure).std() > 0


def test_checkpoints_that_are_damaged_or_removed_meanwhile_are_left_out(
    catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None is played in another's place, and what was played before is on the disk."""
    run = Run(Path(shutil.copytree(catch_runs[0].path, "r", symlinks=True)))
    steps = [point.steps for point in run.checkpoints]
    first, second, third = run.checkpoints[0], *run.checkpoints[-2:]
    (third.path / "model.safetensors").write_bytes(b"cut off")

    def disturbed(*args: Any, **options: Any) -> Any:
        shutil.rmtree(second.path, ignore_errors=True)
        return play_games(*args, **options)

    monkeypatch.setattr("bestiary.analysis.evaluate.play_games", disturbed)
    result = evaluate(run, episodes=2, num_envs=2, every_checkpoint=True)
    assert [part.checkpoint for part in result.parts] == [s for s in steps if s not in (second.steps, third.steps)]
    assert result.parts[0].checkpoint == first.steps
    assert result.protocol["not_played"] == [f"step {second.steps}"]  # what was damaged never was to be played
    said = capsys.readouterr().err
    assert f"{third.path} is damaged" in said
    assert f"{second.path} was there at first and is no more" in said


def test_what_was_played_before_an_interruption_is_kept(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = catch_runs[1], []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return play_games(*args, **options)

    monkeypatch.setattr("bestiary.analysis.evaluate.play_games", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, episodes=17, num_envs=2, every_checkpoint=True)
    (path,) = (run.path / "evaluations").glob("all-sampled-17*.json")
    protocol, (first, *others) = json.loads(path.read_text())["protocol"], (point.steps for point in run.checkpoints)
    assert protocol["checkpoints"] == [first]
    assert protocol["not_played"] == [f"step {steps}" for steps in others]


def test_splits_of_every_checkpoint_are_kept_apart(mazes: Run) -> None:
    result = evaluate(mazes, num_envs=2, levels=("0:4", "10:12", "20:22"), every_checkpoint=True)
    rows = result.over_splits()
    assert [(row["checkpoint"], row["task"]) for row in rows] == [
        (steps, task) for steps in (320, 640) for task in ("procgen/maze:easy", "procgen/leaper:easy", "all")
    ]
    for row in rows:
        if row["task"] != "all":
            own = [p for p in result.parts if (p.checkpoint, p.task) == (row["checkpoint"], row["task"])]
            assert row["train"] == pytest.approx(own[0].mean)
            assert row["test"] == pytest.approx((own[1].mean + own[2].mean) / 2)
    assert [len([e for e in p.episodes if e.game_over]) for p in result.parts[:3]] == [4, 2, 2]  # one a level


def test_what_levels_are_to_an_agent(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of levels mean something only together with game and mode."""
    config = replace(mazes.config, training=replace(mazes.config.training, valid_levels="50:60", valid_mode="hard"))
    assert _role(config, "procgen/maze:easy", "0:4") == "train"
    assert _role(config, "procgen/maze:hard", "50:60") == "valid"
    assert _role(config, "procgen/maze:hard", "0:4") == "test"
    assert _role(config, "procgen/miner:easy", "0:4") == "test"
    assert _role(config, "procgen/maze:easy", "50:60") == "test"
    assert not capsys.readouterr().err
    assert _role(config, "procgen/maze:hard", "55:65") == ""
    assert "overlaps the levels of the validation, 50:60" in capsys.readouterr().err


def test_a_range_that_is_trained_on_in_one_game_only_is_of_no_kind_for_all(
    mazes: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"episodes": 2, "num_envs": 2}
    result = evaluate(
        mazes, env=("procgen/leaper:easy", "procgen/maze:hard"), levels=("0:4", "10:12", "11:13"), **options
    )
    leaper, maze, both = result.over_splits()
    assert {"train", "test"} <= leaper.keys()
    assert "train" not in maze
    assert "normalised_train" not in both
    assert both["normalised_test"] == pytest.approx(
        np.mean([p.statistics["normalised"]["mean"] for p in result.parts if p.levels != "0:4"])
    )
    assert "--levels 10:12 and 11:13 have levels in common" in capsys.readouterr().err


def test_without_levels_it_says_that_it_played_those_of_the_training(
    mazes: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(mazes, episodes=2, num_envs=2, env=("procgen/leaper:easy",))
    assert [(part.levels, part.role) for part in result.parts] == [("0:4", "train")]
    result.show()
    assert "levels 0:4 (train)" in capsys.readouterr().out


def test_levels_of_the_environment_are_the_commands_own(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"eval {mazes.path} --env.levels 10:12".split()) == 2
    assert "--env.levels 10:12: which levels to play is --levels here" in capsys.readouterr().err


def test_the_same_part_twice_is_refused(mazes: Run) -> None:
    with pytest.raises(UserError, match="--levels 0:4 is there 2 times"):
        evaluate(mazes, levels=("0:4", "0:4"))
    with pytest.raises(UserError, match=r"--env procgen/maze:hard is there 2 times"):
        evaluate(mazes, env=("procgen/maze", "procgen/maze:hard"))


def test_games_given_up_cost_no_others(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Where an environment is past the limit, what it plays counts again once that game has ended."""
    options: dict[str, Any] = {"episodes": 12, "num_envs": 2, "env": ("procgen/leaper:easy",), "levels": ("0:4",)}
    limit = int(np.median([e.game_length for e in evaluate(mazes, **options).episodes]))
    (part,) = evaluate(mazes, max_steps=limit, **options).parts
    games = [e for e in part.episodes if e.game_over]
    assert len(games) + part.given_up == 12
    assert len(games) > 2
    assert part.given_up > 2
    assert all(e.game_length <= limit for e in games)
    assert f"{part.given_up} of 12 games had not ended after {limit} steps" in capsys.readouterr().err


def test_another_game(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (part,) = evaluate(mazes, episodes=2, num_envs=2, env=("procgen/miner:easy",), max_steps=1_000).parts
    assert part.task == "procgen/miner:easy"
    assert "the critic has no value for procgen/miner:easy" in capsys.readouterr().err
    with pytest.raises(UserError, match="another family"):
        evaluate(mazes, env=("atari/Pong",))
    with pytest.raises(UserError, match="upside down"):
        evaluate(mazes, levels=("9:2",))
    evaluate(mazes, episodes=2, num_envs=2, levels=("2:6",))
    assert "--levels 2:6 overlaps the levels of the training" in capsys.readouterr().err


def test_a_normalised_return_is_of_the_games_own_reward() -> None:
    measures = {"reward": 10.0, "trained": 500.0, "true": 3.0}
    episode = Episode(0, "procgen/maze:easy", 500.0, 9, 500.0, 9, True, 0, measures, measures)
    part = Part("procgen/maze:easy", [episode])
    assert part.statistics["normalised"]["mean"] == pytest.approx(1)  # maze: 5 to 10
    assert part.mean == 500


def test_what_a_step_brings_is_taken_over_all_steps() -> None:
    """A short game and a long one: 2 in 1 step and 2 in 9 are 0.4 a step, not 1.1."""
    games = [
        Episode(0, "toy/chain", 2, length, 2, length, True, 0, {}, {"trained": 2.0, "true": -2.0}) for length in (1, 9)
    ]
    found = Part("toy/chain", games).statistics
    assert found["trained_per_step"]["mean"] == pytest.approx(0.4)
    assert found["true_per_step"]["mean"] == pytest.approx(-0.4)
    assert found["trained_per_step"]["ci_low"] < 0.4 < found["trained_per_step"]["ci_high"]
