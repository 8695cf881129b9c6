"""Drops of the true return in reward audits: false drops in simulated constant curves, and drops of a real study."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bestiary.reward_audit.curves import SIGNIFICANCE, Curve, CurvePoint, TrueReturnDrop, find_true_return_drop

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def noise_curve(rng: np.random.Generator, points: int, seeds: int, unit: str = "seeds") -> list[CurvePoint]:
    return [CurvePoint(x, 90 + rng.normal(size=seeds), 5 + rng.normal(size=seeds), unit) for x in range(points)]


CASES = [*((seeds, points, False) for seeds in (2, 3, 4, 5) for points in (5, 10, 30)), (2, 30, True), (5, 5, True)]


@pytest.mark.parametrize(("seeds", "points", "both_directions"), CASES)
def test_at_most_5_percent_of_curves_without_change_are_marked(seeds: int, points: int, both_directions: bool) -> None:
    """The limit is 5 % plus three standard errors of the simulation: 6.5 % with 2,000 curves, 8.5 % with 333."""
    rng = np.random.default_rng([seeds, points])
    count = 10_000 // points
    curves = [noise_curve(rng, points, seeds) for _ in range(count)]
    marked = np.mean([find_true_return_drop(curve, both_directions) is not None for curve in curves])
    assert marked <= SIGNIFICANCE + 3 * np.sqrt(SIGNIFICANCE * (1 - SIGNIFICANCE) / count)


def test_curves_with_one_run_per_point_are_not_marked() -> None:
    """The returns of one run's games do not show how much trainings differ, so even a large drop is not marked."""
    rng = np.random.default_rng(0)
    points = [
        CurvePoint(x, rng.normal(size=20), level + rng.normal(size=20), "games") for x, level in ((0, 50), (1, 0))
    ]
    assert find_true_return_drop(points) is None
    several = [CurvePoint(p.x, p.training, p.true) for p in points]
    assert find_true_return_drop(several) is not None
    # The pair with a single run is left out, and the other pair is still tested.
    mixed = [CurvePoint(-1, points[0].training, points[0].true, "games"), *several]
    assert find_true_return_drop(mixed) == find_true_return_drop(several)


def curve(points: list[CurvePoint]) -> Curve:
    return Curve("warehouse", None, "steps", "true", points, ["a"])  # type: ignore[arg-type]


def test_reason_for_missing_tests_is_stated() -> None:
    rng = np.random.default_rng(0)
    assert curve(noise_curve(rng, 3, 3)).untested == ""
    reason = curve(noise_curve(rng, 3, 20, "games")).untested
    assert "one run at each point" in reason
    assert "train several seeds" in reason
    mixed = [*noise_curve(rng, 2, 3), CurvePoint(7, np.zeros(5), np.zeros(5), "games")]
    assert "one run at 7:" in curve(mixed).untested


def test_drop_of_identical_seeds_is_not_tested() -> None:
    """Without variation between seeds, Welch's test is not defined."""
    constant = [CurvePoint(x, np.full(3, 98.0), np.full(3, true)) for x, true in ((0, 5.0), (1, 4.0))]
    assert find_true_return_drop(constant) is None
    varied = [CurvePoint(p.x, p.training, p.true + np.array([0, 0.01, 0.02])) for p in constant]
    assert find_true_return_drop(varied) is not None
    fallen = [varied[0], CurvePoint(1, np.full(3, 97.0), varied[1].true)]
    assert find_true_return_drop(fallen) is None  # the training return drops as well, in all seeds


# --- the study of docs/results/rewards.md ---


def read_rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [("341", None), ("1541", (120_832, 180_224)), ("9221", None), ("86021", None)],
)
def test_drops_over_the_training_steps_are_found(parameters: str, expected: tuple[float, float] | None) -> None:
    rows = [row for row in read_rows("rewards-audit.csv") if row["parameters"] == parameters]
    points = []
    for steps in sorted({int(row["steps"]) for row in rows}):
        own = [row for row in rows if int(row["steps"]) == steps]
        if len(own) == 3:  # at other steps, only some of the three runs have a checkpoint
            training, true = (np.array([float(row[key]) for row in own]) for key in ("training", "true"))
            points.append(CurvePoint(steps, training, true))
    assert len(points) >= 10
    found = find_true_return_drop(points)
    assert (found and (found.before, found.after)) == expected


@pytest.mark.parametrize("width", [4, 16, 64, 256])
def test_drop_from_the_true_reward_to_the_proxy_is_found(width: int) -> None:
    """Agents that are trained on the proxy collect fewer items than agents that are trained on items."""
    points = []
    for x, reward in enumerate(("true", "proxy")):
        own = [row for row in read_rows("rewards-runs.csv") if row["variant"] == f"{reward},torso.width={width}"]
        assert len(own) == 3
        training, true = (np.array([float(row[key]) for row in own]) for key in ("final_return", "true_final_return"))
        points.append(CurvePoint(x, training, true))
    found = find_true_return_drop(points)
    assert isinstance(found, TrueReturnDrop)
    assert found.p_value < 0.01
