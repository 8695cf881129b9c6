"""Print the results of an evaluation as tables in the terminal."""

from typing import Any

from rich.table import Table

from bestiary.evaluation.results import Evaluation
from bestiary.evaluation.statistics import describe_interval, format_interval
from bestiary.utils.console import note, plain, stdout

SUMMARY_COLUMNS = ("mean", "95% interval", "sd", "median", "min", "max")


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the statistics of an evaluation as tables, then the paths of the written files."""
    protocol = evaluation.protocol
    steps = f" at step {protocol['checkpoint_steps']:,}" if "checkpoint_steps" in protocol else ""
    title = f"{protocol['run']}{steps}, {protocol['policy']}"
    if len(evaluation.results) == 1:
        (result,) = evaluation.results
        if "training_environments" in protocol and protocol["environments"] != protocol["training_environments"]:
            title += f", in {result.task}"
        if result.levels is not None:
            title += f", levels {result.levels}"
            title += f" ({result.role})" if result.role else ""
        stdout.print(_statistics_table(evaluation, title))
    else:
        stdout.print(_results_table(evaluation, title))
    if evaluation.num_splits > 1:
        stdout.print(_splits_table(evaluation))
    if evaluation.path is not None:
        figure = ", .csv and .png" if evaluation.figure else " and .csv"
        note(f"written: {evaluation.path}{figure}")


def _statistics_table(evaluation: Evaluation, title: str) -> Table:
    """Return the table for an evaluation with a single result. Each row is one statistic."""
    units = {summary["unit"] for summary in evaluation.statistics.values()}
    table = _make_table(title, "", "n", *SUMMARY_COLUMNS, unit="games or episodes" if len(units) > 1 else "games")
    has_true_rewards = bool(evaluation.results[0].true_rewards)
    for name, summary in evaluation.statistics.items():
        digits = 4 if name.endswith("_per_step") else 2
        cells = [_row_label(name, has_true_rewards), f"{summary['n']:.0f}", *_summary_cells(summary, digits)]
        table.add_row(*map(plain, cells))
    return table


def _row_label(name: str, has_true_rewards: bool) -> str:
    """Return the label of a statistic in the table, for example "true return of a game" for game_true_return."""
    if name == "game_length":
        return "steps of a game"
    for scope in ("game", "episode"):
        if name.startswith(f"{scope}_"):
            words = name.removeprefix(f"{scope}_").replace("_", " ")
            if words == "return" and has_true_rewards:
                words = "training return"
            return f"{words} of {'a' if scope == 'game' else 'an'} {scope}"
    return name.replace("_", " ")


def _results_table(evaluation: Evaluation, title: str) -> Table:
    """Return the table for an evaluation with several results. Each row is one result."""
    results = evaluation.results
    label_keys = [key for key in ("checkpoint", "task", "levels", "role") if any(key in r.labels for r in results)]
    has_normalised = any("normalised_return" in result.statistics for result in results)
    has_true = all("game_true_return" in result.statistics for result in results)
    columns = [*label_keys, "games", *SUMMARY_COLUMNS]
    columns += ["normalised"] if has_normalised else []
    columns += ["true"] if has_true else []
    table = _make_table(title, *columns, unit="games")
    for result in results:
        summary = result.statistics["game_return"]
        cells = [str(result.labels.get(key, "")) for key in label_keys]
        cells += [f"{summary['n']:.0f}", *_summary_cells(summary)]
        if has_normalised:
            normalised = result.statistics.get("normalised_return")
            cells.append(f"{normalised['mean']:.3f}" if normalised else "")
        if has_true:
            cells.append(f"{result.statistics['game_true_return']['mean']:.2f}")
        table.add_row(*map(plain, cells))
    return table


def _splits_table(evaluation: Evaluation) -> Table:
    """Return the table of the means and standard deviations over the splits (a split is a range of levels)."""
    rows = evaluation.split_summary()
    keys = [key for key in ("train", "test", "normalised_train", "normalised_test") if any(key in r for r in rows)]
    label_keys = [key for key in ("checkpoint", "task") if key in rows[0]]
    table = _make_table("mean over the splits ± standard deviation between splits", *label_keys, *keys)
    for row in rows:
        cells = [str(row[key]) for key in label_keys]
        for key in keys:
            deviation = f" ± {row[f'{key}_sd']:.3f}" if f"{key}_sd" in row else ""
            cells.append(f"{row[key]:.3f}{deviation}" if key in row else "")
        table.add_row(*map(plain, cells))
    return table


def _make_table(title: str, *columns: str, unit: str | None = None) -> Table:
    """Return an empty table. If `unit` is given, a caption explains what n counts and how intervals are computed."""
    table = Table(title=plain(title), caption=describe_interval(unit) if unit else None, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("", "task", "levels", "role") else "right")
    return table


def _summary_cells(summary: dict[str, Any], digits: int = 2) -> list[str]:
    mean, sd, median, low, high = (f"{summary[key]:.{digits}f}" for key in ("mean", "sd", "median", "min", "max"))
    return [mean, format_interval(summary, digits), sd, median, low, high]
