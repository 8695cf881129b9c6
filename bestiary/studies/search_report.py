"""Report of a search: table and CSV file of its trials, and figures for the report page.

The value of the best trial is biased: it is the highest of many values, each of which depends on chance. Therefore the
report shows it apart from the results of the runs with fresh seeds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.evaluation.figure_helpers import import_pyplot
from bestiary.studies.search import Parameter
from bestiary.studies.search_runner import best_trial, open_journal, search_folder, trial_name
from bestiary.studies.study import Study
from bestiary.utils.console import TextTable

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes

MAX_ROWS = 20  # maximum number of trials in the table
MIN_TRIALS_FOR_IMPORTANCE = 4
STATES = {"COMPLETE": "complete", "PRUNED": "stopped early", "FAIL": "failed", "RUNNING": "not finished"}
BIAS_CAPTION = (
    "the value of the best trial is biased upwards, because it is the best of many; the other tables have the results "
    "of its configuration with fresh seeds"
)


def _sorted_trials(journal: "optuna.Study | None") -> "list[optuna.trial.FrozenTrial]":
    """Return all trials, the best first. Trials without a value follow in the order of their numbers."""
    trials = journal.get_trials(deepcopy=False) if journal is not None else []
    return sorted(trials, key=lambda t: (_kind(t) != "COMPLETE", -_value(t) if _kind(t) == "COMPLETE" else t.number))


def _kind(trial: "optuna.trial.FrozenTrial") -> str:
    return trial.state.name


def _value(trial: "optuna.trial.FrozenTrial") -> float:
    """Return the value of a trial: the final value, or the last intermediate value; NaN if there is none."""
    if _kind(trial) == "COMPLETE":
        assert trial.value is not None
        return trial.value
    return trial.intermediate_values[trial.last_step] if trial.last_step is not None else float("nan")


def search_table(study: Study, folder: Path) -> TextTable:
    """Return the table of the best trials of a search, with the number of trials in each state as a caption."""
    search = study.search
    assert search is not None
    trials = _sorted_trials(open_journal(study, folder))
    rows = []
    for trial in trials[:MAX_ROWS]:
        options = search.point_options(trial.params)
        state = STATES[_kind(trial)]
        if _kind(trial) == "PRUNED" and trial.last_step is not None:
            state += f" at step {trial.last_step}"
        value = "" if np.isnan(_value(trial)) else f"{_value(trial):.4g}"
        rows.append([trial_name(trial.number), state, value, *map(_shown, options.values())])
    kinds = [_kind(trial) for trial in trials]
    counts = [f"{kinds.count(kind)} {text}" for kind, text in STATES.items() if kind in kinds]
    missing = search.trials - len(trials)
    counts += [f"{missing} not started"] if missing > 0 else []
    captions = [f"{search.trials} trials: {', '.join(counts)}; value: {_describe_value(study)}", BIAS_CAPTION]
    if len(trials) > MAX_ROWS:
        captions.insert(1, f"the {MAX_ROWS} best trials; all trials are in search.csv")
    return TextTable("search", ["trial", "state", "value", *search.space], rows, captions)


def _describe_value(study: Study) -> str:
    assert study.search is not None
    assert study.search_example is not None
    several = "normalised and averaged over the tasks, " if len(study.search_example.config.envs) > 1 else ""
    if study.search.value == "validation":
        return f"return of the last validation, {several}seed {study.search.seed}"
    return f"final return of the training, {several}seed {study.search.seed}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def search_records(study: Study, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of search.csv, one per trial in the order of their numbers."""
    assert study.search is not None
    records = []
    for trial in sorted(_sorted_trials(open_journal(study, folder)), key=lambda trial: trial.number):
        value = _value(trial)
        records.append(
            {
                "trial": trial_name(trial.number),
                "state": STATES[_kind(trial)],
                "value": "" if np.isnan(value) else f"{value:.6g}",
                "last_step": "" if trial.last_step is None else trial.last_step,
                **study.search.point_options(trial.params),
            }
        )
    return records


# --- figures ---


def draw_search(study: Study, folder: Path) -> dict[str, bytes]:
    """Draw the figures of a search into the folder of the study. Return {title: content of the PNG file}."""
    journal = open_journal(study, folder)
    complete = [trial for trial in _sorted_trials(journal) if _kind(trial) == "COMPLETE"]
    if journal is None or not complete:
        return {}
    figures = {"History of the search": _draw(folder / "search-history.png", _draw_history, journal)}
    importances = option_importances(journal)
    if importances:
        path = folder / "search-importance.png"
        figures["Importance of the options"] = _draw(path, _draw_importance, importances)
    if len(complete) > 1:
        path = folder / "search-parallel.png"
        figures["Parallel coordinates of the complete trials"] = _draw(path, _draw_parallel, study, complete)
    return figures


def option_importances(journal: "optuna.Study") -> dict[str, float]:
    """Return the importance of each option, computed with PED-ANOVA. The importances sum to 1.

    An option is important if the distribution of its values in the best trials differs much from the distribution in
    all trials. The result is empty if there are too few complete trials, or if all of them have the same value.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    values = [trial.value for trial in journal.get_trials(deepcopy=False) if _kind(trial) == "COMPLETE"]
    if len(values) < MIN_TRIALS_FOR_IMPORTANCE or len(set(values)) == 1:
        return {}
    try:
        found = get_param_importances(journal, evaluator=PedAnovaImportanceEvaluator())
    except (RuntimeError, ValueError):  # for example because no option varies among the good trials
        return {}
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def _draw(path: Path, draw: Any, *content: Any) -> bytes:
    plt = import_pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=120, layout="constrained")
    try:
        draw(axes, *content)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png")
    finally:
        plt.close(figure)
    temporary.replace(path)
    return path.read_bytes()


def _draw_history(axes: "Axes", journal: "optuna.Study") -> None:
    """Draw the value of each trial over its number, and the best value so far."""
    trials = journal.get_trials(deepcopy=False)
    for kind, marker in (("COMPLETE", "o"), ("PRUNED", "x")):
        own = [trial for trial in trials if _kind(trial) == kind and not np.isnan(_value(trial))]
        label = "value" if kind == "COMPLETE" else "last value of a trial that was stopped early"
        if own:
            axes.scatter([trial.number for trial in own], [_value(trial) for trial in own], marker=marker, label=label)
    complete = [trial for trial in trials if _kind(trial) == "COMPLETE"]
    best = np.maximum.accumulate([_value(trial) for trial in complete])
    axes.step([trial.number for trial in complete], best, where="post", label="best so far", color="black", lw=1)
    axes.set_xlabel("trial")
    axes.set_ylabel("value")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_importance(axes: "Axes", importances: dict[str, float]) -> None:
    names = list(importances)[::-1]
    axes.barh(names, [importances[name] for name in names])
    axes.set_xlabel("importance (PED-ANOVA)")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_parallel(axes: "Axes", study: Study, trials: "Sequence[optuna.trial.FrozenTrial]") -> None:
    """Draw parallel coordinates: one axis per option, and a last axis for the searched value (the trial's value).

    Each trial is one line. Its colour shows the trial's value.
    """
    from matplotlib import colormaps

    assert study.search is not None
    space = study.search.space
    columns = [_positions(space[name], [trial.params[name] for trial in trials]) for name in space]
    values = np.array([_value(trial) for trial in trials])
    spread = float(np.ptp(values)) or 1.0
    columns.append((values - values.min()) / spread)
    lines = np.stack(columns, axis=1)  # [trials, options + 1], in [0, 1]
    # Trials are sorted from best to worst. The best lines are drawn last, so that they are on top of the others.
    for line in lines[::-1]:
        axes.plot(range(lines.shape[1]), line, color=colormaps["viridis"](line[-1]), alpha=0.8, lw=1.2)
    ends = [_ends(parameter) for parameter in space.values()] + [(f"{values.min():.4g}", f"{values.max():.4g}")]
    axes.set_xticks(
        range(len(ends)), [f"{name}\n{low}" for name, (low, _) in zip([*space, "value"], ends, strict=True)]
    )
    for position, (_, high) in enumerate(ends):
        axes.text(position, 1.03, high, ha="center", fontsize="small")
        axes.axvline(position, color="grey", lw=0.5)
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.1)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _positions(parameter: Parameter, drawn: Sequence[Any]) -> np.ndarray:
    """Return the positions of drawn values on an axis from 0 to 1."""
    if parameter.choices:
        options = list(parameter.choices)
        return np.array([options.index(parameter.option_value(value)) / (len(options) - 1) for value in drawn])
    low, high, values = float(parameter.low), float(parameter.high), np.array(drawn, float)
    if parameter.log:
        low, high, values = np.log(low), np.log(high), np.log(values)
    return (values - low) / (high - low)


def _ends(parameter: Parameter) -> tuple[str, str]:
    """Return the texts at the lower and the upper end of an option's axis."""
    return str(parameter.extremes[0])[:14], str(parameter.extremes[-1])[:14]


def describe_best(study: Study, folder: Path) -> str:
    """Return a sentence about the best trial, or an empty text if there is none."""
    journal = open_journal(study, folder)
    best = best_trial(journal) if journal is not None else None
    if best is None:
        return ""
    assert study.search is not None
    options = ", ".join(f"{name} = {_shown(v)}" for name, v in study.search.point_options(best.params).items())
    path = search_folder(folder) / f"{trial_name(best.number)}-s{study.search.seed}"
    return f"best trial: {trial_name(best.number)} with {options}: value {best.value:.4g} ({path})"
