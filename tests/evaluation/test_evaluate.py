"""Evaluation: which games count, tasks, levels and checkpoints, and the written files."""

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
from bestiary.cli.main import run_command
from bestiary.evaluation.evaluate import evaluate, level_role
from bestiary.evaluation.game_runner import play_games
from bestiary.evaluation.result_tables import print_evaluation
from bestiary.runs.recordings import open_recording
from bestiary.runs.run import Run
from bestiary.utils.errors import RunError, UserError


def test_environments_play_equal_numbers_of_games(catch_runs: list[Run]) -> None:
    result = evaluate(catch_runs[0], episodes=10, num_envs=4)
    counts = np.bincount([e.env for e in result.episodes])
    np.testing.assert_array_equal(counts, [3, 3, 2, 2])
    assert result.statistics["game_return"]["n"] == 10


def test_files_contain_the_result_and_the_protocol(catch_runs: list[Run]) -> None:
    result = evaluate(catch_runs[0], episodes=20, greedy=True, seed=3, checkpoint=2_000)
    assert result.path is not None
    written = json.loads(result.path.read_text())
    protocol = written["protocol"]
    assert protocol["policy"] == "greedy"
    assert (protocol["games"], protocol["seed"], protocol["environments"]) == (20, 3, ["toy/catch"])
    assert abs(protocol["checkpoint_steps"] - 2_000) < 400
    with result.path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert np.mean([float(r["game_return"]) for r in rows]) == pytest.approx(
        written["statistics"]["game_return"]["mean"]
    )


def test_same_seed_gives_the_same_games_and_a_new_file(catch_runs: list[Run]) -> None:
    one, two, other = (evaluate(catch_runs[0], episodes=30, seed=s) for s in (7, 7, 8))
    assert one.episodes == two.episodes != other.episodes
    assert one.path != two.path


def test_episodes_end_with_a_life_and_games_with_game_over() -> None:
    run = bestiary.train("atari/Breakout", run_dir="r", steps=80, num_envs=4, batch_size=4)
    result = evaluate(run, episodes=3, num_envs=3)
    assert result.statistics["game_return"]["n"] == 3
    assert result.statistics["episode_return"]["n"] == 15  # five lives per game
    for env in range(3):
        episodes = [e for e in result.episodes if e.env == env]
        assert sum(e.episode_return for e in episodes) == pytest.approx(episodes[-1].game_return)
        assert [e.game_over for e in episodes] == [False] * 4 + [True]


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


def test_games_over_the_step_limit_do_not_count_and_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    never = bestiary.train("endless.py:Endless", run_dir="never", steps=100, runtime="serial", num_envs=2, batch_size=2)
    with pytest.raises(RunError, match="no game ended within 50 steps"):
        evaluate(never, episodes=3, max_steps=50)
    late = bestiary.train(
        "endless.py:Endless", every=40, run_dir="late", steps=100, runtime="serial", num_envs=2, batch_size=2
    )
    assert evaluate(late, episodes=3, max_steps=41).statistics["game_return"]["n"] == 3
    with pytest.raises(RunError, match="no game ended within 39 steps"):
        evaluate(late, episodes=3, max_steps=39)
    assert "3 of 3 games had not ended after 50 steps and are not included" in capsys.readouterr().err
    with pytest.raises(RunError, match="no game ended"):
        evaluate(never, episodes=3, num_envs=2, max_steps=50)
    assert "2 of 3 games had not ended after 50 steps and are not included; 1 more" in capsys.readouterr().err


def test_run_without_checkpoint_is_refused(catch_runs: list[Run], tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text((catch_runs[0].path / "config.toml").read_text())
    with pytest.raises(UserError, match="has no checkpoint yet"):
        evaluate(bestiary.load(str(tmp_path / "empty")), episodes=1)


@pytest.fixture(scope="module")
def mazes(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An agent of two ProcGen games after a short training."""
    return bestiary.train(
        "procgen/{maze,leaper}:easy",
        run_dir=str(tmp_path_factory.mktemp("procgen") / "two"),
        steps=640,
        save_every=320,
        levels="0:4",
        num_envs=8,
        batch_size=4,
        torso={"name": "mlp", "width": 16},
        critic="popart",
    )


def test_result_for_each_task_and_range_of_levels(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(mazes, episodes=6, num_envs=3, levels=("0:4", "10:12", "20:23"))
    assert [(p.task, p.levels, p.role) for p in result.results[:3]] == [
        ("procgen/maze:easy", "0:4", "train"),
        ("procgen/maze:easy", "10:12", "test"),
        ("procgen/maze:easy", "20:23", "test"),
    ]
    assert len(result.results) == 6
    for task_result in result.results:
        levels = [int(e.measures["level"]) for e in task_result.episodes]
        first, last = map(int, str(task_result.levels).split(":"))
        counts = np.bincount(np.array(levels) - first, minlength=last - first)
        assert counts.sum() == 6
        assert counts.max() - counts.min() <= 1  # each level equally often
    maze, leaper, both = result.split_summary()
    tests = [p.mean for p in result.results[1:3]]
    assert maze["test"] == pytest.approx(np.mean(tests))
    assert maze["test_sd"] == pytest.approx(np.std(tests, ddof=1))
    assert maze["normalised_test"] == pytest.approx((np.mean(tests) - 5) / 5)
    assert both["normalised_test"] == pytest.approx((maze["normalised_test"] + leaper["normalised_test"]) / 2)
    assert result.path is not None
    written = json.loads(result.path.read_text())
    assert written["split_summary"][2]["task"] == "all"
    assert written["results"][1]["statistics"]["normalised_return"]["n"] == 6
    print_evaluation(result)
    assert "mean over the splits" in capsys.readouterr().out
    with pytest.raises(ValueError, match="no common statistics"):
        _ = result.mean


def test_every_checkpoint_is_evaluated_into_one_table(mazes: Run) -> None:
    result = evaluate(mazes, episodes=2, num_envs=2, every_checkpoint=True)
    assert [(p.checkpoint, p.task) for p in result.results] == [
        (steps, f"procgen/{game}:easy") for steps in (320, 640) for game in ("maze", "leaper")
    ]
    assert result.path is not None
    with result.path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["checkpoint"] for row in rows} == {"320", "640"}
    assert len(rows) == 8
    assert result.figure == result.path.with_suffix(".png")
    assert imageio.imread(result.figure).std() > 0


def test_checkpoints_that_are_damaged_or_removed_meanwhile_are_skipped(
    catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other checkpoint is played instead, and the results of the others are saved."""
    run = Run(Path(shutil.copytree(catch_runs[0].path, "r", symlinks=True)))
    steps = [point.steps for point in run.checkpoints]
    first, second, third = run.checkpoints[0], *run.checkpoints[-2:]
    (third.path / "model.safetensors").write_bytes(b"cut off")

    def play_and_remove(*args: Any, **options: Any) -> Any:
        shutil.rmtree(second.path, ignore_errors=True)
        return play_games(*args, **options)

    monkeypatch.setattr("bestiary.evaluation.evaluate.play_games", play_and_remove)
    result = evaluate(run, episodes=2, num_envs=2, every_checkpoint=True)
    assert [r.checkpoint for r in result.results] == [s for s in steps if s not in (second.steps, third.steps)]
    assert result.results[0].checkpoint == first.steps
    assert result.protocol["not_played"] == [f"step {second.steps}"]  # damaged checkpoints are not listed
    warnings = capsys.readouterr().err
    assert f"{third.path} is skipped because it is damaged" in warnings
    assert f"{second.path} is skipped because it has been removed" in warnings


def test_results_before_an_interruption_are_kept(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = catch_runs[1], []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return play_games(*args, **options)

    monkeypatch.setattr("bestiary.evaluation.evaluate.play_games", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, episodes=17, num_envs=2, every_checkpoint=True)
    (path,) = (run.path / "evaluations").glob("all-sampled-17*.json")
    protocol, (first, *others) = json.loads(path.read_text())["protocol"], (point.steps for point in run.checkpoints)
    assert protocol["checkpoints"] == [first]
    assert protocol["not_played"] == [f"step {steps}" for steps in others]


def test_splits_are_summarised_for_each_checkpoint(mazes: Run) -> None:
    result = evaluate(mazes, num_envs=2, levels=("0:4", "10:12", "20:22"), every_checkpoint=True)
    rows = result.split_summary()
    assert [(row["checkpoint"], row["task"]) for row in rows] == [
        (steps, task) for steps in (320, 640) for task in ("procgen/maze:easy", "procgen/leaper:easy", "all")
    ]
    for row in rows:
        if row["task"] != "all":
            own = [p for p in result.results if (p.checkpoint, p.task) == (row["checkpoint"], row["task"])]
            assert row["train"] == pytest.approx(own[0].mean)
            assert row["test"] == pytest.approx((own[1].mean + own[2].mean) / 2)
    assert [len([e for e in p.episodes if e.game_over]) for p in result.results[:3]] == [4, 2, 2]  # one game per level


def test_role_of_levels(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers are other levels in another game or mode."""
    config = replace(mazes.config, training=replace(mazes.config.training, valid_levels="50:60", valid_mode="hard"))
    assert level_role(config, "procgen/maze:easy", "0:4") == "train"
    assert level_role(config, "procgen/maze:hard", "50:60") == "valid"
    assert level_role(config, "procgen/maze:hard", "0:4") == "test"
    assert level_role(config, "procgen/miner:easy", "0:4") == "test"
    assert level_role(config, "procgen/maze:easy", "50:60") == "test"
    assert not capsys.readouterr().err
    assert level_role(config, "procgen/maze:hard", "55:65") == ""
    assert "overlaps the validation levels 50:60" in capsys.readouterr().err


def test_range_with_different_roles_in_two_games_is_not_in_the_common_summary(
    mazes: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"episodes": 2, "num_envs": 2}
    result = evaluate(
        mazes, env=("procgen/leaper:easy", "procgen/maze:hard"), levels=("0:4", "10:12", "11:13"), **options
    )
    leaper, maze, both = result.split_summary()
    assert {"train", "test"} <= leaper.keys()
    assert "train" not in maze
    assert "normalised_train" not in both
    assert both["normalised_test"] == pytest.approx(
        np.mean([p.statistics["normalised_return"]["mean"] for p in result.results if p.levels != "0:4"])
    )
    assert "--levels 10:12 and 11:13 overlap" in capsys.readouterr().err


def test_default_levels_are_those_of_the_training(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(mazes, episodes=2, num_envs=2, env=("procgen/leaper:easy",))
    assert [(r.levels, r.role) for r in result.results] == [("0:4", "train")]
    print_evaluation(result)
    assert "levels 0:4 (train)" in capsys.readouterr().out


def test_levels_option_of_the_environment_is_refused(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(f"eval {mazes.path} --env.levels 10:12".split()) == 2
    message = capsys.readouterr().err
    assert "--env.levels 10:12: " in message
    assert "use --levels" in message


def test_duplicate_environments_and_levels_are_refused(mazes: Run) -> None:
    with pytest.raises(UserError, match="--levels 0:4 is given 2 times"):
        evaluate(mazes, levels=("0:4", "0:4"))
    with pytest.raises(UserError, match="--env procgen/maze:hard is given 2 times"):
        evaluate(mazes, env=("procgen/maze", "procgen/maze:hard"))


def test_unfinished_games_do_not_prevent_later_games(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """After a game over the step limit has ended, the next games of its environment count again."""
    options: dict[str, Any] = {"episodes": 12, "num_envs": 2, "env": ("procgen/leaper:easy",), "levels": ("0:4",)}
    limit = int(np.median([e.game_length for e in evaluate(mazes, **options).episodes]))
    (result,) = evaluate(mazes, max_steps=limit, **options).results
    games = [e for e in result.episodes if e.game_over]
    assert len(games) + result.unfinished == 12
    assert len(games) > 2
    assert result.unfinished > 2
    assert all(e.game_length <= limit for e in games)
    assert f"{result.unfinished} of 12 games had not ended after {limit} steps" in capsys.readouterr().err


def test_recorded_games_with_a_training_reward_have_levels(tmp_path: Path) -> None:
    """The level is read from the environment inside the wrappers of the reward and of the recording."""
    run = bestiary.train(
        "procgen/leaper:easy",
        run_dir=str(tmp_path / "run"),
        reward="reward=2",
        steps=40,
        levels="10:20",
        num_envs=2,
        batch_size=2,
        torso={"name": "mlp", "width": 16},
    )
    evaluate(run, episodes=3, num_envs=1, record=True)
    (path,) = (run.path / "evaluations").glob("*.csv")
    with path.open() as file:
        levels = [int(row["level"]) for row in csv.DictReader(file)]
    assert len(levels) == 3
    assert all(10 <= level < 20 for level in levels)
    (recording,) = (run.path / "recordings").glob("*.json")
    assert len(open_recording(recording).games) == 3


def test_agent_is_evaluated_in_another_game(mazes: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = evaluate(mazes, episodes=2, num_envs=2, env=("procgen/miner:easy",), max_steps=1_000).results
    assert result.task == "procgen/miner:easy"
    assert "the critic was not trained on procgen/miner:easy" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--env atari/Pong: .*family"):
        evaluate(mazes, env=("atari/Pong",))
    with pytest.raises(UserError, match="the start is above the end"):
        evaluate(mazes, levels=("9:2",))
    evaluate(mazes, episodes=2, num_envs=2, levels=("2:6",))
    assert "--levels 2:6 overlaps the training levels" in capsys.readouterr().err
