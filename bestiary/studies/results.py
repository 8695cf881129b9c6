"""Compute the results of a study: statistics of each variant over its seeds, and learning curves.

The final return of a run is the mean return of the games that ended in the last tenth of the training. Runs that are
not trained to the end have no final return.

A study can train the same variants in several environments. If each environment has a known score range, the study also
has a summary of each variant: its normalised returns over all environments. A score range consists of the return that
is normalised to 0 and the return that is normalised to 1. The score ranges come from the table `[normalise]` of the
study file, or from the definitions of the environments.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bestiary.envs import lookup_score_range
from bestiary.evaluation.aggregates import STRATIFIED_BOOTSTRAP, interquartile_mean, mean_score, stratified_bootstrap
from bestiary.evaluation.learning_curves import (
    GAME_TRUE_RETURN,
    CurveGroup,
    envs_in_first_game,
    final_return,
    load_game_returns,
    make_curve_group,
)
from bestiary.evaluation.multitask_scores import ScoreComparison, ScoreMatrix, make_comparison, pad_columns
from bestiary.evaluation.statistics import T_INTERVAL_BELOW, Interval, interval_over_tasks, mean_interval
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial
from bestiary.utils.errors import UserError


@dataclass(frozen=True)
class TrialResult:
    """Results of one run. A value is None if it is not known, for example because the run is not trained to the end."""

    trial: Trial
    is_trained: bool
    final_return: float | None = None
    eval_return: float | None = None
    true_final_return: float | None = None
    true_eval_return: float | None = None
    seconds: float | None = None  # training time
    envs_in_first_game: int | None = None  # environments that had not finished a game at the end of the training


@dataclass(frozen=True)
class VariantResult:
    """One row of results.csv: results of a variant in one environment, or normalised results over all environments."""

    label: str
    environments: tuple[str, ...]
    parameters: tuple[int, ...]  # numbers of network parameters; they may differ between environments
    trials: list[TrialResult]  # all runs of the variant, including those that are not trained yet
    # One array [R] per environment: final returns of R trained runs. Normalised if there are several environments.
    scores: list[np.ndarray] = field(default_factory=list)

    @property
    def num_trained(self) -> int:
        return sum(result.is_trained for result in self.trials)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this row as a dict: name -> value. Leave out statistics that are not known.

        `ci_low` and `ci_high` are the 95 % interval of the mean over seeds, and `interval` is its method.
        """
        known: dict[str, Any] = {}
        if self.scores:
            matrix = pad_columns(self.scores)
            known["mean"] = float(mean_score(matrix))
            known |= self._interval(matrix)
            known["iqm"] = float(interquartile_mean(matrix))
            known["min"] = float(np.nanmin(matrix))
            known["max"] = float(np.nanmax(matrix))
        for name in ("true_final_return", "eval_return", "true_eval_return"):
            values = [value for result in self.trials if (value := getattr(result, name)) is not None]
            if values and len(self.environments) == 1:
                known[name] = float(np.mean(values))
        timed = [(result.seconds, result.trial.run.steps) for result in self.trials if result.seconds]
        if timed:
            seconds, steps = np.sum(timed, axis=0)
            known["minutes_per_run"] = float(seconds) / len(timed) / 60
            known["steps_per_second"] = float(steps / seconds)
        return known

    def _interval(self, matrix: np.ndarray) -> dict[str, Any]:
        """Return the 95 % interval of the mean and its method, by name.

        If an environment has only one run, there is no interval. The result then contains only the key `interval`.
        """
        if len(self.scores) == 1:
            interval = mean_interval(self.scores[0])
        elif min(map(len, self.scores)) < T_INTERVAL_BELOW:
            interval = interval_over_tasks(self.scores)
        else:
            found = stratified_bootstrap(mean_score, matrix)
            assert found is not None  # each environment has several runs
            interval = Interval(float(found[0]), float(found[1]), STRATIFIED_BOOTSTRAP)
        if interval.low is None:
            return {"interval": interval.method}
        return {"ci_low": interval.low, "ci_high": interval.high, "interval": f"{interval.method}, over seeds"}


def collect_results(trials: list[Trial]) -> list[TrialResult]:
    """Read the results of all trials from their run folders. Trials that are not trained to the end have no results."""
    return [_read_result(trial) if trial.is_trained else TrialResult(trial, False) for trial in trials]


def _read_result(trial: Trial) -> TrialResult:
    final = true_final = seconds = None
    with suppress(UserError):  # raised if no game was finished
        final = final_return(trial.run)
        if GAME_TRUE_RETURN in trial.run.episodes:
            true_final = final_return(trial.run, column=GAME_TRUE_RETURN)
    with suppress(OSError, ValueError, KeyError):  # raised if the checkpoint is damaged
        seconds = float(trial.run.checkpoints[-1].load_state()["seconds"])
    evaluation = trial.evaluation() or {}
    return TrialResult(
        trial,
        True,
        final_return=final,
        eval_return=evaluation.get("mean"),
        true_final_return=true_final,
        true_eval_return=evaluation.get("true_mean"),
        seconds=seconds,
        envs_in_first_game=envs_in_first_game(trial.run),
    )


def summarise_variants(study: Study, results: list[TrialResult]) -> list[VariantResult]:
    """Return the result of each variant in its environment.

    If the returns of all environments can be normalised, append the results over all environments. A variant has a
    result over all environments only if it has a trained run in each environment.
    """
    summaries = []
    for variant in study.variants:
        own = [result for result in results if result.trial.variant is variant]
        scores = _final_returns(own)
        envs = variant.config.envs
        summaries.append(VariantResult(variant.name, envs, (variant.parameters,), own, [scores] if len(scores) else []))
    ranges = score_ranges(study)
    across_envs = _variants_across_envs(summaries) if ranges else {}
    for name, members in across_envs.items():
        if len(members) > 1:
            summaries.append(_normalised_summary(name, members, ranges))
    return summaries


def score_ranges(study: Study) -> dict[str, tuple[float, float]]:
    """Return {environment: (return normalised to 0, return normalised to 1)}; {} if an environment has no known range.

    The ranges come from the table [normalise] of the study file. Without this table, they come from the environments,
    but only if all variants are trained on the environment's own reward.
    """
    if study.normalise or any(variant.config.rewards.training is not None for variant in study.variants):
        return study.normalise
    ranges = {variant.config.envs[0]: lookup_score_range(variant.config.envs[0]) for variant in study.variants}
    known = {env: (found.low, found.high) for env, found in ranges.items() if found is not None}
    return known if len(known) == len(ranges) else {}


def _variants_across_envs(summaries: list[VariantResult]) -> dict[str, list[VariantResult]]:
    """Return {name without environment: results of the variant in each environment}.

    Variants that do not have results in all environments are left out.
    """
    envs = {summary.environments for summary in summaries}
    by_name: dict[str, list[VariantResult]] = {}
    for summary in summaries:
        if summary.scores and len(summary.environments) == 1:
            by_name.setdefault(summary.trials[0].trial.variant.name_without_env, []).append(summary)
    return {name: members for name, members in by_name.items() if len(members) == len(envs)}


def compare_variants(study: Study, summaries: list[VariantResult]) -> ScoreComparison | None:
    """Return the comparison of variants by their final returns in all environments.

    Return None if the variants are trained on different rewards, because their returns are then not comparable. Also
    return None if there is only one variant, unless its returns are normalised in at least two environments: then its
    scores can be averaged over the environments.
    """
    if len({variant.config.rewards.training for variant in study.variants}) > 1:
        return None
    single = [summary for summary in summaries if len(summary.environments) == 1]
    by_name = _variants_across_envs(single)
    raw = [
        ScoreMatrix(name, tuple(m.environments[0] for m in members), pad_columns([m.scores[0] for m in members]))
        for name, members in by_name.items()
    ]
    comparison = make_comparison(raw, score_ranges(study), _describe_scale(study))
    return comparison if len(raw) > 1 or comparison.normalised else None


def _describe_scale(study: Study) -> str:
    if study.normalise:
        return "0 and 1: [normalise] of the study file"
    ranges = [lookup_score_range(variant.config.envs[0]) for variant in study.variants]
    return " / ".join(dict.fromkeys(found.meaning for found in ranges if found is not None))


def _normalised_summary(
    name: str, members: list[VariantResult], normalise: dict[str, tuple[float, float]]
) -> VariantResult:
    """Return the result over several environments, after normalising the returns of each environment.

    `members` are the results in single environments. `normalise` maps an environment to (return that becomes 0, return
    that becomes 1).
    """
    scores = []
    for member in members:
        low, high = normalise[member.environments[0]]
        scores.append((member.scores[0] - low) / (high - low))
    return VariantResult(
        f"{name} (normalised, {len(members)} environments)",
        tuple(member.environments[0] for member in members),
        tuple(dict.fromkeys(member.parameters[0] for member in members)),
        [result for member in members for result in member.trials],
        scores,
    )


def _final_returns(results: Iterable[TrialResult]) -> np.ndarray:
    return np.array([result.final_return for result in results if result.final_return is not None])


def learning_curves(study: Study, trials: list[Trial]) -> dict[str, dict[str, list[CurveGroup]]]:
    """Return {environment: {title of a panel: curves}}. A curve is the mean of a variant with a band over its seeds.

    Unfinished runs are included. Usually there is only one panel, with the title "". If the study has named variants
    and a grid, there is one panel for each combination of grid values.
    """
    curves: dict[str, dict[str, list[CurveGroup]]] = {}
    for variant in study.variants:
        runs = [trial.run for trial in trials if trial.variant is variant and _has_finished_games(trial)]
        if runs:
            panels = curves.setdefault(variant.config.envs[0], {})
            panel = variant.grid_point if variant.own_name else ""
            panels.setdefault(panel, []).append(make_curve_group(variant.curve_label, runs, is_named=True))
    return curves


def _has_finished_games(trial: Trial) -> bool:
    try:
        return trial.exists and len(load_game_returns(trial.run)[0]) > 0
    except UserError:
        return False
