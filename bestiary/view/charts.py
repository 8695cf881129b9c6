"""Options of the ECharts charts. All functions are pure.

The charts are drawn as SVG, so the style sheet of the application can set the colour of texts. One set of options
therefore fits the light and the dark theme. Texts from runs are only used as values, never as keys of options: the
framework evaluates the value of a key that starts with a colon as JavaScript. Tooltips are drawn as text, not as HTML.
"""

from collections.abc import Sequence
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


def line_chart(
    curves: Sequence[Curve],
    *,
    x_name: str,
    y_name: str = "",
    log_x: bool = False,
    log_y: bool = False,
    dots: tuple[np.ndarray, np.ndarray] | None = None,
    dots_name: str = "",
    dots_colour: str = DOTS_COLOUR,
    marks: Sequence[tuple[float, str]] = (),
    max_points: int = 400,
) -> dict[str, Any]:
    """Return the options of a chart of curves with bands.

    Args:
        dots: x and y of points that are drawn in addition to the curves, for example one per game.
        marks: vertical lines as pairs (x, text).
    """
    series: list[dict[str, Any]] = []
    if dots is not None:
        series.append(_dots_series(dots, dots_name, dots_colour, log_x, log_y))
    for number, curve in enumerate(curves):
        series += _curve_series(curve, number, log_x, log_y, max_points)
    if marks and series:
        series[-1]["markLine"] = _mark_lines(marks)
    names = [curve.name for curve in curves] + ([dots_name] if dots is not None else [])
    return {
        "animation": False,
        "color": list(PALETTE),
        "grid": {"left": 8, "right": 16, "top": 36 if len(names) > 1 else 24, "bottom": 28, "containLabel": True},
        "legend": {"show": len(names) > 1, "type": "scroll", "top": 0, "left": 0, "data": names},
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True, "transitionDuration": 0},
        "xAxis": _axis(x_name, log_x, is_x=True),
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


def _dots_series(
    dots: tuple[np.ndarray, np.ndarray], name: str, colour: str, log_x: bool, log_y: bool
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": name,
        "data": pairs(*dots, log_x, log_y),
        "symbolSize": 5 if colour == DOTS_COLOUR else 9,
        "itemStyle": {"color": colour},
        "color": colour,
        "z": 3,
    }


def _mark_lines(marks: Sequence[tuple[float, str]]) -> dict[str, Any]:
    return {
        "symbol": "none",
        "silent": True,
        "animation": False,
        "lineStyle": {"color": "#D55E00", "type": "dashed", "width": 1.2},
        "label": {"position": "insideEndTop", "fontSize": 10},
        "data": [{"xAxis": float(x), "label": {"formatter": text}} for x, text in marks],
    }


def pairs(x: np.ndarray, y: np.ndarray, log_x: bool = False, log_y: bool = False) -> list[list[float | None]]:
    """Return points as a list for JSON. Points that an axis cannot show have the value None."""
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
