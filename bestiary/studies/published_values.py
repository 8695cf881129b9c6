"""Published results in a study file, which the report shows beside the study's own results.

[[published]]
title = "Mean return after 50M steps per game"
source = "report of the original project, table 2"
compare = "final games"             # name of an evaluation; default: the final returns of the training

[published.values.popart]           # name of a variant -> task -> value
"atari/Pong" = 21.0
"atari/AirRaid" = "4000 to 10000, unstable"
"atari/Carnival" = [[10_000_000, 4400], [50_000_000, 6250]]   # a curve: steps of the task, return
all = 0.2                           # mean of the normalised returns over all tasks
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bestiary.envs.multitask import task_name
from bestiary.studies.study_file import StudyFile, list_of_tables
from bestiary.utils.options import suggest

KEYS = ("title", "source", "compare", "role", "values")
ROLES = ("train", "valid", "test")
ALL_TASKS = "all"
Curve = list[tuple[float, float]]  # (steps of the task, return)


@dataclass(frozen=True)
class PublishedResults:
    """One [[published]] table of a study file."""

    title: str
    source: str
    compare: str  # name of the evaluation that the values are compared with; empty: final returns of the training
    role: str  # train, valid or test: only levels with this role are compared; empty: all
    values: dict[str, dict[str, float | str | Curve]]  # name of a variant -> task -> value

    def curves(self) -> dict[str, dict[str, Curve]]:
        """Return the values that are curves: {task: {name of a variant: curve}}."""
        found: dict[str, dict[str, Curve]] = {}
        for variant, values in self.values.items():
            for task, value in values.items():
                if isinstance(value, list):
                    found.setdefault(task, {})[variant] = value
        return found


def format_published(value: float | str | Curve) -> str:
    """Return a published value as text. A curve is described by its last point."""
    if isinstance(value, list):
        steps, result = value[-1]
        return f"{result:,.6g} at {steps / 1e6:,.4g}M steps"
    return value if isinstance(value, str) else f"{value:,.6g}"


def read_published(
    file: StudyFile, variants: list[str], evaluations: list[str], problems: list[str]
) -> tuple[PublishedResults, ...]:
    """Return the published results of a study file. Wrong values are appended to `problems`.

    `variants` and `evaluations` are the names of the study's variants and evaluations.
    """
    results = []
    for number, content in enumerate(list_of_tables(file, "published", problems)):
        table, found = f"published {number}", len(problems)
        for key in content:
            if key not in KEYS:
                problems.append(f"{file.location(table, key)}: unknown key {key}{suggest(key, KEYS)}")
        texts = {key: content.get(key, "") for key in ("title", "source", "compare", "role")}
        for key, text in texts.items():
            if not isinstance(text, str) or (key in ("title", "source") and not text):
                problems.append(f"{file.location(table, key)}: {key} = {text!r}: expected a text")
        if texts["compare"] and texts["compare"] not in evaluations:
            problems.append(
                f"{file.location(table, 'compare')}: there is no evaluation {texts['compare']}"
                f"{suggest(str(texts['compare']), evaluations)}"
            )
        if texts["role"] and texts["role"] not in ROLES:
            problems.append(
                f"{file.location(table, 'role')}: role = {texts['role']!r}: expected one of {', '.join(ROLES)}"
            )
        values = _read_values(file, table, content.get("values", {}), variants, problems)
        if len(problems) == found:
            results.append(PublishedResults(**texts, values=values))
    return tuple(results)


def _read_values(
    file: StudyFile, table: str, values: Any, variants: list[str], problems: list[str]
) -> dict[str, dict[str, float | str | Curve]]:
    if not isinstance(values, Mapping) or not all(isinstance(own, Mapping) for own in values.values()) or not values:
        problems.append(
            f"{file.location(table, 'values')}: values: expected a table [published.values.VARIANT] with a value for "
            "each task"
        )
        return {}
    read: dict[str, dict[str, float | str | Curve]] = {}
    for variant, own in values.items():
        if variant not in variants:
            problems.append(
                f"{file.location(f'{table} values {variant}')}: there is no variant {variant}"
                f"{suggest(variant, variants)}"
            )
        read[variant] = {}
        for task, value in own.items():
            if isinstance(value, list) and value and all(_is_point(point) for point in value):
                read[variant][task_name(task)] = [(float(steps), float(result)) for steps, result in value]
            elif isinstance(value, int | float | str) and not isinstance(value, bool):
                read[variant][task_name(task)] = value if isinstance(value, str) else float(value)
            else:
                problems.append(
                    f"{file.location(f'{table} values {variant}', task)}: {task} = {value!r}: expected a number, a "
                    "text, or a list of points [steps, return]"
                )
    return read


def _is_point(point: Any) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(isinstance(number, int | float) for number in point)
