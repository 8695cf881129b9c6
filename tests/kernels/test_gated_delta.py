"""Delta rule with decay: hand-computed example, slow implementation, numerical derivatives, truncation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import assert_close, call_delta, gated_inputs, run_delta, to_float32

# One process runs these tests, because only tests use the float64 kernels and compiling them takes long.
pytestmark = pytest.mark.xdist_group("float64")
SEQUENCES = ("q", "k", "v", "beta", "decay")


@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_hand_computed_example(implementation):
    """W = 2 becomes 0.5 * 2 = 1, the error is 3 - 1 = 2, and W becomes 1 + 0.5 * 2 = 2. With o = W, dW = 1 + 1."""

    def number(x):
        return torch.tensor([[[[x]]]], dtype=torch.float64)

    inputs = {"q": number(1.0), "k": number(1.0), "v": number(3.0), "beta": number(0.5), "decay": number(0.5)}
    inputs |= {"state": number(2.0), "done": torch.zeros(1, 1, dtype=torch.bool)}
    inputs |= {"d_out": number(1.0), "d_last": number(1.0)}
    results = run_delta(implementation, inputs)
    expected = {"out": 2.0, "last": 2.0, "d_q": 2.0, "d_k": 2.0 * (0.5 * 2 - 0.5 * 1), "d_v": 1.0, "d_beta": 4.0}
    expected |= {"d_decay": 2.0 * 2 * (1 - 0.5), "d_state": 2.0 * 0.5 * (1 - 0.5)}
    assert {name: float(x) for name, x in results.items()} == pytest.approx(expected)


def slow_gated_delta(inputs):
    """Return the outputs and the final states, computed with loops over all numbers."""
    x = {name: tensor.numpy() for name, tensor in inputs.items()}
    outputs, last = np.zeros_like(x["v"]), x["state"].copy()
    for b, h in np.ndindex(last.shape[:2]):
        weights = last[b, h]
        for t in range(len(x["done"])):
            q, k, v = (x[name][b, h, t] for name in ("q", "k", "v"))
            if x["done"][t, b]:
                weights[:] = 0
            weights *= x["decay"][b, h, t, 0]
            identity = np.eye(len(k)) - x["beta"][b, h, t, 0] * np.outer(k, k)
            weights[:] = identity @ weights + x["beta"][b, h, t, 0] * np.outer(k, v)
            outputs[b, h, t] = weights.T @ q
    return {"out": torch.from_numpy(outputs), "last": torch.from_numpy(last)}


@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_results_equal_a_slow_implementation(implementation):
    inputs = gated_inputs(2, 3, 19, 5, 7)
    out, last = call_delta(inputs, implementation=implementation)
    assert_close({"out": out, "last": last}, slow_gated_delta(inputs), 1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 40), st.integers(1, 17), st.integers(1, 17),
    st.sampled_from([0, 0.3, 1]), st.sampled_from([0, 1, 2, 3]), st.integers(0, 2**31),
)  # fmt: skip
def test_numba_equals_the_reference_for_any_shape(batch, heads, length, rows, columns, reset_rate, truncate, seed):
    inputs = gated_inputs(batch, heads, length, rows, columns, reset_rate, seed)
    expected = run_delta("reference", inputs, truncate)
    assert_close(run_delta("numba", inputs, truncate), expected, 1e-11)
    assert_close(run_delta("numba", to_float32(inputs), truncate), expected, 1e-3)


def test_decay_of_one_is_the_delta_rule_and_decay_of_zero_forgets():
    inputs = gated_inputs(length=9)
    ones = {**inputs, "decay": torch.ones_like(inputs["decay"])}
    without = {name: x for name, x in inputs.items() if name != "decay"}
    for a, b in zip(call_delta(ones), call_delta(without), strict=True):
        assert torch.equal(a, b)
    inputs["decay"][:, :, 4] = 0
    results = run_delta("numba", inputs)
    inputs["done"][4] = True
    reset = run_delta("numba", inputs)
    assert_close({"out": results["out"]}, {"out": reset["out"]}, 1e-12)
    assert (results["d_decay"][:, :, 4] != 0).any()  # the division by the decay would give NaN here
    assert results["d_decay"].isfinite().all()


def test_gradients_equal_numerical_derivatives():
    inputs = gated_inputs(2, 1, 18, 3, 4)
    names = (*SEQUENCES, "state")

    def function(*tensors):
        return call_delta({**dict(zip(names, tensors, strict=True)), "done": inputs["done"]})

    assert torch.autograd.gradcheck(function, tuple(inputs[name].requires_grad_() for name in names), atol=1e-7)


@pytest.mark.parametrize("implementation", ["reference", "numba"])
def test_gradients_are_cut_at_every_third_step(implementation):
    """The gradient of an output reaches only the steps since the last cut: 0 to 2, 3 to 5, and so on."""
    inputs = gated_inputs(1, 1, 9, 4, 4, reset_rate=0)
    inputs["d_out"][:, :, [0, 1, 2, 3, 5, 6, 7, 8]] = 0
    inputs["d_last"].zero_()
    results = run_delta(implementation, inputs, truncate=3)
    reached = results["d_v"][0, 0].abs().sum(-1) > 0
    assert reached.tolist() == [False, False, False, True, True, False, False, False, False]
    assert not results["d_state"].any()


def test_shape_of_decay_is_checked():
    inputs = gated_inputs()
    inputs["decay"] = inputs["decay"][:, :, :1]
    with pytest.raises(ValueError, match="decay: expected shape"):
        call_delta(inputs)
