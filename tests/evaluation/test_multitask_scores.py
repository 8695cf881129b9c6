"""Comparison of groups over tasks: score matrices, normalisation, tables, CSV file and figure."""

import csv
import io
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.evaluation.aggregates import interquartile_mean, probability_of_improvement, stratified_bootstrap
from bestiary.evaluation.compare import compare_runs
from bestiary.evaluation.learning_curves import final_return, group_runs, panels_by_task
from bestiary.evaluation.multitask_scores import (
    COLUMNS,
    ScoreMatrix,
    compare_groups,
    make_comparison,
    pad_columns,
    plot_profiles,
    score_tables,
    scores_to_csv,
)
from bestiary.runs.run import Run

TASKS = ("atari/Pong", "atari/Breakout", "toy/catch")
RANGES = {"atari/Pong": (-20.7, 14.6), "atari/Breakout": (1.7, 30.5)}


def matrices() -> list[ScoreMatrix]:
    rng = np.random.default_rng(0)
    x = rng.normal([10, 30, 0.5], [3, 9, 0.1], (4, 3))
    y = rng.normal([0, 20, 0.5], [3, 9, 0.1], (5, 3))
    return [ScoreMatrix("x", TASKS, x), ScoreMatrix("y", TASKS, y)]


def test_only_tasks_with_a_scale_are_normalised() -> None:
    comparison = make_comparison(matrices(), RANGES, "0: random, 1: human")
    x, _ = comparison.normalised
    assert x.tasks == TASKS[:2]
    np.testing.assert_allclose(x.scores[:, 0], (matrices()[0].scores[:, 0] + 20.7) / 35.3)
    assert make_comparison(matrices(), {"atari/Pong": (-20.7, 14.6)}).normalised == []  # one task is not enough


def test_records_equal_direct_calls() -> None:
    comparison = make_comparison(matrices(), RANGES)
    rows = list(csv.DictReader(io.StringIO(scores_to_csv(comparison))))
    assert list(rows[0]) == COLUMNS
    iqm = next(row for row in rows if (row["statistic"], row["group"]) == ("IQM", "x"))
    scores = comparison.normalised[0].scores
    interval = stratified_bootstrap(interquartile_mean, scores)
    assert interval is not None
    assert float(iqm["value"]) == pytest.approx(float(interquartile_mean(scores)), rel=1e-4)
    assert [float(iqm["ci_low"]), float(iqm["ci_high"])] == pytest.approx([float(v) for v in interval], rel=1e-4)
    assert (iqm["tasks"], iqm["seeds"]) == ("2", "4")
    assert iqm["interval"].startswith("stratified percentile bootstrap")
    (pair,) = (row for row in rows if row["statistic"] == "probability of improvement")
    x, y = matrices()
    assert float(pair["value"]) == pytest.approx(float(probability_of_improvement(x.scores, y.scores)), rel=1e-4)
    assert (pair["tasks"], pair["seeds"]) == ("3", "4 / 5")  # ranks need no scale, so all three tasks count
    profile = [row for row in rows if (row["statistic"], row["group"]) == ("performance profile", "y")]
    assert len(profile) == 101
    assert float(profile[-1]["value"]) == 0
    fractions = [float(row["value"]) for row in profile]
    assert fractions == sorted(fractions, reverse=True)


def test_tables_state_seeds_scale_and_method() -> None:
    scores, improvement = score_tables(make_comparison(matrices(), RANGES, "0: random, 1: human"))
    text = " ".join(scores.captions)
    for word in ("human", "catch", "seeds", "stratified", "fewer than 10 seeds per task"):
        assert word in text
    assert scores.header == ["group", "seeds", "IQM", "median", "mean", "optimality gap"]
    assert [row[:2] for row in scores.rows] == [["x", "4"], ["y", "5"]]
    assert improvement.rows[0][:2] == ["x", "y"]
    assert "over seeds" in " ".join(improvement.captions)
    assert "fewer than 10 seeds" in improvement.captions[-1]


def test_pairs_without_an_interval_have_no_warning_about_narrow_intervals() -> None:
    x, y = matrices()
    (improvement,) = score_tables(make_comparison([x, ScoreMatrix("y", TASKS, y.scores[:1])], {}))
    assert improvement.rows[0][3] == "none"
    assert "narrow" not in " ".join(improvement.captions)


def test_one_seed_has_no_interval() -> None:
    single = [ScoreMatrix(m.label, m.tasks, m.scores[:1]) for m in matrices()]
    comparison = make_comparison(single, RANGES)
    assert {record["ci_low"] for record in comparison.records} == {None}
    assert {record["interval"] for record in comparison.records} == {"none, because n = 1"}
    assert "(none)" in score_tables(comparison)[0].rows[0][2]
    plot_profiles(comparison, Path("p.png"))
    assert min(imageio.imread("p.png").shape[:2]) > 500


def test_columns_of_different_lengths_are_padded() -> None:
    found = pad_columns([[1.0, 2.0], [3.0]])
    np.testing.assert_array_equal(found, [[1, 3], [2, np.nan]])
    assert ScoreMatrix("x", ("a", "b"), found).seeds == "1 to 2"


def test_final_returns_of_runs_are_compared(catch_runs: list[Run]) -> None:
    comparison = compare_groups({"": group_runs(catch_runs)})
    assert comparison is not None
    assert comparison.normalised == []  # toy/catch has no scale
    a, b = comparison.raw
    assert a.tasks == ("toy/catch",)
    assert a.scores[:, 0].tolist() == [final_return(run) for run in catch_runs[:2]]
    assert (a.seeds, b.seeds) == ("2", "1")
    assert compare_groups({"": group_runs(catch_runs[:2])}) is None  # one group and one task


def test_scores_of_multi_task_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of a multi-task agent in two games of ProcGen, whose constants are 3 to 10 and 2.5 to 64."""
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 4, "torso": "mlp", "steps": 2_400}
    tasks = ("procgen/leaper:easy", "procgen/starpilot:easy")
    runs = [bestiary.train(*tasks, run_dir=f"r{seed}", seed=seed, **options) for seed in (1, 2)]
    comparison = compare_groups(panels_by_task(runs))
    assert comparison is not None
    (found,) = comparison.normalised
    assert found.whole_runs
    for row, run in enumerate(runs):
        expected = [(final_return(run, tasks[0]) - 3) / 7, (final_return(run, tasks[1]) - 2.5) / 61.5]
        np.testing.assert_allclose(found.scores[row], expected)
    compare_runs(runs, Path("c.png"))
    assert "scores over 2 tasks" in capsys.readouterr().out
    assert min(imageio.imread("c-profiles.png").shape[:2]) > 500
    with Path("c-scores.csv").open() as file:
        methods = {row["interval"] for row in csv.DictReader(file)}
    assert methods == {"percentile bootstrap of whole runs, 2000 resamples"}
