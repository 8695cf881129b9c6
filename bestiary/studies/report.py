"""A study's results for people: the table on the terminal, results.csv and runs.csv, curves.png, and index.html."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from rich.table import Table

from bestiary.analysis.compare import draw
from bestiary.console import duration, note, stdout
from bestiary.studies.page import page
from bestiary.studies.results import Outcome, Row, collect, curves, rows
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial

FINAL = "final return: mean return of the games of the last tenth of a run's training, of runs trained to their end"
TRUE = "true return: the same of the first true reward; mean and IQM are of what was trained on"
IQM = "IQM: mean of the middle half of the runs (of fewer than four: the mean), with its 95 % bootstrap interval over runs"


def report(study: Study, trials: list[Trial], folder: Path) -> None:
    """Write everything anew from what the run folders have, and print the table."""
    outcomes = collect(trials)
    table = rows(study, outcomes)
    _write(folder / "results.csv", _csv([_row_values(row) for row in table]))
    _write(folder / "runs.csv", _csv([_outcome_values(outcome) for outcome in outcomes]))
    figures = _draw(study, trials, folder)
    header, body = _cells(study, table)
    captions = _captions(study, table)
    text = page(study, captions, header, body, outcomes, figures)
    _write(folder / "index.html", text.encode())
    _show(study, captions, header, body, folder)
    note(f"written: {folder / 'index.html'}, with results.csv, runs.csv and the curves beside it")


def _draw(study: Study, trials: list[Trial], folder: Path) -> dict[str, bytes]:
    """The curves, a figure an environment: returns of different worlds do not belong on one axis."""
    found = curves(study, trials)
    flat = [variant.own or variant.name for variant in study.variants if variant.name in study.dashed]
    figures = {}
    for env, panels in found.items():
        name = "curves.png" if len(found) == 1 else f"curves-{re.sub('[^A-Za-z0-9]+', '-', env)}.png"
        temporary = folder / f".{name}"
        draw(panels, temporary, flat=flat, zoom=study.zoom)
        temporary.replace(folder / name)
        figures[env] = (folder / name).read_bytes()
    return figures


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, for whoever reads it meanwhile."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _csv(records: list[dict[str, Any]]) -> bytes:
    columns = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def _row_values(row: Row) -> dict[str, Any]:
    statistics = ["mean", "iqm", "ci_low", "ci_high", "lowest", "highest", "evaluated", "minutes", "steps_per_second"]
    numbers = row.numbers()
    statistics += [name for name in ("true_return", "true_evaluated") if name in numbers]
    return {
        "variant": row.label,
        "environment": " ".join(row.environments),
        "runs": len(row.finished),
        "planned": len(row.outcomes),
        "parameters": " ".join(map(str, row.parameters)),
        **{name: f"{numbers[name]:.6g}" if name in numbers else "" for name in statistics},
    }


def _outcome_values(outcome: Outcome) -> dict[str, Any]:
    trial = outcome.trial
    numbers = {"final": outcome.final, "evaluated": outcome.evaluated, "seconds": outcome.seconds}
    true = {"true_return": outcome.true_return, "true_evaluated": outcome.true_evaluated}
    numbers |= {name: value for name, value in true.items() if value is not None}
    return {
        "run": trial.name,
        "variant": trial.variant.name,
        "seed": trial.seed,
        "steps": trial.run.steps,
        "total": trial.total,
        **{name: "" if number is None else f"{number:.6g}" for name, number in numbers.items()},
    }


def _cells(study: Study, table: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The table as words, for the terminal and for the page."""
    evaluated = [f"evaluated, {study.evaluate} games"] if study.evaluate else []
    true = ["true return"] if _watched(table) else []
    header = [
        "variant",
        "runs",
        "parameters",
        "mean",
        "IQM",
        "95% interval",
        *true,
        *evaluated,
        "time a run",
        "steps/s",
    ]
    return header, [_row_cells(study, row, bool(true)) for row in table]


def _watched(table: list[Row]) -> bool:
    return any("true_return" in row.numbers() for row in table)


def _captions(study: Study, table: list[Row]) -> list[str]:
    """What the columns mean; and where variants were trained on different rewards, that their returns are not of one kind."""
    trained = dict.fromkeys(variant.config.rewards.trained or "their own" for variant in study.variants)
    kinds = f"variants were trained on different rewards ({' / '.join(trained)}): their returns are not of one kind"
    return [FINAL, IQM, *([TRUE] if _watched(table) else []), *([kinds] if len(trained) > 1 else [])]


def _row_cells(study: Study, row: Row, true: bool) -> list[str]:
    n = row.numbers()
    done, planned = len(row.finished), len(row.outcomes)
    few = "one run" if "mean" in n else ""
    between = f"{n['ci_low']:.2f} to {n['ci_high']:.2f}" if "ci_low" in n else few
    return [
        row.label,
        str(planned) if done == planned else f"{done} of {planned}",
        " / ".join(f"{count:,}" for count in row.parameters),
        *(f"{n[name]:.2f}" if name in n else "" for name in ("mean", "iqm")),
        between,
        *([f"{n['true_return']:.2f}" if "true_return" in n else ""] if true else []),
        *([f"{n['evaluated']:.2f}" if "evaluated" in n else ""] if study.evaluate else []),
        duration(60 * n["minutes"]) if "minutes" in n else "",
        f"{n['steps_per_second']:,.0f}" if "steps_per_second" in n else "",
    ]


def _show(study: Study, captions: list[str], header: list[str], body: list[list[str]], folder: Path) -> None:
    table = Table(title=f"{study.name} ({folder})", caption="\n".join(captions), caption_justify="left")
    for column in header:
        table.add_column(column, justify="left" if column == "variant" else "right")
    for cells in body:
        table.add_row(*cells)
    stdout.print(table, markup=False)
