"""Curves of metrics: smoothing, bands over seeds and thinning. All functions are pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bestiary.config.training_options import group_key
from bestiary.evaluation.run_groups import config_labels, short_label

MAX_POINTS = 400  # maximum number of points of a drawn curve
X_AXES = {"steps": "step", "frames": "frames", "minutes": "seconds"}  # name of an x axis -> column of metrics.csv


class Columns(Protocol):
    """A table whose columns are arrays."""

    def __contains__(self, name: str) -> bool: ...
    def __getitem__(self, name: str) -> np.ndarray: ...


@dataclass
class Curve:
    """A line of P points, with an optional band."""

    name: str
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    low: np.ndarray | None = None  # [P] lower edge of the band
    high: np.ndarray | None = None  # [P] upper edge of the band


def read_curve(table: Columns, metric: str, x_axis: str, smoothing: float, name: str = "") -> Curve:
    """Return the smoothed curve of a metric. The curve is empty if the column is missing or contains text."""
    x_column = X_AXES[x_axis]
    if metric not in table or x_column not in table:
        return Curve(name, np.zeros(0), np.zeros(0))
    x, y = table[x_column], table[metric]
    if x.dtype.kind != "f" or y.dtype.kind != "f":
        return Curve(name, np.zeros(0), np.zeros(0))
    x = x / 60 if x_axis == "minutes" else x
    known = np.isfinite(x) & np.isfinite(y)
    return Curve(name, x[known], smooth(y[known], smoothing))


def smooth(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential moving average of values [P].

    Each result is a weighted mean of all values so far. The weight of a value is `weight` times the weight of the next
    value, so `weight` = 0 changes nothing. The weights add up to 1, so the start is not biased towards 0.
    """
    if weight <= 0:
        return values
    result = np.empty_like(values)
    total = mass = 0.0
    for k, value in enumerate(values):
        total = weight * total + value
        mass = weight * mass + 1
        result[k] = total / mass
    return result


def thin(x: np.ndarray, y: np.ndarray, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return about `max_points` of the points (x, y) [P] or fewer: the lowest and the highest of each group of points.

    The first and the last point are kept.
    """
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(0, len(x), max_points // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for start, end in itertools.pairwise(edges):
        kept |= {start + int(np.argmin(y[start:end])), start + int(np.argmax(y[start:end]))}
    indices = sorted(kept)
    return x[indices], y[indices]


def band(curves: Sequence[Curve], name: str, num_points: int = MAX_POINTS) -> Curve:
    """Return the mean of several curves, with a band from the lowest to the highest curve.

    The curves are interpolated linearly at common points. The mean at a point uses only the curves that reach this
    point.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return Curve(name, np.zeros(0), np.zeros(0))
    if len(curves) == 1:
        return Curve(name, curves[0].x, curves[0].y)
    start, end = min(curve.x[0] for curve in curves), max(curve.x[-1] for curve in curves)
    x = np.linspace(start, end, min(num_points, max(len(curve.x) for curve in curves)))
    rows = np.array([np.interp(x, curve.x, curve.y, left=np.nan, right=np.nan) for curve in curves])  # [R,P]
    covered = ~np.isnan(rows).all(axis=0)
    x, rows = x[covered], rows[:, covered]
    return Curve(name, x, np.nanmean(rows, axis=0), np.nanmin(rows, axis=0), np.nanmax(rows, axis=0))


def group_by_config(options: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return {label: keys of the runs whose options differ only in the seed}. `options` is {key of a run: its options}.

    Labels say how the options of the groups differ. Runs with options that cannot be compared are groups of their own.
    """
    groups: dict[str, list[str]] = {}
    single: dict[str, list[str]] = {}
    for key, own in options.items():
        try:
            groups.setdefault(group_key(dict(own)), []).append(key)
        except (TypeError, ValueError, KeyError, AttributeError):
            single[key] = [key]
    try:
        labels = [short_label(label) for label in config_labels(list(groups))]
    except (TypeError, ValueError, KeyError, AttributeError):
        labels = [keys[0] for keys in groups.values()]
    result: dict[str, list[str]] = {}
    for label, keys in zip(labels, groups.values(), strict=True):
        shown = keys[0] if len(keys) == 1 else f"{label} ({len(keys)} seeds)"
        result[shown if shown not in result else f"{shown}, {keys[0]}"] = keys
    return {**result, **single}


def differing_options(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return {option: {key of a run: value as text}} of the options in which the runs differ."""
    names = dict.fromkeys(name for own in options.values() for name in own)
    texts = {name: {key: option_text(own.get(name)) for key, own in options.items()} for name in names}
    return {name: values for name, values in texts.items() if len(set(values.values())) > 1}


def option_text(value: Any) -> str:
    """Return the value of an option as text."""
    if value is None:
        return "not set"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
