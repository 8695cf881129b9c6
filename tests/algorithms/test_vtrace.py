"""Tests of V-trace against the sums of the paper."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bestiary.algorithms.vtrace import vtrace

T = 5


def direct_sum(log_rhos, rewards, discounts, values, bootstrap, rho_bar=1.0, pg_rho_bar=1.0, lam=1.0):
    """Compute equation (1) of Espeholt et al. 2018 without recursion, in O(T^2) and float64.

    v_s = V(x_s) + sum_{t=s}^{T-1} (prod_{i=s}^{t-1} gamma_i c_i) rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
    """
    log_rhos, rewards, discounts, values, bootstrap = (
        np.asarray(x, np.float64) for x in (log_rhos, rewards, discounts, values, bootstrap)
    )
    length = len(values)
    rho = np.exp(log_rhos)
    c = lam * np.minimum(1.0, rho)
    clipped = rho if rho_bar is None else np.minimum(rho_bar, rho)
    pg_clipped = rho if pg_rho_bar is None else np.minimum(pg_rho_bar, rho)
    v_next = np.concatenate([values[1:], bootstrap[None]])  # V(x_{t+1})
    targets = np.empty_like(values)
    for s in range(length):
        total = np.zeros_like(values[0])
        for t in range(s, length):
            product = np.prod(discounts[s:t] * c[s:t], axis=0)  # 1 if empty
            total = total + product * clipped[t] * (rewards[t] + discounts[t] * v_next[t] - values[t])
        targets[s] = values[s] + total
    target_next = np.concatenate([targets[1:], bootstrap[None]])  # v_{s+1}
    return targets, pg_clipped * (rewards + discounts * target_next - values)


def published_vectors(batch):
    """Return the inputs of TorchBeast's unit test."""
    count = np.arange(T * batch, dtype=np.float64).reshape(T, batch)
    return {
        "log_rhos": 5 * (count / (T * batch) - 0.5),
        "rewards": count,
        "discounts": np.tile(0.9 / (np.arange(batch) + 1.0), (T, 1)),
        "values": count / batch,
        "bootstrap": np.arange(batch) + 1.0,
    }


def as_tensors(inputs, dtype=torch.float32):
    return {name: torch.as_tensor(np.asarray(x), dtype=dtype) for name, x in inputs.items()}


def random_vectors(shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "log_rhos": rng.normal(size=shape),
        "rewards": rng.normal(size=shape),
        "discounts": 0.95 * (rng.random(shape) > 0.3),
        "values": rng.normal(size=shape),
        "bootstrap": rng.normal(size=shape[1:]),
    }


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("rho_bar", "pg_rho_bar"), [(3.7, 2.2), (1.0, 1.0), (0.5, 1.5), (None, None)])
def test_equals_direct_sum_on_published_vectors(batch, rho_bar, pg_rho_bar):
    inputs = published_vectors(batch)
    targets, advantages = direct_sum(**inputs, rho_bar=rho_bar, pg_rho_bar=pg_rho_bar)
    result = vtrace(**as_tensors(inputs), rho_bar=rho_bar, pg_rho_bar=pg_rho_bar)
    np.testing.assert_allclose(result.targets, targets, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(result.advantages, advantages, rtol=1e-6, atol=1e-5)


def test_each_clip_affects_only_its_own_result():
    """pg_rho_bar changes only the advantages; rho_bar changes the targets."""
    inputs = as_tensors(published_vectors(5))
    base = vtrace(**inputs, rho_bar=3.7, pg_rho_bar=2.2)
    other_pg = vtrace(**inputs, rho_bar=3.7, pg_rho_bar=1.1)
    other_rho = vtrace(**inputs, rho_bar=1.1, pg_rho_bar=2.2)
    assert torch.equal(base.targets, other_pg.targets)
    assert not torch.allclose(base.advantages, other_pg.advantages)
    assert not torch.allclose(base.targets, other_rho.targets)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_lambda(lam):
    inputs = random_vectors((7, 3))
    targets, advantages = direct_sum(**inputs, lam=lam)
    result = vtrace(**as_tensors(inputs, torch.float64), lam=lam)
    np.testing.assert_allclose(result.targets, targets, rtol=1e-10)
    np.testing.assert_allclose(result.advantages, advantages, rtol=1e-10)


def test_lambda_zero_gives_one_step_targets():
    inputs = random_vectors((7, 3))
    x = as_tensors(inputs, torch.float64)
    next_values = torch.cat([x["values"][1:], x["bootstrap"][None]])
    rhos = x["log_rhos"].exp().clamp(max=1)
    one_step = x["values"] + rhos * (x["rewards"] + x["discounts"] * next_values - x["values"])
    torch.testing.assert_close(vtrace(**x, lam=0.0).targets, one_step)


def test_on_policy_targets_are_n_step_returns():
    """If actor and learner have the same policy, v_s is the discounted sum of rewards plus the bootstrap value."""
    inputs = random_vectors((6, 4), seed=1)
    inputs["log_rhos"] = np.zeros((6, 4))
    result = vtrace(**as_tensors(inputs, torch.float64))
    value = inputs["bootstrap"]
    for t in reversed(range(6)):
        value = inputs["rewards"][t] + inputs["discounts"][t] * value
        np.testing.assert_allclose(result.targets[t], value, rtol=1e-10)
        np.testing.assert_allclose(result.advantages[t], value - inputs["values"][t], rtol=1e-10, atol=1e-12)


def test_trailing_dimensions_broadcast():
    """log_rhos [3,2,1] with values [3,2,42] give the same as 42 separate calls."""
    rng = np.random.default_rng(2)
    narrow: dict[str, np.ndarray] = {name: rng.normal(size=(3, 2, 1)) for name in ("log_rhos", "rewards")}
    narrow["discounts"] = 0.9 * (rng.random((3, 2, 1)) > 0.2)
    values, bootstrap = rng.normal(size=(3, 2, 42)), rng.normal(size=(2, 42))
    result = vtrace(**as_tensors({**narrow, "values": values, "bootstrap": bootstrap}, torch.float64))
    assert result.targets.shape == result.advantages.shape == (3, 2, 42)
    for k in range(42):
        flat = {name: x[..., 0] for name, x in narrow.items()}
        targets, advantages = direct_sum(**flat, values=values[..., k], bootstrap=bootstrap[..., k])
        np.testing.assert_allclose(result.targets[..., k], targets, rtol=1e-10)
        np.testing.assert_allclose(result.advantages[..., k], advantages, rtol=1e-10)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 2), (3, 2)])
def test_bootstrap_of_wrong_shape_raises(shape):
    inputs = as_tensors(random_vectors((3, 2)))
    inputs["bootstrap"] = torch.zeros(shape)
    with pytest.raises(ValueError, match="bootstrap"):
        vtrace(**inputs)


def test_no_gradient():
    inputs = as_tensors(random_vectors((4, 2)))
    for tensor in inputs.values():
        tensor.requires_grad_()
    result = vtrace(**inputs)
    assert not result.targets.requires_grad
    assert not result.advantages.requires_grad


@st.composite
def any_vectors(draw):
    length, batch = draw(st.integers(1, 8)), draw(st.integers(1, 4))

    def numbers(shape, low, high):
        return draw(arrays(np.float64, shape, elements=st.floats(low, high, width=32)))

    shape = (length, batch)
    return {
        "log_rhos": numbers(shape, -4, 4),
        "rewards": numbers(shape, -10, 10),
        "discounts": numbers(shape, 0, 1),
        "values": numbers(shape, -10, 10),
        "bootstrap": numbers((batch,), -10, 10),
        "rho_bar": draw(st.one_of(st.none(), st.floats(0.1, 10))),
        "pg_rho_bar": draw(st.one_of(st.none(), st.floats(0.1, 10))),
        "lam": draw(st.floats(0, 1)),
    }


@settings(max_examples=100, deadline=None)
@given(any_vectors())
def test_equals_direct_sum_on_random_inputs(drawn):
    clips = {name: drawn.pop(name) for name in ("rho_bar", "pg_rho_bar", "lam")}
    targets, advantages = direct_sum(**drawn, **clips)
    result = vtrace(**as_tensors(drawn, torch.float64), **clips)
    np.testing.assert_allclose(result.targets, targets, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(result.advantages, advantages, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("truncated", [False, True], ids=["terminated", "truncated"])
@pytest.mark.parametrize("end", [0, 3, 7], ids=["first", "inside", "last"])
def test_episode_end_inside_a_rollout_equals_two_separate_rollouts(end, truncated):
    """The action at `end` ends an episode. The first rollout is bootstrapped with 0 if the episode terminated, and with
    the value of the final observation if it was truncated."""
    length, batch, gamma = 8, 3, 0.9
    x = random_vectors((length, batch), seed=3)
    x["discounts"] = np.full((length, batch), gamma)
    final_value = np.random.default_rng(4).normal(size=batch) if truncated else np.zeros(batch)

    first = direct_sum(**{k: v[: end + 1] for k, v in x.items() if k != "bootstrap"}, bootstrap=final_value)
    results = [first]
    if end + 1 < length:
        results.append(
            direct_sum(**{k: v[end + 1 :] for k, v in x.items() if k != "bootstrap"}, bootstrap=x["bootstrap"])
        )
    targets, advantages = (np.concatenate(pieces) for pieces in zip(*results, strict=True))

    together = {k: v.copy() for k, v in x.items()}  # as in base.rewards_and_discounts
    together["discounts"][end] = 0
    together["rewards"][end] += gamma * final_value
    result = vtrace(**as_tensors(together, torch.float64))
    np.testing.assert_allclose(result.targets, targets, rtol=1e-10)
    np.testing.assert_allclose(result.advantages, advantages, rtol=1e-10)
