"""Options of the ECharts charts. All functions are pure.

The charts are drawn as SVG, so the style sheet of the application can set the colour of texts. One set of options
therefore fits the light and the dark theme. Texts from runs are only used as values, never as keys of options: the
framework evaluates the value of a key that starts with a colon as JavaScript. Tooltips are drawn as text, not as HTML.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.view.curves import Curve, thin

# Colours that people with any kind of colour blindness can distinguish (Okabe and Ito 2008). Their yellow is left out,
# because it is hardly visible on white.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#7F7F7F")
LINE_TYPES = ("solid", "dashed", "dotted")  # after the last colour, the first is used again with the next line type
GRID_COLOUR = "rgba(128,128,128,0.25)"
DOTS_COLOUR = "rgba(128,128,128,0.45)"
AXIS_COLOUR = "rgba(128,128,128,0.8)"
DIGITS = 6  # significant digits of numbers in charts
UP_TRIANGLE, DOWN_TRIANGLE = "triangle", "path://M0 0L10 0L5 8Z"
RIGHT_MARGIN = 34  # space right of the x axis for half of its last label, in pixels


@dataclass
class Dots:
    """Points that are drawn in addition to curves, for example one per game."""

    name: str
    x: np.ndarray  # [P]
    y: np.ndarray  # [P]
    colour: str = DOTS_COLOUR
    size: int = 5  # pixels
    symbol: str = "circle"


def line_chart(
    curves: Sequence[Curve],
    *,
    x_name: str,
    y_name: str = "",
    log_x: bool = False,
    log_y: bool = False,
    dots: Sequence[Dots] = (),
    marks: Sequence[tuple[float, str]] = (),
    max_points: int = 400,
) -> dict[str, Any]:
    """Return the options of a chart of curves with bands. `marks` are vertical lines as pairs (x, text)."""
    series = [_dots_series(one, log_x, log_y) for one in dots]
    is_empty = not any(len(curve.x) for curve in curves) and not any(len(one.x) for one in dots)
    for number, curve in enumerate(curves):
        series += _curve_series(curve, number, log_x, log_y, max_points)
    if marks and series:
        series[-1]["markLine"] = _mark_lines(marks)
    names = [curve.name for curve in curves] + [one.name for one in dots]
    return {
        "animation": False,
        "color": list(PALETTE),
        "grid": {
            "left": 8,
            "right": RIGHT_MARGIN,
            "top": 36 if len(names) > 1 else 24,
            "bottom": 28,
            "containLabel": True,
        },
        "legend": {"show": len(names) > 1 and not is_empty, "type": "scroll", "top": 0, "left": 0, "data": names},
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True, "transitionDuration": 0},
        "graphic": {
            "id": "empty",
            "type": "text",
            "ignore": not is_empty,
            "left": "center",
            "top": "middle",
            "style": {"text": "no values yet", "fontSize": 12},
        },
        "xAxis": _axis("" if is_empty else x_name, log_x, is_x=True),
        "yAxis": _axis(y_name if len(names) == 1 else "", log_y, is_x=False),
        "series": series,
    }


def bar_chart(names: Sequence[str], values: Sequence[Sequence[float]], labels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the options of a chart with one group of horizontal bars per name.

    `values` has one sequence per series. Each sequence has one value per name. `labels` are the names of the series.
    """
    return {
        "animation": False,
        "color": list(PALETTE),
        "grid": {"left": 8, "right": 44, "top": 24 if len(values) > 1 else 4, "bottom": 4, "containLabel": True},
        "legend": {"show": len(values) > 1, "top": 0, "left": 0, "data": list(labels)},
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "xAxis": {"type": "value", "min": 0, "max": 1, "show": False},
        "yAxis": {"type": "category", "data": list(names), "inverse": True, "axisTick": {"show": False}},
        "series": [
            {
                "type": "bar",
                "name": labels[k] if k < len(labels) else "",
                "data": [round(float(x), 4) for x in row],
                "barMinHeight": 1,
                "label": {"show": True, "position": "right", "fontSize": 10, "color": "inherit"},
            }
            for k, row in enumerate(values)
        ],
    }


def _curve_series(curve: Curve, number: int, log_x: bool, log_y: bool, max_points: int) -> list[dict[str, Any]]:
    colour = PALETTE[number % len(PALETTE)]
    line_type = LINE_TYPES[number // len(PALETTE) % len(LINE_TYPES)]
    series = []
    if curve.low is not None and curve.high is not None and not log_y:
        low, height = pairs(curve.x, curve.low, log_x, log_y), pairs(curve.x, curve.high - curve.low, log_x, log_y)
        shared = {
            "type": "line",
            "stack": f"band {number}",
            "symbol": "none",
            "lineStyle": {"opacity": 0},
            "silent": True,
            "tooltip": {"show": False},
            "stackStrategy": "all",
        }
        series.append({**shared, "data": low, "name": ""})
        series.append({**shared, "data": height, "name": "", "areaStyle": {"color": colour, "opacity": 0.2}})
    x, y = thin(curve.x, curve.y, max_points)
    series.append(
        {
            "type": "line",
            "name": curve.name,
            "data": pairs(x, y, log_x, log_y),
            "showSymbol": len(x) == 1,
            "symbolSize": 7,
            "color": colour,
            "lineStyle": {"width": 1.8, "type": line_type, "color": colour},
            "itemStyle": {"color": colour},
            "emphasis": {"disabled": True},
            "triggerLineEvent": True,
        }
    )
    return series


def _dots_series(dots: Dots, log_x: bool, log_y: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": dots.name,
        "data": pairs(dots.x, dots.y, log_x, log_y),
        "symbol": dots.symbol,
        "symbolSize": dots.size,
        "itemStyle": {"color": dots.colour},
        "color": dots.colour,
        "z": 3,
    }


def _mark_lines(marks: Sequence[tuple[float, str]]) -> dict[str, Any]:
    return {
        "symbol": "none",
        "silent": True,
        "animation": False,
        "lineStyle": {"color": "#D55E00", "type": "dashed", "width": 1.2},
        "label": {"position": "end", "distance": 2, "fontSize": 10},
        "data": [{"xAxis": float(x), "label": {"formatter": text}} for x, text in marks],
    }


def pairs(x: np.ndarray, y: np.ndarray, log_x: bool = False, log_y: bool = False) -> list[list[float | None]]:
    """Return points [x, y] as a list for JSON. If an axis cannot show a point, its y is None."""
    rows: list[list[float | None]] = []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        shown = np.isfinite(a) and np.isfinite(b) and not (log_x and a <= 0) and not (log_y and b <= 0)
        rows.append([_round(a) if np.isfinite(a) else None, _round(b) if shown else None])
    return rows


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _axis(name: str, log: bool, is_x: bool) -> dict[str, Any]:
    return {
        "type": "log" if log else "value",
        "name": name,
        "nameLocation": "middle" if is_x else "end",
        "nameGap": 26 if is_x else 8,
        "nameTextStyle": {"align": "center" if is_x else "left"},
        "scale": True,
        "axisLine": {"show": is_x, "lineStyle": {"color": AXIS_COLOUR}},
        "splitLine": {"show": not is_x, "lineStyle": {"color": GRID_COLOUR}},
        "axisLabel": {"hideOverlap": True, "fontSize": 11},
        "splitNumber": 5,
    }
