"""Statistics of evaluated games."""

import numpy as np
import pytest

from bestiary.evaluation.results import TaskResult
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
