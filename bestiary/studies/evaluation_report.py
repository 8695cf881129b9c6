"""Part of the report of a study: tables, figures and the CSV file of its evaluations, and published results."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bestiary.envs.episode_stats import short_name
from bestiary.envs.multitask import task_name
from bestiary.evaluation.figure_helpers import format_axes, import_pyplot, panel_grid, save_figure
from bestiary.evaluation.statistics import mean_interval
from bestiary.studies.evaluations import EvaluationPlan, EvaluationRecord
from bestiary.studies.published_values import ALL_TASKS, PublishedResults, format_published
from bestiary.studies.results import VariantResult
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial
from bestiary.studies.variants import Variant
from bestiary.utils.console import TextTable, plural

ROLE_ORDER = ("train", "valid", "test", "")


@dataclass(frozen=True)
class EvaluationResults:
    """The results of one evaluation of a study: one entry for each run, task, range of levels and checkpoint."""

    plan: EvaluationPlan
    entries: list[tuple[Trial, EvaluationRecord]]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(record.task for _, record in self.entries))

    @property
    def roles(self) -> list[str]:
        """How training used the evaluated levels: "train", "valid", "test" or "" (see `level_role`).

        The value is also "" for tasks without levels.
        """
        found = {record.role for _, record in self.entries}
        return [role for role in ROLE_ORDER if role in found]

    @property
    def variants(self) -> list[Variant]:
        return list(dict.fromkeys(trial.variant for trial, _ in self.entries))

    def newest(self, variants: Iterable[Variant], task: str, role: str) -> dict[Trial, list[EvaluationRecord]]:
        """Return the results of the newest checkpoint of each run, in one task and on levels with one role.

        A run has one result for each range of levels.
        """
        chosen = list(variants)
        found: dict[Trial, list[EvaluationRecord]] = {}
        for trial, record in self.entries:
            is_chosen = trial.variant in chosen and record.task == task and record.role == role
            if is_chosen and record.checkpoint == trial.run.steps:
                found.setdefault(trial, []).append(record)
        return found

    def returns(self, variants: Iterable[Variant], task: str, role: str) -> np.ndarray:
        """Return the mean return of each run [R], averaged over the ranges of levels with this role."""
        runs = self.newest(variants, task, role).values()
        return np.array([np.mean([record.mean for record in records]) for records in runs])

    def normalised(self, variants: Iterable[Variant], task: str, role: str) -> float | None:
        """Return the mean normalised return over runs and over the ranges of levels with this role.

        Return None if the returns of the task are not normalised. If `task` is ALL_TASKS, return the mean over all
        tasks, or None if the value of a task is unknown.
        """
        chosen = list(variants)
        if task == ALL_TASKS:
            values = [self.normalised(chosen, one, role) for one in self.tasks]
            known = [value for value in values if value is not None]
            return float(np.mean(known)) if known and len(known) == len(values) else None
        runs = list(self.newest(chosen, task, role).values())
        if not runs or any(record.normalised is None for records in runs for record in records):
            return None
        return float(np.mean([np.mean([record.normalised for record in records]) for records in runs]))


def collect_evaluations(study: Study, trials: list[Trial]) -> list[EvaluationResults]:
    """Read the results of all evaluations from the run folders. Evaluations without results are left out."""
    ranges = {task_name(task): range_ for task, range_ in study.normalise.items()}
    found = []
    for plan in study.evaluations:
        entries = [
            (trial, _normalise(record, ranges))
            for trial in trials
            if plan in trial.evaluations and trial.is_trained
            for record in trial.records(plan) or []
        ]
        if entries:
            found.append(EvaluationResults(plan, entries))
    return found


def _normalise(record: EvaluationRecord, ranges: Mapping[str, tuple[float, float]]) -> EvaluationRecord:
    """Return the record. Replace its normalised return if `ranges` (from the table [normalise]) contains its task."""
    if record.task not in ranges:
        return record
    low, high = ranges[record.task]
    return replace(record, normalised=(record.mean - low) / (high - low))


def evaluation_csv_rows(results: list[EvaluationResults]) -> list[dict[str, Any]]:
    """Return the rows of evaluations.csv: one for each run, task, range of levels and checkpoint."""
    return [
        {
            "evaluation": evaluation.plan.name,
            "run": trial.name,
            "variant": trial.variant.name,
            "seed": trial.seed,
            **{key: "" if value is None else value for key, value in asdict(record).items()},
        }
        for evaluation in results
        for trial, record in evaluation.entries
    ]


# --- tables ---


def evaluation_table(results: EvaluationResults) -> TextTable:
    """Return the table of an evaluation: the returns of each variant in each task, at the newest checkpoint."""
    has_normalised = any(record.normalised is not None for _, record in results.entries)
    header = ["variant", "task", "runs"]
    for role in results.roles:
        header.append(f"{role} return".strip())
        header += [f"{role} normalised".strip()] if has_normalised else []
    rows = []
    for variant in results.variants:
        for task in results.tasks:
            if any(results.newest([variant], task, role) for role in results.roles):
                rows.append(_evaluation_row(results, [variant], variant.name, task, has_normalised))
    if has_normalised and len(results.tasks) > 1:
        by_name: dict[str, list[Variant]] = {}
        for variant in results.variants:
            by_name.setdefault(variant.name_without_env, []).append(variant)
        for name, variants in by_name.items():
            if any(results.normalised(variants, ALL_TASKS, role) is not None for role in results.roles):
                rows.append(_evaluation_row(results, variants, name, ALL_TASKS, has_normalised))
    policy = "most probable actions" if results.plan.greedy else "sampled actions"
    games = plural(results.plan.games, "game")
    captions = [
        f"mean return of {games}, {policy}, newest checkpoint; in brackets: 95% interval over runs "
        "(Student's t), if there are several runs"
    ]
    if any(results.roles):
        captions.append(
            "train: training levels; valid: validation levels; test: levels that were not used in training; with "
            "several ranges of levels: mean ± standard deviation over the ranges"
        )
    if has_normalised:
        captions.append(
            "normalised: the two returns of the task's score range become 0 and 1; all: mean over all tasks"
        )
    return TextTable(f"evaluation: {results.plan.name}", header, rows, captions)


def _evaluation_row(
    results: EvaluationResults, variants: list[Variant], name: str, task: str, has_normalised: bool
) -> list[str]:
    runs = {trial for role in results.roles for trial in results.newest(variants, task, role)}
    cells = [name, short_name(task), str(len(runs)) if runs else ""]
    for role in results.roles:
        cells.append(_return_cell(results, variants, task, role))
        if has_normalised:
            value = results.normalised(variants, task, role)
            cells.append("" if value is None else f"{value:.3f}")
    return cells


def _return_cell(results: EvaluationResults, variants: list[Variant], task: str, role: str) -> str:
    returns = results.returns(variants, task, role)
    if not len(returns):
        return ""
    text = f"{returns.mean():,.2f}"
    ranges = [record.mean for records in results.newest(variants, task, role).values() for record in records]
    if len(ranges) > len(returns):
        per_run = len(ranges) // len(returns)
        means = np.array(ranges).reshape(-1, per_run).mean(axis=0) if len(ranges) % per_run == 0 else np.array(ranges)
        text += f" ± {means.std(ddof=1):,.2f}"
    if len(returns) > 1:
        interval = mean_interval(returns)
        text += f" ({interval.low:,.2f} to {interval.high:,.2f})"
    return text


def published_table(
    published: PublishedResults, study: Study, variants: list[VariantResult], evaluations: list[EvaluationResults]
) -> TextTable:
    """Return a table with published results and the study's own results side by side."""
    compared = next((found for found in evaluations if found.plan.name == published.compare), None)
    rows = []
    for name, values in published.values.items():
        own = [variant for variant in study.variants if name in variant.names]
        for task, value in values.items():
            if published.compare:
                result = _evaluated(compared, own, task, published.role) if compared else None
            else:
                result = _final(variants, own, task)
            rows.append([name, short_name(task), format_published(value), "" if result is None else f"{result:,.6g}"])
    kind = f"evaluation {published.compare}" if published.compare else "final returns of the training"
    captions = [f"published: {published.source}", f"this study: {kind}, mean over runs"]
    if study.scale:
        captions.append(f"scale of this study: {study.scale}; its runs may be much shorter than the published runs")
    return TextTable(published.title, ["variant", "task", "published", "this study"], rows, captions)


def _evaluated(results: EvaluationResults, variants: list[Variant], task: str, role: str) -> float | None:
    roles = [role] if role else results.roles
    if task == ALL_TASKS:
        return results.normalised(variants, ALL_TASKS, roles[0])
    returns = [results.returns(variants, task, one) for one in roles]
    known = [float(values.mean()) for values in returns if len(values)]
    return float(np.mean(known)) if known else None


def _final(results: list[VariantResult], variants: list[Variant], task: str) -> float | None:
    for result in results:
        is_all = task == ALL_TASKS and len(result.environments) > 1
        is_task = [task_name(env) for env in result.environments] == [task]
        if (is_all or is_task) and result.trials[0].trial.variant in variants:
            mean = result.statistics().get("mean")
            if mean is not None:
                return float(mean)
    return None


# --- figure ---


def plot_evaluation(results: EvaluationResults, study: Study, path: Path) -> bool:
    """Draw the return of each evaluated checkpoint against its steps. Return False if there is only one checkpoint.

    There is one panel for each task. If training levels and test levels were evaluated, each run has one line for each
    of them. Published curves are dotted.
    """
    steps = {(trial.name, record.checkpoint) for trial, record in results.entries}
    if len(steps) == len({name for name, _ in steps}):
        return False
    plt = import_pyplot()
    figure, all_axes = panel_grid(plt, results.tasks)
    colours = {variant: f"C{k}" for k, variant in enumerate(results.variants)}
    legend: dict[str, Any] = {}
    for axes, task in zip(all_axes, results.tasks, strict=True):
        for (trial, role), points in _lines(results, task).items():
            x = np.array(list(points)) / len(trial.config.envs)
            style = "--" if role == "train" and "test" in results.roles else "-"
            label = f"{trial.variant.name}{f', {role} levels' if role else ''}"
            (line,) = axes.plot(
                x, list(points.values()), style, color=colours[trial.variant], marker="o", markersize=3, linewidth=1.4
            )
            legend.setdefault(label, line).set_label(label)
        for published in study.published:
            # Do not draw published curves if a scale is selected: the study's own curves may then be much shorter.
            if published.compare == results.plan.name and not study.scale:
                draw_published(axes, published, task, {v.name: c for v, c in colours.items()}, study, legend)
        format_axes(axes, task, "steps per task", steps=True)
        axes.set_ylabel("return of a game")
    caption = f"Each point: mean of {plural(results.plan.games, 'game')} of one checkpoint. One line for each run."
    save_figure(plt, figure, path, legend=list(legend.values()), caption=caption)
    return True


def _lines(results: EvaluationResults, task: str) -> dict[tuple[Trial, str], dict[int, float]]:
    """Return {(run, role of the levels): {checkpoint: mean return over ranges of levels}} for one task."""
    values: dict[tuple[Trial, str], dict[int, list[float]]] = {}
    for trial, record in results.entries:
        if record.task == task:
            values.setdefault((trial, record.role), {}).setdefault(record.checkpoint, []).append(record.mean)
    return {
        key: {steps: float(np.mean(means)) for steps, means in sorted(points.items())} for key, points in values.items()
    }


def draw_published(
    axes: Any, published: PublishedResults, task: str, colours: dict[str, str], study: Study, legend: dict[str, Any]
) -> None:
    """Draw the published curves of a task as dotted lines.

    `colours` maps names of variants to the colours of their own curves.
    """
    for name, curve in published.curves().get(task, {}).items():
        names = [v.name for v in study.variants if name in v.names]
        colour = next((colours[own] for own in names if own in colours), "gray")
        (line,) = axes.plot(*zip(*curve, strict=True), ":", color=colour, marker=".", markersize=4, linewidth=1.4)
        label = f"{name}, published"
        legend.setdefault(label, line).set_label(label)
