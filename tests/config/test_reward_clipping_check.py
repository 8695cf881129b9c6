"""Effect of reward clipping on the published proxy rewards, and the warnings about it."""

import numpy as np
import pytest
import torch

from bestiary.algorithms.lr_schedules import SCHEDULES
from bestiary.algorithms.reward_transform import transform_reward
from bestiary.config.reward_clipping_check import clipping_warnings, transformed_rewards, typical_steps, unclipped_scale
from bestiary.envs import make_env
from bestiary.envs.atari import COMPONENTS as ATARI
from bestiary.envs.rewards.components import COMMON_COMPONENTS
from bestiary.envs.rewards.parser import make_reward
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper
from bestiary.envs.riverraid_rewards import COMPONENTS

KNOWN = {**COMMON_COMPONENTS, **ATARI, **COMPONENTS}


def reward(text: str):
    return make_reward(text, KNOWN, "atari/Riverraid")


def clipped_reward(text: str, scale: float = 1.0, **values: float) -> float:
    """Return the scaled and clipped reward of a step with these components."""
    steps = {name: np.array([values.get(name, 0.0)]) for name in ("score", "fuel_shot", "alive", "bullet", "moved")}
    steps["off_center"] = np.array([values.get("off_center", 0.0)])
    steps["alive"] = np.ones(1)
    return float(transformed_rewards(reward(text), steps, "abs_one", scale)[0])


@pytest.mark.parametrize(("f", "expected"), [(0, 0), (0.01, 0.8), (0.0125, 1), (1, 1), (10, 1), (100, 1)])
def test_clipped_fuel_reward(f: float, expected: float) -> None:
    assert clipped_reward(f"fuel:{f}", score=80, fuel_shot=1) == pytest.approx(expected)
    assert clipped_reward(f"fuel:{f}", score=30) == 1


@pytest.mark.parametrize(("p", "expected"), [(0, 1), (9, 1), (10, 0), (11, -1), (20, -1)])
def test_clipped_pacifist_and_smooth_rewards(p: float, expected: float) -> None:
    for name, component in (("pacifist", "bullet"), ("smooth", "moved")):
        assert clipped_reward(f"{name}:{p}") == 1
        assert clipped_reward(f"{name}:{p}", **{component: 1}) == pytest.approx(expected)


@pytest.mark.parametrize(("distance", "expected"), [(0, 1), (13, 1), (15, -1), (40, -1)])
def test_clipped_center_reward_is_a_band(distance: int, expected: float) -> None:
    assert clipped_reward("center:1", off_center=distance**2) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuel:10", "--reward has no effect"),
        ("fuel:0.5", "--reward has no effect"),
        ("fuel:10,alive=0.1", "fuel_shot=720 has no effect after clipping"),
        ("fuel:0", "clipping maps the 5 typical rewards of a step to only 2"),
        ("pacifist:9", "bullet=-9 has no effect after clipping"),
        ("pacifist:10", ""),
        ("pacifist:20", "bullet=-20 has the same effect after clipping as with any larger weight"),
        ("smooth:5", "moved=-5 has no effect after clipping"),
        ("smooth:11", "moved=-11 has the same effect after clipping as with any larger weight"),
        ("center:1", "typical rewards of a step to only"),
        ("scaled:5", "--reward has no effect"),
        ("scaled:5,bullet=-5", "reward=5 has the same effect after clipping as with any larger weight"),
        ("bullet=1", ""),
    ],
)
def test_warnings_about_lost_information(text: str, expected: str) -> None:
    found = " ".join(clipping_warnings(reward(text), KNOWN, "abs_one", 1.0))
    assert expected in found
    assert bool(found) == bool(expected)
    assert clipping_warnings(reward(text), KNOWN, "none", 1.0) == []


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("fuel:10", 1 / 800),
        ("pacifist:20", 0.1),
        ("smooth:10", 0.1),
        ("center:1", 1 / 70),  # the distance from the centre is at most 40 pixels
        ("bullet=0.5", 1.0),
        ("capped:50", 1 / 50),
    ],
)
def test_no_warning_at_the_unclipped_scale(text: str, scale: float) -> None:
    found = unclipped_scale(reward(text), KNOWN)
    assert found == pytest.approx(scale, rel=1e-5)
    assert clipping_warnings(reward(text), KNOWN, "abs_one", found) == []


def test_components_without_typical_values_give_no_warning_and_scale_1() -> None:
    unknown = make_reward("reward=3,alive=-1", COMMON_COMPONENTS, "toy/chain")
    assert typical_steps(unknown, COMMON_COMPONENTS) is None
    assert unclipped_scale(unknown, COMMON_COMPONENTS) == 1
    assert clipping_warnings(unknown, COMMON_COMPONENTS, "abs_one", 1.0) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scaled:10", "--reward has no effect"),
        ("score=2", "--reward has no effect"),
        ("score=1", ""),  # equal to the environment's own reward
        ("scaled:0.1", ""),
        ("peaceful:1", ""),
        ("score=3,fire=-1", "score=3 has the same effect after clipping as with any larger weight"),
        ("fire=-2", "fire=-2 has the same effect after clipping as with any larger weight"),
    ],
)
def test_warnings_for_scores_of_unknown_size(text: str, expected: str) -> None:
    """The scores of Pong are whole numbers of unknown size: warnings must hold for all of them."""
    known = COMMON_COMPONENTS | ATARI
    made = make_reward(text, known, "atari/Pong")
    found = " ".join(clipping_warnings(made, known, "abs_one", 1.0))
    assert expected in found
    assert bool(found) == bool(expected)
    if "score" in text or "scaled" in text:
        assert unclipped_scale(made, known) == 1


def test_unclipped_scale_of_the_warehouse_reward() -> None:
    for options, largest in (({}, 1), ({"reward_scale": 4}, 4), ({"reward_mode": "age", "reward_scale": 4}, 4)):
        pool = RewardWrapper(make_env("warehouse", **options), RewardConfig("scaled:2,expired=-1"))
        assert unclipped_scale(pool.training_reward, pool.components) == pytest.approx(1 / (2 * largest), rel=1e-5)


def test_rewards_are_scaled_before_they_are_clipped() -> None:
    assert transform_reward(torch.tensor([-300.0, 5.0, 40.0]), "abs_one", 0.1).tolist() == [-1, 0.5, 1]
    assert transform_reward(torch.tensor([40.0]), "none", 0.5).tolist() == [20]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [1, 0.95, 0.8, 0.5, 0.25, 0]),
        ("warmup", [0, 0.5, 0.8 / 0.9, 0.5 / 0.9, 0.25 / 0.9, 0]),
        ("halving", [1, 1 / 2, 1 / 2, 1 / 8, 1 / 16, 1 / 32]),
        ("staggered", [1 / 2, 1 / 2, 1 / 4, 1 / 16, 1 / 32 * 0.25 / 0.3, 0]),
    ],
)
def test_learning_rate_schedules(name: str, expected: list[float]) -> None:
    assert [SCHEDULES[name](p) for p in (0, 0.05, 0.2, 0.5, 0.75, 1)] == pytest.approx(expected)
