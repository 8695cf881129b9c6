"""Write the report of a study: CSV files, figures and an HTML page. Also print the tables."""

import csv
import html
import io
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bestiary import __version__
from bestiary.envs.episode_stats import short_name
from bestiary.envs.multitask import task_name
from bestiary.evaluation.curve_plots import curve_caption, plot_curves
from bestiary.evaluation.learning_curves import DEFAULT_SMOOTH
from bestiary.evaluation.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from bestiary.evaluation.multitask_scores import ScoreComparison, plot_profiles, score_tables, scores_to_csv
from bestiary.evaluation.statistics import T_INTERVAL_BELOW
from bestiary.studies.analyses import TOOLS, Analysis
from bestiary.studies.analysis_runner import analysis_commands, analysis_folder, analysis_problem
from bestiary.studies.evaluation_report import (
    EvaluationResults,
    collect_evaluations,
    evaluation_csv_rows,
    evaluation_table,
    plot_evaluation,
    published_table,
)
from bestiary.studies.folder_report import MAX_RUN_BYTES, MediaSpace
from bestiary.studies.results import (
    TrialResult,
    VariantResult,
    collect_results,
    compare_variants,
    learning_curves,
    summarise_variants,
)
from bestiary.studies.run_log import last_output
from bestiary.studies.search_report import describe_best, draw_search, search_records, search_table
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial, TrialState
from bestiary.utils import safe_files
from bestiary.utils.console import TextTable, format_count, format_duration, note, plural, print_table
from bestiary.utils.html import render_details, render_figure, render_image, render_page, render_table

FINAL_RETURN_CAPTION = (
    "mean and IQM: statistics of the final returns; the final return of a run is its mean return in the last tenth of "
    "the training"
)
INTERVAL_CAPTION = (
    f"95% interval: interval of the mean over runs (seeds); Student's t if there are fewer than {T_INTERVAL_BELOW} "
    "runs, otherwise percentile bootstrap; none for one run"
)
NORMALISED_CAPTION = (
    "rows over several environments: normalised returns; if each run was trained in one environment, the interval is "
    f"Student's t with Satterthwaite's degrees of freedom if an environment has fewer than {T_INTERVAL_BELOW} runs, "
    "otherwise stratified percentile bootstrap"
)
IQM_CAPTION = "IQM: interquartile mean over runs (the mean if there are fewer than four runs)"
TRUE_RETURN_CAPTION = "true return: final return of the first true reward, mean over runs"
VARIANT_STATISTICS = (
    "mean",
    "ci_low",
    "ci_high",
    "interval",
    "iqm",
    "min",
    "max",
    "eval_return",
    "minutes_per_run",
    "steps_per_second",
)
LOG_TAIL_LINES = 20  # number of lines at the end of a failed run's log that the page shows


@dataclass
class _Page:
    """The content of the HTML page. Figures are the bytes of PNG files."""

    results: list[TrialResult]
    # The first table lists the variants with their results. The other tables compare the variants over all tasks.
    tables: list[TextTable]
    evaluations: list[tuple[TextTable, bytes | None]]  # table and, with several checkpoints, figure of each evaluation
    published: list[TextTable]
    curves: dict[str, bytes]  # {task: learning curves}
    profiles: bytes | None  # performance profiles
    search: TextTable | None  # trials of the search
    search_figures: dict[str, bytes]  # {title: figure}


def write_study_report(study: Study, trials: list[Trial], folder: Path) -> None:
    """Write all files of the report from the current data in the run folders, and print the tables."""
    results = collect_results(study, trials)
    variants = summarise_variants(study, results)
    evaluations = collect_evaluations(study, trials)
    _write_file(folder / "results.csv", _to_csv([_variant_record(variant) for variant in variants]))
    _write_file(folder / "runs.csv", _to_csv([_trial_record(result) for result in results]))
    if study.search is not None:
        _write_file(folder / "search.csv", _to_csv(search_records(study, folder)))
    if evaluations:
        _write_file(folder / "evaluations.csv", _to_csv(evaluation_csv_rows(evaluations)))
    page = _Page(
        results,
        [_make_table(study, variants, results, folder)],
        [(evaluation_table(found), _draw_evaluation(found, study, folder)) for found in evaluations],
        [published_table(published, study, variants, evaluations) for published in study.published],
        _draw_curves(study, trials, folder),
        None,
        search_table(study, folder) if study.search is not None else None,
        draw_search(study, folder) if study.search is not None else {},
    )
    comparison = compare_variants(study, variants)
    if comparison is not None:
        page.tables += score_tables(comparison)
        _write_file(folder / "scores.csv", scores_to_csv(comparison).encode())
        page.profiles = _draw_profiles(comparison, folder)
    _write_file(folder / "index.html", _render_study_page(study, page, trials, folder).encode())
    shown = [table for table, _ in page.evaluations] if len(evaluations) > 1 or _needs_table(evaluations) else []
    searched = [page.search] if page.search is not None else []
    for table in [*searched, *page.tables, *shown, *page.published]:
        print_table(table)
    if study.search is not None and (best := describe_best(study, folder)):
        note(best)
    note(f"report: {folder / 'index.html'}; the CSV files and figures are in the same folder")


def _needs_table(evaluations: list[EvaluationResults]) -> bool:
    """Return whether an evaluation has results that the table of variants does not contain."""
    return any(plan.levels or plan.env or plan.checkpoints == "all" for plan in (e.plan for e in evaluations))


def _write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees either the old file or the complete new file."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)


# --- CSV files ---


def _to_csv(records: list[dict[str, Any]]) -> bytes:
    columns = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def _variant_record(variant: VariantResult) -> dict[str, Any]:
    """Return the row of a variant in results.csv."""
    statistics = variant.statistics()
    true_columns = [name for name in ("true_final_return", "true_eval_return") if name in statistics]
    return {
        "variant": variant.label,
        "environment": " ".join(variant.environments),
        "runs": variant.num_trained,
        "planned_runs": len(variant.trials),
        "parameters": " ".join(map(str, variant.parameters)),
        **{name: _format_number(statistics.get(name)) for name in (*VARIANT_STATISTICS, *true_columns)},
    }


def _trial_record(result: TrialResult) -> dict[str, Any]:
    """Return the row of a trial and one of its tasks in runs.csv."""
    trial = result.trial
    numbers = {name: getattr(result, name) for name in ("final_return", "eval_return", "seconds", "envs_in_first_game")}
    for name in ("true_final_return", "true_eval_return"):
        if getattr(result, name) is not None:
            numbers[name] = getattr(result, name)
    return {
        "run": trial.name,
        "variant": trial.variant.name,
        "task": result.task,
        "seed": trial.seed,
        "steps": trial.run.steps,
        "total_steps": trial.total_steps,
        **{name: _format_number(number) for name, number in numbers.items()},
    }


def _format_number(number: float | str | None) -> str:
    if isinstance(number, str):
        return number
    return "" if number is None else f"{number:.6g}"


# --- figures ---


def _draw_curves(study: Study, trials: list[Trial], folder: Path) -> dict[str, bytes]:
    """Draw one figure per task, because returns of different tasks are not comparable.

    Return {task: content of the PNG file}.
    """
    curves = learning_curves(study, trials)
    dashed = [variant.curve_label for variant in study.variants if variant.name in study.dashed]
    figures = {}
    for env, panels in curves.items():
        name = "curves.png" if len(curves) == 1 else f"curves-{re.sub('[^A-Za-z0-9]+', '-', env)}.png"
        temporary = folder / f".{name}"
        published = {
            name: curve
            for found in study.published
            # Leave out published curves if a scale is selected: the study's own curves may then be much shorter.
            if not found.compare and not study.scale
            for name, curve in found.curves().get(task_name(env), {}).items()
        }
        x_label = "steps of the task" if any(len(v.config.envs) > 1 for v in study.variants) else "steps"
        plot_curves(panels, temporary, flat=dashed, zoom=study.zoom, x_label=x_label, published=published)
        temporary.replace(folder / name)
        figures[env] = (folder / name).read_bytes()
    return figures


def _draw_evaluation(results: EvaluationResults, study: Study, folder: Path) -> bytes | None:
    """Draw the returns of all checkpoints, and return the PNG file. Return None if there is only one checkpoint."""
    name = f"evaluation-{re.sub('[^A-Za-z0-9]+', '-', results.plan.name)}.png"
    temporary = folder / f".{name}"
    if not plot_evaluation(results, study, temporary):
        return None
    temporary.replace(folder / name)
    return (folder / name).read_bytes()


def _draw_profiles(comparison: ScoreComparison, folder: Path) -> bytes | None:
    """Draw the performance profiles, and return the PNG file. Return None if the scores are not normalised."""
    if not comparison.normalised:
        return None
    temporary = folder / ".profiles.png"
    plot_profiles(comparison, temporary)
    temporary.replace(folder / "profiles.png")
    return (folder / "profiles.png").read_bytes()


# --- table of variants ---


def _make_table(study: Study, variants: list[VariantResult], results: list[TrialResult], folder: Path) -> TextTable:
    has_true = any("true_final_return" in variant.statistics() for variant in variants)
    header = ["variant", "runs", "parameters", "mean", "95% interval", "IQM"]
    if has_true:
        header.append("true return")
    if _shows_evaluation(study):
        header.append(f"evaluation, {plural(study.evaluations[0].games, 'game')}")
    header += ["time per run", "steps/s"]
    captions = [FINAL_RETURN_CAPTION, INTERVAL_CAPTION, IQM_CAPTION]
    if any(len(variant.environments) > 1 for variant in variants):
        captions.append(NORMALISED_CAPTION)
    if has_true:
        captions.append(TRUE_RETURN_CAPTION)
    rewards = dict.fromkeys(variant.config.rewards.training or "default" for variant in study.variants)
    if len(rewards) > 1:
        captions.append(
            f"variants were trained on different rewards ({' / '.join(rewards)}), so their returns are not comparable"
        )
    waiting = [f"{result.trial.name} ({result.envs_in_first_game})" for result in results if result.envs_in_first_game]
    if waiting:
        captions.append(
            "runs whose returns are biased towards short games, because some of their environments had not finished a "
            "game at the end of the training (in brackets: number of these environments): "
            f"{', '.join(dict.fromkeys(waiting))}"
        )
    rows = [_variant_cells(study, variant, has_true) for variant in variants]
    return TextTable(f"{study.name} ({folder})", header, rows, captions)


def _shows_evaluation(study: Study) -> bool:
    """Return whether the table of variants has a column with the results of the first evaluation."""
    return bool(study.evaluations) and not study.evaluations[0].levels and not study.evaluations[0].env


def _variant_cells(study: Study, variant: VariantResult, has_true: bool) -> list[str]:
    statistics = variant.statistics()

    def cell(name: str) -> str:
        return f"{statistics[name]:.2f}" if name in statistics else ""

    trained, planned = variant.num_trained, len(variant.trials)
    interval = "none" if "mean" in statistics else ""
    if "ci_low" in statistics:
        interval = f"{cell('ci_low')} to {cell('ci_high')}"
    cells = [
        variant.label,
        str(planned) if trained == planned else f"{trained} of {planned}",
        " / ".join(f"{count:,}" for count in variant.parameters),
        cell("mean"),
        interval,
        cell("iqm"),
    ]
    if has_true:
        cells.append(cell("true_final_return"))
    if _shows_evaluation(study):
        cells.append(cell("eval_return"))
    minutes, speed = statistics.get("minutes_per_run"), statistics.get("steps_per_second")
    cells.append("" if minutes is None else format_duration(60 * minutes))
    cells.append("" if speed is None else f"{speed:,.0f}")
    return cells


# --- HTML page ---


def _render_study_page(study: Study, page: _Page, trials: list[Trial], folder: Path) -> str:
    """Return an HTML page with tables, figures, analyses, runs, failures and the study file. Figures are embedded."""
    states = {trial: trial.state() for trial in trials}
    done = sum(state.kind == "done" for state in states.values())
    scale = f" · scale {html.escape(study.scale)}" if study.scale else ""
    sections = [
        f"<h1>{html.escape(study.name)}</h1>",
        f'<p class="small">{done} of {len(trials)} runs done · {time.strftime("%Y-%m-%d %H:%M")} · '
        f"bestiary {__version__}{scale}</p>",
        *_render_text_table(page.tables[0]),
    ]
    for table in (*page.published, *page.tables[1:]):
        sections += [f"<h2>{html.escape(_capitalise(table.title))}</h2>", *_render_text_table(table)]
    if page.profiles is not None:
        sections += ["<h2>Performance profiles</h2>", render_image(page.profiles, "Performance profiles")]
    for table, figure in page.evaluations:
        sections += [f"<h2>{html.escape(_capitalise(table.title))}</h2>", *_render_text_table(table)]
        if figure is not None:
            sections.append(render_image(figure, table.title))
    if page.search is not None:
        sections += ["<h2>Search</h2>", *_render_text_table(page.search)]
    for title, png in page.search_figures.items():
        sections += [f"<h3>{html.escape(title)}</h3>", render_image(png, title)]
    for env, png in page.curves.items():
        title = f"Learning curves{f': {env}' if len(page.curves) > 1 else ''}"
        sections += [f"<h2>{html.escape(title)}</h2>", render_image(png, title)]
        caption = curve_caption(DEFAULT_SMOOTH, bool(study.dashed))
        sections.append(f'<p class="small">{html.escape(caption)}</p>')
    for analysis in study.analyses:
        sections += _render_analysis(analysis, trials, folder)
    sections += _render_runs(page.results, states)
    sections += ["<h2>Study file</h2>", render_details(study.path.name, study.text)]
    return render_page(study.name, sections)


def _capitalise(title: str) -> str:
    return title[:1].upper() + title[1:]


def _render_analysis(analysis: Analysis, trials: list[Trial], folder: Path) -> list[str]:
    """Return the HTML of the figures and videos of an analysis, or of the reason why it has none."""
    own = analysis_folder(analysis, folder)
    sections = [f"<h2>{html.escape(TOOLS[analysis.tool].title)}: {html.escape(analysis.name)}</h2>"]
    command = shlex.join(["bestiary", *analysis_commands(analysis, trials, folder)[0]])
    sections.append(f'<p class="small">first command: {html.escape(command)}</p>')
    if analysis.published:
        sections.append(f'<p class="small">published: {html.escape(analysis.published)}</p>')
    if problem := analysis_problem(analysis, trials, folder):
        sections.append(f"<p>{html.escape(problem)}</p>")
    figures = []
    space = MediaSpace(MAX_RUN_BYTES)
    for path in safe_files.list_files(own, folder):
        if path.suffix not in (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES):
            continue
        if (left_out := space.take(path)) is not None:
            sections.append(f'<p class="small">{html.escape(left_out)}</p>')
        else:
            figures.append(render_figure(path, path.stem, small=TOOLS[analysis.tool].each_task))
    return [*sections, f'<div class="figures">{"".join(figures)}</div>'] if figures else sections


def _render_runs(results: list[TrialResult], states: dict[Trial, TrialState]) -> list[str]:
    """Return the HTML of the table of runs, and the end of the log of each failed run."""
    has_tasks = any(len(trial.config.envs) > 1 for trial in states)
    has_true = any(result.true_final_return is not None for result in results)
    header = ["run", *(["task"] if has_tasks else []), "state", "steps", "final return"]
    header += [*(["true return"] if has_true else []), "evaluation", "time"]
    rows = [_trial_cells(result, states[result.trial].text, has_true, has_tasks) for result in results]
    sections = ["<h2>Runs</h2>", render_table(header, rows)]
    failed = [trial for trial, state in states.items() if state.kind == "failed"]
    if failed:
        sections.append("<h2>Failed runs</h2>")
    for trial in failed:
        log = "\n".join(last_output(trial.log)[-LOG_TAIL_LINES:])
        sections.append(render_details(f"{trial.name}: {states[trial].text}", log))
    return sections


def _render_text_table(table: TextTable) -> list[str]:
    captions = [f'<p class="small">{html.escape(caption)}</p>' for caption in table.captions]
    return [render_table(table.header, table.rows), *captions]


def _trial_cells(result: TrialResult, state: str, has_true: bool, has_tasks: bool) -> list[str]:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    return [
        result.trial.name,
        *([short_name(result.task)] if has_tasks else []),
        state,
        format_count(result.trial.run.steps),
        cell(result.final_return),
        *([cell(result.true_final_return)] if has_true else []),
        cell(result.eval_return),
        "" if result.seconds is None else format_duration(result.seconds),
    ]
