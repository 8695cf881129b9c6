"""Statistics of a study: intervals over seeds, normalisation over environments, and comparison of variants."""

from pathlib import Path

import pytest

from bestiary.studies.results import TrialResult, compare_variants, score_ranges, summarise_variants
from bestiary.studies.study import Study, read_study
from bestiary.studies.trial import Trial, make_trials

TWO_ENVIRONMENTS = """
seeds = [1, 2]

[base]
steps = 800

[grid]
env = ["toy/bandit", "toy/chain"]

[normalise]
"toy/bandit" = [0.5, 1]
"toy/chain" = [-1, 1]
"""


def finished(trial: Trial, final_return: float) -> TrialResult:
    return TrialResult(trial, trial.config.envs[0], True, final_return)


def test_results_over_environments_use_normalised_returns() -> None:
    Path("s.toml").write_text(TWO_ENVIRONMENTS)
    study: Study = read_study(Path("s.toml"))
    finals = [0.5, 0.75, 0.0, 1.0]  # normalised: 0, 0.5, 0.5, 1
    trials = make_trials(study, Path("runs/s"))
    results = [finished(trial, final) for trial, final in zip(trials, finals, strict=True)]
    bandit, chain, both = summarise_variants(study, results)
    assert (bandit.statistics()["mean"], chain.statistics()["mean"]) == (0.625, 0.5)
    assert both.label == "all (normalised, 2 environments)"
    assert both.statistics()["mean"] == 0.5
    assert both.statistics()["iqm"] == 0.5
    assert both.statistics()["min"] == 0
    # Both environments have the variance 1/16 of their mean, so there are 2 degrees of freedom.
    assert both.statistics()["ci_high"] == pytest.approx(0.5 + 4.303 * (2 / 16) ** 0.5 / 2, 1e-3)
    assert both.statistics()["interval"].startswith("Student's t with Satterthwaite's degrees of freedom")
    # Two seeds in one environment: Student's t with one degree of freedom, mean 0.625 and standard error 0.125.
    statistics = bandit.statistics()
    assert statistics["interval"] == "Student's t, over seeds"
    assert [statistics["ci_low"], statistics["ci_high"]] == pytest.approx(
        [0.625 - 12.706 / 8, 0.625 + 12.706 / 8], 1e-4
    )
    # Without results of one environment, there is no result over all environments.
    unfinished = [TrialResult(trial, trial.config.envs[0], False) for trial in trials[2:]]
    assert len(summarise_variants(study, [*results[:2], *unfinished])) == 2


def test_many_seeds_in_each_environment_have_a_bootstrap_interval() -> None:
    Path("s.toml").write_text(TWO_ENVIRONMENTS.replace("[1, 2]", str(list(range(1, 21)))))
    study = read_study(Path("s.toml"))
    trials = make_trials(study, Path("runs/s"))
    results = [finished(trial, trial.seed / 20) for trial in trials]
    assert summarise_variants(study, results)[-1].statistics()["interval"].startswith("stratified percentile bootstrap")


def test_one_seed_has_no_interval() -> None:
    Path("s.toml").write_text(TWO_ENVIRONMENTS.replace("[1, 2]", "[1]"))
    study = read_study(Path("s.toml"))
    trials = make_trials(study, Path("runs/s"))
    results = [finished(trial, final) for trial, final in zip(trials, (0.5, 0.0), strict=True)]
    for summary in summarise_variants(study, results):
        assert "ci_low" not in summary.statistics()
        assert summary.statistics()["interval"] == "none, because n = 1"


def test_environments_with_score_ranges_need_no_normalise_table() -> None:
    """The constants of ProcGen in mode easy: 5 to 10 in maze, 3 to 10 in leaper."""
    text = TWO_ENVIRONMENTS.partition("[normalise]")[0].replace("toy/bandit", "procgen/maze:easy")
    Path("s.toml").write_text(text.replace("toy/chain", "procgen/leaper:easy") + '"algo.lr" = [0.1, 0.2]\n')
    study = read_study(Path("s.toml"))
    assert score_ranges(study) == {"procgen/maze:easy": (5, 10), "procgen/leaper:easy": (3, 10)}
    trials = make_trials(study, Path("runs/s"))
    finals = {("maze", "0.1"): (5, 6), ("maze", "0.2"): (10, 9), ("leaper", "0.1"): (3, 10), ("leaper", "0.2"): (3, 3)}
    results = []
    for trial in trials:
        (values,) = (v for (game, lr), v in finals.items() if game in trial.name and f"lr={lr}" in trial.name)
        results.append(finished(trial, values[trial.seed - 1]))
    summaries = summarise_variants(study, results)
    slow, fast = summaries[-2:]
    assert slow.statistics()["mean"] == pytest.approx((0 + 0.2 + 0 + 1) / 4)
    assert fast.statistics()["mean"] == pytest.approx((1 + 0.8 + 0 + 0) / 4)
    comparison = compare_variants(study, summaries)
    assert comparison is not None
    found = {(r["statistic"], r["group"]): r["value"] for r in comparison.records if r["threshold"] == ""}
    assert found["mean", "algo.lr=0.2"] == pytest.approx(0.45)
    assert found["optimality gap", "algo.lr=0.1"] == pytest.approx(0.7)
    # Maze: both runs with 0.2 are better. Leaper: 3 ties with 3 and 3, and 10 is better than both.
    assert found["probability of improvement", "algo.lr=0.1"] == pytest.approx((0 + (0.5 * 2 + 2) / 4) / 2)


def test_score_ranges_do_not_apply_to_other_rewards() -> None:
    base = 'seeds = [1]\n[base]\nsteps = 800\nreward = "scaled:2"\n'
    Path("s.toml").write_text(base + '[grid]\nenv = ["procgen/maze:easy", "procgen/heist:easy"]\n')
    assert score_ranges(read_study(Path("s.toml"))) == {}
