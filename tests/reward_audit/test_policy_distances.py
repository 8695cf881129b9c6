"""Policy distances: zero for equal policies, bounds, symmetry, and hand-calculated values."""

import math

import numpy as np
import pytest
import torch

from bestiary.reward_audit.policy_distances import DISTANCES, summarise_steps

SYMMETRIC = ("js", "js_distance", "hellinger", "tv")


def policies(seed: int, count: int = 50, actions: int = 18) -> torch.Tensor:
    scale = torch.linspace(0, 30, count)[:, None]  # from uniform to nearly deterministic
    logits = torch.randn(count, actions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return logits.log_softmax(-1)


@pytest.mark.parametrize("name", DISTANCES)
def test_distance_of_equal_policies_is_zero(name: str) -> None:
    p = policies(0)
    torch.testing.assert_close(DISTANCES[name](p, p), torch.zeros(50, dtype=p.dtype), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", DISTANCES)
def test_bounds_and_symmetry(name: str) -> None:
    p, q = policies(1), policies(2)
    there, back = DISTANCES[name](p, q), DISTANCES[name](q, p)
    assert (there >= 0).all()
    assert torch.isfinite(there).all()
    if name in SYMMETRIC:
        torch.testing.assert_close(there, back)
        assert (there <= 1).all()
    else:
        torch.testing.assert_close(there, DISTANCES[{"kl": "reverse_kl"}.get(name, "kl")](q, p))


def test_hand_calculated_values() -> None:
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    expected = {
        "kl": 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1),
        "reverse_kl": 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5),
        "js": 0.146793,
        "js_distance": math.sqrt(0.146793),
        "hellinger": math.sqrt(1 - math.sqrt(0.45) - math.sqrt(0.05)),
        "tv": 0.4,
    }
    for name, value in expected.items():
        assert float(DISTANCES[name](p, q)) == pytest.approx(value, abs=1e-5), name


def test_policies_without_a_common_action_have_maximal_distance() -> None:
    p, q = torch.tensor([0.0, -math.inf]), torch.tensor([-math.inf, 0.0])
    for name in SYMMETRIC:
        assert float(DISTANCES[name](p, q)) == pytest.approx(1)
    assert float(DISTANCES["kl"](p, q)) == math.inf


def test_summary_over_steps() -> None:
    assert summarise_steps(np.array([1.0, 4.0, 2.5])) == {"mean": 2.5, "max": 4.0, "range": 3.0}
