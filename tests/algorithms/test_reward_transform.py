"""Tests of the scaling and clipping of rewards."""

import numpy as np
import pytest
import torch

from bestiary.algorithms.reward_transform import REWARD_CLIPPING, transform_reward


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        ("none", [-10.0, -0.5, 0.0, 0.5, 10.0]),
        ("auto", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        ("abs_one", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        # 1.5 tanh(-2), 1.5 tanh(-0.1), 0, 5 tanh(0.1), 5 tanh(2)
        ("soft_asymmetric", [-1.446041, -0.149502, 0.0, 0.498340, 4.820138]),
    ],
)
def test_clipping_modes(clipping, expected):
    transformed = transform_reward(torch.tensor([-10.0, -0.5, 0.0, 0.5, 10.0]), clipping)
    np.testing.assert_allclose(transformed, expected, rtol=1e-5)
    assert clipping in REWARD_CLIPPING


def test_unknown_clipping_mode_raises():
    with pytest.raises(ValueError, match="abs_two"):
        transform_reward(torch.zeros(1), "abs_two")
