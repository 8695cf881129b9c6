"""What clipping leaves of the published proxies: the table of how little, and the warnings about it."""

import numpy as np
import pytest
import torch

from bestiary.algorithms.clipping import complaints, fitting_scale, learnt, usual_steps
from bestiary.algorithms.rewards import squash
from bestiary.algorithms.schedules import SCHEDULES
from bestiary.envs import make
from bestiary.envs.atari import COMPONENTS as ATARI
from bestiary.envs.rewards import RewardedPool, Rewards
from bestiary.envs.riverraid import COMPONENTS
from bestiary.envs.weightings import GENERIC, make_reward

KNOWN = {**GENERIC, **ATARI, **COMPONENTS}


def reward(text: str):
    return make_reward(text, KNOWN, "atari/Riverraid")


def seen(text: str, scale: float = 1.0, **values: float) -> float:
    """What is learnt from in a step with these components, clipped."""
    steps = {name: np.array([values.get(name, 0.0)]) for name in ("score", "fuel_shot", "alive", "bullet", "moved")}
    steps["off_center"], steps["alive"] = np.array([values.get("off_center", 0.0)]), np.ones(1)
    return float(learnt(reward(text), steps, "abs_one", scale)[0])


@pytest.mark.parametrize(("f", "expected"), [(0, 0), (0.01, 0.8), (0.0125, 1), (1, 1), (10, 1), (100, 1)])
def test_fuel_clipped(f: float, expected: float) -> None:
    assert seen(f"fuel:{f}", score=80, fuel_shot=1) == pytest.approx(expected)
    assert seen(f"fuel:{f}", score=30) == 1


@pytest.mark.parametrize(("p", "expected"), [(0, 1), (9, 1), (10, 0), (11, -1), (20, -1)])
def test_pacifist_and_smooth_clipped(p: float, expected: float) -> None:
    for name, component in (("pacifist", "bullet"), ("smooth", "moved")):
        assert seen(f"{name}:{p}") == 1
        assert seen(f"{name}:{p}", **{component: 1}) == pytest.approx(expected)


@pytest.mark.parametrize(("distance", "expected"), [(0, 1), (13, 1), (15, -1), (40, -1)])
def test_center_clipped_is_a_band(distance: int, expected: float) -> None:
    assert seen("center:1", off_center=distance**2) == expected


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("fuel:10", "what is learnt from is what would be without --reward"),
        ("fuel:0.5", "what is learnt from is what would be without --reward"),
        ("fuel:10,alive=0.1", "fuel_shot=720 makes no difference"),
        ("fuel:0", "of 5 different rewards that a step can bring, 2 are left"),
        ("pacifist:9", "bullet=-9 makes no difference"),
        ("pacifist:10", ""),
        ("pacifist:20", "bullet=-20 is learnt from just as if its weight were larger"),
        ("smooth:5", "moved=-5 makes no difference"),
        ("smooth:11", "moved=-11 is learnt from just as if its weight were larger"),
        ("center:1", "different rewards that a step can bring"),
        ("scaled:5", "what is learnt from is what would be without --reward"),
        ("scaled:5,bullet=-5", "reward=5 is learnt from just as if its weight were larger"),
        ("bullet=1", ""),
    ],
)
def test_what_the_clip_hides_is_said(text: str, hidden: str) -> None:
    found = " ".join(complaints(reward(text), KNOWN, "abs_one", 1.0))
    assert hidden in found
    assert bool(found) == bool(hidden)
    assert complaints(reward(text), KNOWN, "none", 1.0) == []


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("fuel:10", 1 / 800),
        ("pacifist:20", 0.1),
        ("smooth:10", 0.1),
        ("center:1", 1 / 70),  # at most 40 pixels from the middle
        ("bullet=0.5", 1.0),
        ("capped:50", 1 / 50),
    ],
)
def test_the_fitting_scale_lets_everything_through(text: str, scale: float) -> None:
    found = fitting_scale(reward(text), KNOWN)
    assert found == pytest.approx(scale, rel=1e-5)
    assert complaints(reward(text), KNOWN, "abs_one", found) == []


def test_nothing_is_claimed_where_nothing_is_known() -> None:
    unknown = make_reward("reward=3,alive=-1", GENERIC, "toy/chain")
    assert usual_steps(unknown, GENERIC) is None
    assert fitting_scale(unknown, GENERIC) == 1
    assert complaints(unknown, GENERIC, "abs_one", 1.0) == []


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("scaled:10", "what is learnt from is what would be without --reward"),
        ("score=2", "what is learnt from is what would be without --reward"),
        ("score=1", ""),  # the plain game: clipped as ever
        ("scaled:0.1", ""),
        ("peaceful:1", ""),
        ("score=3,fire=-1", "score=3 is learnt from just as if its weight were larger"),
        ("fire=-2", "fire=-2 is learnt from just as if its weight were larger"),
    ],
)
def test_of_whole_scores_that_is_claimed_which_holds_for_all(text: str, hidden: str) -> None:
    """Of Pong nobody says what a step may score, but it is a whole number."""
    known = GENERIC | ATARI
    made = make_reward(text, known, "atari/Pong")
    found = " ".join(complaints(made, known, "abs_one", 1.0))
    assert hidden in found
    assert bool(found) == bool(hidden)
    if "score" in text or "scaled" in text:
        assert fitting_scale(made, known) == 1


def test_the_warehouses_own_reward_is_known() -> None:
    for options, largest in (({}, 1), ({"reward_scale": 4}, 4), ({"reward_mode": "age", "reward_scale": 4}, 4)):
        pool = RewardedPool(make("warehouse", **options), Rewards("scaled:2,expired=-1"))
        assert fitting_scale(pool.trained, pool.components) == pytest.approx(1 / (2 * largest), rel=1e-5)


def test_the_scale_comes_before_the_clip() -> None:
    assert squash(torch.tensor([-300.0, 5.0, 40.0]), "abs_one", 0.1).tolist() == [-1, 0.5, 1]
    assert squash(torch.tensor([40.0]), "none", 0.5).tolist() == [20]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [1, 0.95, 0.8, 0.5, 0.25, 0]),
        ("warm", [0, 0.5, 0.8 / 0.9, 0.5 / 0.9, 0.25 / 0.9, 0]),
        ("halving", [1, 1 / 2, 1 / 2, 1 / 8, 1 / 16, 1 / 32]),
        ("staggered", [1 / 2, 1 / 2, 1 / 4, 1 / 16, 1 / 32 * 0.25 / 0.3, 0]),
    ],
)
def test_schedules(name: str, expected: list[float]) -> None:
    assert [SCHEDULES[name](p) for p in (0, 0.05, 0.2, 0.5, 0.75, 1)] == pytest.approx(expected)
