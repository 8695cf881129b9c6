"""Compute the results of a study: statistics of each variant over its seeds, and learning curves.

The final return of a run is the mean return of the games that ended in the last tenth of the training. Runs that are
not trained to the end have no final return.

A study can have several tasks: each run is trained on several tasks, or the runs are trained in different environments.
Each variant has a result in each of its tasks. If each task has a known score range, the study also has a summary of
each variant: its normalised returns over all tasks. A score range consists of the return that is normalised to 0 and
the return that is normalised to 1. The score ranges come from the table `[normalise]` of the study file, or from the
definitions of the environments.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bestiary.envs import lookup_score_range
from bestiary.envs.episode_stats import short_name
from bestiary.envs.multitask import task_name
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
from bestiary.studies.evaluations import EvaluationRecord
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial
from bestiary.utils.errors import UserError


@dataclass(frozen=True)
class TrialResult:
    """Results of one run in one task. A value is None if it is not known, for example before the end of training."""

    trial: Trial
    task: str
    is_trained: bool
    final_return: float | None = None  # mean return of the games that ended in the last tenth of the training
    eval_return: float | None = None  # mean return of the study's first evaluation
    true_final_return: float | None = None  # like final_return, for the true reward
    true_eval_return: float | None = None  # like eval_return, for the true reward
    seconds: float | None = None  # training time
    envs_in_first_game: int | None = None  # environments that had not finished a game at the end of the training


@dataclass(frozen=True)
class VariantResult:
    """One row of results.csv: results of a variant in one task, or normalised results over all tasks."""

    label: str
    environments: tuple[str, ...]
    parameters: tuple[int, ...]  # numbers of network parameters; they may differ between environments
    trials: list[TrialResult]  # all runs of the variant, including those that are not trained yet
    # One array [R] per environment: final returns of R trained runs. If there are several environments, the returns are
    # normalised.
    scores: list[np.ndarray] = field(default_factory=list)
    whole_runs: bool = False  # True: each run was trained in all environments; the i-th scores are those of run i

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
        """Return a dict with the 95 % interval of the mean and the method of the interval.

        If an environment has only one run, there is no interval. The result then contains only the key `interval`.
        """
        if len(self.scores) == 1:
            interval = mean_interval(self.scores[0])
        elif self.whole_runs:
            interval = mean_interval(matrix.mean(axis=1))
        elif min(map(len, self.scores)) < T_INTERVAL_BELOW:
            interval = interval_over_tasks(self.scores)
        else:
            found = stratified_bootstrap(mean_score, matrix)
            assert found is not None  # each environment has several runs
            interval = Interval(float(found[0]), float(found[1]), STRATIFIED_BOOTSTRAP)
        if interval.low is None:
            return {"interval": interval.method}
        return {"ci_low": interval.low, "ci_high": interval.high, "interval": f"{interval.method}, over seeds"}


def collect_results(study: Study, trials: list[Trial]) -> list[TrialResult]:
    """Read the results of all trials in all their tasks from the run folders.

    The results of a trial that is not trained to the end are all None.
    """
    results = []
    for trial in trials:
        records = trial.records(study.evaluations[0]) if study.evaluations and trial.is_trained else None
        results += [
            _read_result(trial, task, records or []) if trial.is_trained else TrialResult(trial, task, False)
            for task in trial.config.envs
        ]
    return results


def _read_result(trial: Trial, task: str, records: list[EvaluationRecord]) -> TrialResult:
    """Return the result of a run in one task. `records` are the results of the first evaluation of the study."""
    final = true_final = seconds = None
    chosen = episode_task(trial, task)
    with suppress(UserError):  # raised if no game was finished
        final = final_return(trial.run, chosen)
        if GAME_TRUE_RETURN in trial.run.episodes:
            true_final = final_return(trial.run, chosen, GAME_TRUE_RETURN)
    with suppress(OSError, ValueError, KeyError):  # raised if the checkpoint is damaged
        seconds = float(trial.run.checkpoints[-1].load_state()["seconds"])
    newest = [r for r in records if r.task == task_name(task) and r.checkpoint == trial.run.steps]
    evaluated = newest[0] if len(newest) == 1 else None  # several records: one for each range of levels
    return TrialResult(
        trial,
        task,
        True,
        final_return=final,
        eval_return=evaluated.mean if evaluated else None,
        true_final_return=true_final,
        true_eval_return=evaluated.true_mean if evaluated else None,
        seconds=seconds,
        envs_in_first_game=envs_in_first_game(trial.run),
    )


def episode_task(trial: Trial, task: str) -> str | None:
    """Return the name of a task as in episodes.csv, or None if it is the only task of the run."""
    return task_name(task) if len(trial.config.envs) > 1 else None


def summarise_variants(study: Study, results: list[TrialResult]) -> list[VariantResult]:
    """Return the result of each variant in each of its tasks.

    If the returns of all tasks can be normalised, append the results over all tasks. A variant has a result over all
    tasks only if it has a trained run in each task.
    """
    summaries = []
    for variant in study.variants:
        for task in variant.config.envs:
            own = [result for result in results if result.trial.variant is variant and result.task == task]
            scores = _final_returns(own)
            label = f"{variant.name}: {short_name(task)}" if len(variant.config.envs) > 1 else variant.name
            summaries.append(VariantResult(label, (task,), (variant.parameters,), own, [scores] if len(scores) else []))
    ranges = score_ranges(study)
    for name, members in _variants_across_tasks(study, summaries).items():
        if len(members) > 1 and len(ranges) == len(study.tasks):
            summaries.append(_normalised_summary(name, members, ranges))
    return summaries


def score_ranges(study: Study) -> dict[str, tuple[float, float]]:
    """Return {task: (return normalised to 0, return normalised to 1)} of the tasks with a known range.

    The ranges come from the table [normalise] of the study file. Without this table, they come from the environments,
    but only if all variants are trained on the environment's own reward.
    """
    if study.normalise or any(variant.config.rewards.training is not None for variant in study.variants):
        return study.normalise
    ranges = {task: lookup_score_range(task) for task in study.tasks}
    return {task: (found.low, found.high) for task, found in ranges.items() if found is not None}


def _variants_across_tasks(study: Study, summaries: list[VariantResult]) -> dict[str, list[VariantResult]]:
    """Return {name without environment: results of the variant in each task}.

    Variants that do not have results in all tasks of the study are left out. The tasks of a variant may be those of one
    run with several tasks, or those of several runs that differ only in `env`.
    """
    by_name: dict[str, list[VariantResult]] = {}
    for summary in summaries:
        if summary.scores and len(summary.environments) == 1:
            by_name.setdefault(summary.trials[0].trial.variant.name_without_env, []).append(summary)
    ordered = {
        name: sorted(members, key=lambda member: study.tasks.index(member.environments[0]))
        for name, members in by_name.items()
    }
    return {
        name: members
        for name, members in ordered.items()
        if [member.environments[0] for member in members] == study.tasks
    }


def _are_whole_runs(members: list[VariantResult]) -> bool:
    """Return whether each run was trained in the tasks of all `members`, and has a final return in each of them."""
    runs = [[result.trial for result in member.trials if result.final_return is not None] for member in members]
    return len(members) > 1 and all(own == runs[0] for own in runs)


def compare_variants(study: Study, summaries: list[VariantResult]) -> ScoreComparison | None:
    """Return the comparison of variants by their final returns in all tasks.

    Return None if the variants are trained on different rewards, because their returns are then not comparable. Also
    return None if there is only one variant and its returns are normalised in fewer than two tasks: there is then
    nothing to compare or to average.
    """
    if len({variant.config.rewards.training for variant in study.variants}) > 1:
        return None
    single = [summary for summary in summaries if len(summary.environments) == 1]
    raw = [
        ScoreMatrix(
            name,
            tuple(m.environments[0] for m in members),
            pad_columns([m.scores[0] for m in members]),
            _are_whole_runs(members),
        )
        for name, members in _variants_across_tasks(study, single).items()
    ]
    if not raw:
        return None
    comparison = make_comparison(raw, score_ranges(study), _describe_scale(study))
    return comparison if len(raw) > 1 or comparison.normalised else None


def _describe_scale(study: Study) -> str:
    if study.normalise:
        return "0 and 1: [normalise] of the study file"
    ranges = [lookup_score_range(task) for task in study.tasks]
    return " / ".join(dict.fromkeys(found.meaning for found in ranges if found is not None))


def _normalised_summary(
    name: str, members: list[VariantResult], normalise: dict[str, tuple[float, float]]
) -> VariantResult:
    """Return the result over several tasks, after normalising the returns of each task.

    `members` are the results in single tasks. `normalise` maps a task to (return that becomes 0, return that becomes
    1).
    """
    scores = []
    for member in members:
        low, high = normalise[member.environments[0]]
        scores.append((member.scores[0] - low) / (high - low))
    whole_runs = _are_whole_runs(members)
    return VariantResult(
        f"{name} (normalised, {len(members)} {'tasks' if whole_runs else 'environments'})",
        tuple(member.environments[0] for member in members),
        tuple(dict.fromkeys(member.parameters[0] for member in members)),
        members[0].trials if whole_runs else [result for member in members for result in member.trials],
        scores,
        whole_runs,
    )


def _final_returns(results: Iterable[TrialResult]) -> np.ndarray:
    return np.array([result.final_return for result in results if result.final_return is not None])


def learning_curves(study: Study, trials: list[Trial]) -> dict[str, dict[str, list[CurveGroup]]]:
    """Return {task: {title of a panel: curves}}.

    A curve shows the mean over the seeds of a variant, with a band from the lowest to the highest return over the
    seeds.

    Unfinished runs are included. Usually there is only one panel, with the title "". If the study has named variants
    and a grid, there is one panel for each combination of grid values. The x axis counts the steps in the task: an
    agent with six tasks takes a sixth of its steps in each task.
    """
    curves: dict[str, dict[str, list[CurveGroup]]] = {}
    for variant in study.variants:
        own = [trial for trial in trials if trial.variant is variant]
        for task in variant.config.envs:
            runs = [trial.run for trial in own if _has_finished_games(trial, task)]
            if runs:
                panels = curves.setdefault(task, {})
                panel = variant.grid_point if variant.own_name else ""
                group = make_curve_group(variant.curve_label, runs, task=episode_task(own[0], task), is_named=True)
                panels.setdefault(panel, []).append(group)
    return curves


def _has_finished_games(trial: Trial, task: str) -> bool:
    try:
        return trial.exists and len(load_game_returns(trial.run, episode_task(trial, task))[0]) > 0
    except UserError:
        return False
