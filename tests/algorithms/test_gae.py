"""Tests of GAE against closed forms and the sum of its definition."""

import pytest
import torch

from bestiary.algorithms.gae import gae


def by_definition(rewards, discounts, values, bootstrap, lam, horizon):
    """Return A_t = sum over k of delta_k times the product of (gamma lam) up to k, until the end of the horizon."""
    T, B = rewards.shape
    next_values = torch.cat([values[1:], bootstrap[None]])
    advantages = torch.zeros(T, B, dtype=rewards.dtype)
    for b in range(B):
        for t in range(T):
            end = T if horizon is None else min(T, (t // horizon + 1) * horizon)
            weight = 1.0
            for k in range(t, end):
                advantages[t, b] += weight * (rewards[k, b] + discounts[k, b] * next_values[k, b] - values[k, b])
                weight *= lam * float(discounts[k, b])
    return advantages


@pytest.mark.parametrize("horizon", [None, 1, 3, 4, 12, 100])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_equals_the_sum_of_its_definition(lam, horizon):
    generator = torch.Generator().manual_seed(0)
    T, B = 12, 5
    rewards, values = (torch.randn(T, B, generator=generator, dtype=torch.float64) for _ in range(2))
    discounts = 0.9 * (torch.rand(T, B, generator=generator) > 0.2).double()
    bootstrap = torch.randn(B, generator=generator, dtype=torch.float64)
    targets, advantages = gae(rewards, discounts, values, bootstrap, lam=lam, horizon=horizon)
    expected = by_definition(rewards, discounts, values, bootstrap, lam, horizon)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(targets, expected + values)


def test_constant_rewards():
    """With V = 0 and lambda = 1 the advantage is the return (1 - gamma^n) / (1 - gamma) + gamma^n V(x_T)."""
    gamma, T = 0.9, 6
    _, advantages = gae(torch.ones(T, 1), torch.full((T, 1), gamma), torch.zeros(T, 1), torch.tensor([2.0]), lam=1.0)
    for t in range(T):
        n = T - t
        assert advantages[t, 0].item() == pytest.approx((1 - gamma**n) / (1 - gamma) + 2 * gamma**n, rel=1e-5)


def test_advantages_do_not_cross_episode_ends():
    discounts = torch.tensor([[0.9], [0.0], [0.9]])
    one = gae(torch.tensor([[1.0], [2.0], [3.0]]), discounts, torch.zeros(3, 1), torch.tensor([5.0])).advantages
    two = gae(torch.tensor([[1.0], [2.0], [-9.0]]), discounts, torch.zeros(3, 1), torch.tensor([-5.0])).advantages
    assert torch.equal(one[:2], two[:2])
    assert not torch.equal(one[2], two[2])


def test_bootstrap_of_wrong_shape_raises():
    with pytest.raises(ValueError, match="expected shape"):
        gae(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3))
