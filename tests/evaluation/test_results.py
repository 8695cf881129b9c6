"""Statistics of evaluated games."""

from typing import Any

import numpy as np
import pytest

from bestiary.evaluation.results import Evaluation, TaskResult
from bestiary.evaluation.statistics import summarise
from bestiary.rollout import Episode


def test_summary_equals_numpy() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 10.0]
    s = summarise(values)
    assert (s["mean"], s["median"], s["min"], s["max"], s["n"], s["distinct"]) == (4.0, 3.0, 1.0, 10.0, 5, 5)
    assert s["sd"] == pytest.approx(np.std(values, ddof=1))


def test_normalised_return_uses_the_reward_of_the_environment() -> None:
    measures = {"reward": 10.0, "training": 500.0, "true": 3.0}
    episode = Episode(0, "procgen/maze:easy", 500.0, 9, 500.0, 9, True, 0, measures, measures)
    result = TaskResult("procgen/maze:easy", [episode])
    assert result.statistics["normalised_return"]["mean"] == pytest.approx(1)  # maze: 5 is 0, 10 is 1
    assert result.mean == 500


def test_reward_per_step_weights_all_steps_equally() -> None:
    """Returns of 2 in 1 step and of 2 in 9 steps are 0.4 per step, not 1.1, the mean of both games."""
    games = [
        Episode(0, "toy/chain", 2, length, 2, length, True, 0, {}, {"training": 2.0, "true": -2.0}) for length in (1, 9)
    ]
    statistics = TaskResult("toy/chain", games).statistics
    assert statistics["training_reward_per_step"]["mean"] == pytest.approx(0.4)
    assert statistics["true_reward_per_step"]["mean"] == pytest.approx(-0.4)
    assert statistics["training_reward_per_step"]["ci_low"] < 0.4 < statistics["training_reward_per_step"]["ci_high"]


def make_result(returns: list[float], **labels: Any) -> TaskResult:
    games = [Episode(0, "toy/chain", value, 9, value, 9, True, 0, {}, {}) for value in returns]
    return TaskResult("toy/chain", games, **labels)


def test_repr_is_one_line_with_mean_interval_and_number_of_games() -> None:
    result = make_result([float(i % 3) for i in range(300)], unfinished=2)
    for text in (repr(result), repr(Evaluation({"seed": 0}, [result]))):
        assert "toy/chain" in text
        assert "1.00" in text
        assert "300 games" in text
        assert "2 unfinished" in text
        assert "\n" not in text
        assert len(text) < 120
    one_game = repr(make_result([4.0]))
    assert "(" not in one_game.removeprefix("TaskResult(")  # one game has no interval
    assert "n = 1 game)" in one_game


def test_repr_of_many_results_stays_short() -> None:
    results = [make_result([1.0, 2.0], checkpoint=step, levels="0:500") for step in range(0, 900_000, 100_000)]
    text = repr(Evaluation({}, results))
    assert "levels 0:500 step 100000" in text
    assert "6 more results" in text
    assert len(text) < 400
    assert repr(Evaluation({}, [])) == "Evaluation(no results)"
