"""Delta rule: hand-computed example, comparison with the reference implementation, numerical derivatives."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.helpers import Tensors, assert_close, assert_equal, call_delta, delta_inputs, run_delta, to_float32

# One process runs these tests, because only tests use the float64 kernels and compiling them takes long.
pytestmark = pytest.mark.xdist_group("float64")
CPU_IMPLEMENTATIONS = ["reference", "numba"]
SEQUENCES = ("q", "k", "v", "beta")


def select_steps(inputs: Tensors, steps: slice, state: torch.Tensor) -> Tensors:
    """Return a slice of the inputs in time, with the given initial state."""
    return {**{name: inputs[name][:, :, steps] for name in SEQUENCES}, "done": inputs["done"][steps], "state": state}


def check_derivatives(inputs: Tensors, fast: bool) -> None:
    names = (*SEQUENCES, "state")

    def function(*tensors):
        return call_delta({**dict(zip(names, tensors, strict=True)), "done": inputs["done"]})

    x = tuple(inputs[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, x, atol=1e-7, fast_mode=fast)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_hand_computed_example_of_two_steps(implementation, dtype):
    def rows(*numbers):
        return torch.tensor([[numbers]], dtype=dtype)

    inputs = {
        "q": rows((0.5, 0.5), (1, 0)),
        "k": rows((1, 0), (0.5, 0.5)),
        "v": rows((2, 3), (1, 1)),
        "beta": rows((0.5,), (1,)),
        "state": rows((0, 0), (0, 0)),
        "done": torch.zeros(2, 1, dtype=torch.bool),
        "d_out": rows((1, 1), (1, 1)),
        "d_last": rows((0, 0), (0, 0)),
    }
    expected = {
        "out": rows((0.5, 0.75), (1.25, 1.625)),
        "last": rows((1.25, 1.625), (0.25, 0.125)),
        "d_q": rows((2.5, 0), (2.875, 0.375)),
        "d_k": rows((3.125, 0.625), (-0.5, 0)),
        "d_v": rows((0.625, 0.625), (0.5, 0.5)),
        "d_beta": rows((6.25,), (0.375,)),
        "d_state": rows((0.625, 0.625), (0.25, 0.25)),
    }
    results = run_delta(implementation, inputs)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("reset_rate", [0, 0.1], ids=["one episode", "resets"])
@pytest.mark.parametrize("length", [1, 2, 17, 51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_numba_equals_the_reference(rows, length, reset_rate):
    inputs = delta_inputs(2, 2, length, rows, rows, reset_rate, seed=length + rows)
    expected = run_delta("reference", inputs)
    assert_close(run_delta("numba", inputs), expected, 1e-11)
    assert_close(run_delta("numba", to_float32(inputs)), expected, 1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 19), st.integers(1, 19),
    st.sampled_from([0, 0.3, 1]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_numba_equals_the_reference_for_any_shape(batch, heads, length, rows, columns, reset_rate, truncate, seed):
    inputs = delta_inputs(batch, heads, length, rows, columns, reset_rate, seed)
    assert_close(run_delta("numba", inputs, truncate), run_delta("reference", inputs, truncate), 1e-11)


@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_gradients_equal_numerical_derivatives(length):
    check_derivatives(delta_inputs(2, 1, length, 3, 5, reset_rate=0.2, seed=length), fast=False)


@pytest.mark.parametrize("length", [51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_gradients_equal_numerical_derivatives_of_long_sequences(rows, length):
    check_derivatives(delta_inputs(1, 1, length, rows, rows, reset_rate=0.05, seed=length), fast=True)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", [1, 8, 13, 19])
def test_two_consecutive_calls_equal_one_call(implementation, cut):
    inputs = delta_inputs(length=20, rows=5, columns=6)
    full = run_delta(implementation, inputs)
    leaves = {name: inputs[name].requires_grad_() for name in (*SEQUENCES, "state")}
    state, outs = leaves["state"], []
    for steps in (slice(0, cut), slice(cut, 20)):
        out, state = call_delta(select_steps(inputs, steps, state), implementation=implementation)
        outs.append(out)
    out = torch.cat(outs, dim=2)
    loss = (out * inputs["d_out"]).sum() + (state * inputs["d_last"]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {"out": out.detach(), "last": state.detach()}
    results |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_close(results, full, 1e-12)


def test_single_steps_equal_the_sequence():
    """Actors (single steps, no gradients) and learners (whole sequences) compute the same bits."""
    inputs = to_float32(delta_inputs(length=19, rows=16, columns=16))
    full, last = call_delta(inputs)
    state = inputs["state"]
    for t in range(19):
        out, state = call_delta(select_steps(inputs, slice(t, t + 1), state))
        assert torch.equal(out[:, :, 0], full[:, :, t])
    assert torch.equal(state, last)


def test_results_are_bitwise_equal_in_all_threads():
    inputs = to_float32(delta_inputs(4, 3, 40, 16, 16))
    first = run_delta("numba", inputs)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run_delta("numba", inputs), range(8)):
            assert_equal(results, first)


@pytest.mark.parametrize("columns", [16, 5])
@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_inputs_are_not_modified(implementation, columns):
    inputs = to_float32(delta_inputs(length=1, rows=4, columns=columns))
    copies = {name: x.clone() for name, x in inputs.items()}
    run_delta(implementation, inputs)
    with torch.no_grad():
        out, last = call_delta(inputs, implementation=implementation)
    assert_equal(inputs, copies)
    input_storage = {x.untyped_storage().data_ptr() for x in inputs.values()}
    assert not input_storage & {out.untyped_storage().data_ptr(), last.untyped_storage().data_ptr()}


def test_second_backward_gives_the_same_gradient():
    inputs = delta_inputs(length=9)
    k = inputs["k"].requires_grad_()
    out, _ = call_delta(inputs)
    first = torch.autograd.grad(out.sum(), k, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out.sum(), k)[0])


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_memory_layout_does_not_matter(implementation):
    inputs = to_float32(delta_inputs(length=7, rows=16, columns=16))
    permuted = {
        name: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() == 4 else x.t().contiguous().t()
        for name, x in inputs.items()
    }
    assert not any(
        permuted[name].is_contiguous() for name in ("q", "k", "v", "beta", "state", "done", "d_out", "d_last")
    )
    assert_close(run_delta(implementation, permuted), run_delta(implementation, inputs), 1e-6)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_reset_blocks_state_and_gradients(implementation):
    inputs = delta_inputs(batch=2, length=6, reset_rate=0)
    inputs["done"][3, 1] = True
    inputs["d_out"][:, :, :3] = 0  # the loss depends only on outputs after the reset
    inputs["d_out"][:, :, 3:] = 1
    results = run_delta(implementation, inputs)
    for name in ("d_q", "d_k", "d_v", "d_beta"):
        assert (results[name][1, :, :3] == 0).all()
    assert (results["d_state"][1] == 0).all()
    assert (results["d_state"][0] != 0).all()
    inputs["state"][1] = torch.nan
    with torch.no_grad():
        out, last = call_delta(inputs, implementation=implementation)
    assert out[1, :, :3].isnan().all()
    assert out[1, :, 3:].isfinite().all()
    assert last.isfinite().all()


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_truncated_gradients_equal_those_of_single_steps(implementation):
    inputs = delta_inputs(length=11, rows=5, columns=6)
    truncated = run_delta(implementation, inputs, truncate=True)
    assert (truncated["d_state"] == 0).all()
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in SEQUENCES}
    state = inputs["state"]
    for t in range(11):
        current = select_steps(inputs, slice(t, t + 1), state.detach())
        leaves = [current[name].requires_grad_() for name in SEQUENCES]
        out, state = call_delta(current, implementation="reference")
        loss = (out * inputs["d_out"][:, :, t : t + 1]).sum() + (0 if t < 10 else (state * inputs["d_last"]).sum())
        for name, gradient in zip(SEQUENCES, torch.autograd.grad(loss, leaves), strict=True):
            gradients[name].append(gradient)
    for name in SEQUENCES:
        torch.testing.assert_close(truncated[f"d_{name}"], torch.cat(gradients[name], dim=2))
