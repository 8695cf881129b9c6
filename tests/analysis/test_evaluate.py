"""Evaluation: the games that count, the statistics, and what is written down."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import bestiary
from bestiary.analysis.evaluate import evaluate, summarise
from bestiary.errors import RunError, UserError
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
    assert "3 of 3 games had not ended" in capsys.readouterr().err


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
