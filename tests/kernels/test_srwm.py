"""Self-referential weight matrix: hand-computed example, comparison with the reference, numerical derivatives."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.kernels import srwm_seq
from tests.kernels.helpers import (
    MATRICES,
    Tensors,
    assert_close,
    assert_equal,
    call_srwm,
    run_srwm,
    srwm_inputs,
    to_float32,
)

# One process runs these tests, because only tests use the float64 kernels and compiling them takes long.
pytestmark = pytest.mark.xdist_group("float64")
CPU_IMPLEMENTATIONS = ["reference", "numba"]


def differentiable(inputs: Tensors) -> list[str]:
    """Return the names of the inputs that have gradients."""
    return [name for name in inputs if name[0] != "d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_hand_computed_example_of_two_steps(implementation, dtype):
    def matrix(*rows):
        return torch.tensor([rows], dtype=dtype)

    zero_2x2 = torch.zeros(1, 2, 2, dtype=dtype)
    zero_2x4 = torch.zeros(1, 2, 4, dtype=dtype)
    inputs = {
        "x": matrix((1, 0), (0, 1))[None],
        "base_y": matrix((1, 0), (0, 2)),
        "base_q": matrix((math.log(3), 0), (0, 0)),
        "base_k": zero_2x2,
        "base_b": zero_2x4,
        **{f"shift_{suffix}": (zero_2x4 if suffix == "b" else zero_2x2)[None] for suffix in MATRICES},
        "done": torch.zeros(2, 1, dtype=torch.bool),
        "d_out": matrix((0, 0), (1, 1))[None],
        **{f"d_last_{suffix}": (zero_2x4 if suffix == "b" else zero_2x2)[None] for suffix in MATRICES},
    }
    expected = {
        "out": matrix((1, 0), (0.0625, 1.875))[None],
        "d_x": matrix((-0.0514975, 0), (0.9375, 1.9375))[None],
        "d_base_y": matrix((0.0625, 0.0625), (0.9375, 0.9375)),
        "d_base_q": matrix((-0.046875, 0.046875), (0, 0)),
        "d_base_k": matrix((0.09375, -0.09375), (0, 0)),
        "d_base_b": matrix((-0.03125, 0, 0, 0), (0, 0, 0, 0)),
    }
    results = run_srwm(implementation, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=1e-6)
    first_step = {name: x[:, :, :1] if name in ("x", "d_out") else x for name, x in inputs.items()}
    first_step["done"] = inputs["done"][:1]
    after_first_step = run_srwm(implementation, first_step)
    expected_weights = {
        "y": matrix((1.0625, -0.125), (0.0625, 1.875)),
        "q": matrix((1.1672756, 0), (0.0686633, 0)),
        "k": zero_2x2,
        "b": zero_2x4,
    }
    for suffix, value in expected_weights.items():
        weights = first_step[f"base_{suffix}"] + after_first_step[f"last_{suffix}"][0]
        torch.testing.assert_close(weights, value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_norm_can_grow_by_more_than_a_quarter_in_one_step(implementation):
    """If k selects row 0, q selects row 1, and b = 1, row 1 is copied to row 0: the norm grows from 2 to sqrt(8)."""
    large = 60.0  # softmax and sigmoid of this number are 1
    base = [
        torch.tensor([matrix], dtype=torch.float64)
        for matrix in (
            [[0.0, 0.0], [2.0, 0.0]],  # y
            [[0.0, large], [0.0, 0.0]],  # q
            [[large, 0.0], [0.0, 0.0]],  # k
            [[large] * 4, [0.0] * 4],  # b
        )
    ]
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    _, shift = srwm_seq(
        x,
        torch.zeros(1, 1, dtype=torch.bool),
        (base[0], base[1], base[2], base[3]),
        tuple(torch.zeros_like(matrix)[None] for matrix in base),
        implementation=implementation,
    )
    assert base[0].norm().item() == 2.0
    assert (base[0] + shift[0][0]).norm().item() == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("reset_rate", [0, 0.1], ids=["one episode", "resets"])
@pytest.mark.parametrize("length", [1, 2, 17, 51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_numba_equals_the_reference(rows, length, reset_rate):
    inputs = srwm_inputs(2, 2, length, rows, reset_rate=reset_rate, seed=length + rows)
    expected = run_srwm("reference", inputs)
    assert_close(run_srwm("numba", inputs), expected, 1e-10)
    assert_close(run_srwm("numba", to_float32(inputs)), expected, 1e-4)


@pytest.mark.parametrize("rows", [5, 16])
def test_numba_equals_the_reference_with_more_columns_than_rows(rows):
    inputs = srwm_inputs(2, 2, 51, rows, 3 * rows + 1, reset_rate=0.05)
    expected = run_srwm("reference", inputs)
    assert_close(run_srwm("numba", inputs), expected, 1e-10)
    assert_close(run_srwm("numba", to_float32(inputs)), expected, 1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 19), st.integers(1, 25),
    st.sampled_from([0, 0.3, 1]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_numba_equals_the_reference_for_any_shape(batch, heads, length, rows, columns, reset_rate, truncate, seed):
    inputs = srwm_inputs(batch, heads, length, rows, columns, reset_rate, seed)
    assert_close(run_srwm("numba", inputs, truncate), run_srwm("reference", inputs, truncate), 1e-10)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_extreme_scores_give_finite_results(implementation):
    """Softmax and sigmoid of scores far beyond the range of exp."""
    inputs = srwm_inputs(length=3, rows=5)
    for name in ("base_q", "base_k", "base_b"):
        inputs[name] *= 1e4
    expected = run_srwm("reference", inputs)
    assert all(x.isfinite().all() for x in expected.values())
    results = run_srwm(implementation, to_float32(inputs))
    assert all(x.isfinite().all() for x in results.values())
    assert_close({"out": results["out"]}, {"out": expected["out"]}, 1e-4)


def check_derivatives(inputs: Tensors, fast: bool) -> None:
    names = differentiable(inputs)

    def function(*tensors):
        out, last = call_srwm({**dict(zip(names, tensors, strict=True)), "done": inputs["done"]})
        return out, *last

    x = tuple(inputs[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, x, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_gradients_equal_numerical_derivatives(length):
    check_derivatives(srwm_inputs(2, 1, length, 2, 3, reset_rate=0.2, seed=length), fast=False)


@pytest.mark.parametrize("length", [51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_gradients_equal_numerical_derivatives_of_long_sequences(rows, length):
    check_derivatives(srwm_inputs(1, 1, length, rows, reset_rate=0.05, seed=length), fast=True)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", [1, 8, 13, 19])
def test_two_consecutive_calls_equal_one_call(implementation, cut):
    inputs = srwm_inputs(length=20, rows=5, columns=7)
    full = run_srwm(implementation, inputs)
    leaves = {name: inputs[name].requires_grad_() for name in differentiable(inputs)}
    base, shift = (tuple(leaves[f"{kind}_{suffix}"] for suffix in MATRICES) for kind in ("base", "shift"))
    outs = []
    for steps in (slice(0, cut), slice(cut, 20)):
        x = leaves["x"][:, :, steps]
        out, shift = srwm_seq(x, inputs["done"][steps], base, shift, implementation=implementation)
        outs.append(out)
    results = {
        "out": torch.cat(outs, dim=2),
        **{f"last_{suffix}": w for suffix, w in zip(MATRICES, shift, strict=True)},
    }
    loss = (results["out"] * inputs["d_out"]).sum()
    loss = loss + sum((results[f"last_{suffix}"] * inputs[f"d_last_{suffix}"]).sum() for suffix in MATRICES)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {name: x.detach() for name, x in results.items()}
    results |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_close(results, full, 1e-11)


def test_single_steps_equal_the_sequence():
    """Actors (single steps, no gradients) and learners (whole sequences) compute the same bits."""
    inputs = to_float32(srwm_inputs(length=19, rows=16))
    base, shift = (tuple(inputs[f"{kind}_{suffix}"] for suffix in MATRICES) for kind in ("base", "shift"))
    full, last = srwm_seq(inputs["x"], inputs["done"], base, shift)
    for t in range(19):
        out, shift = srwm_seq(inputs["x"][:, :, t : t + 1], inputs["done"][t : t + 1], base, shift)
        assert torch.equal(out[:, :, 0], full[:, :, t])
    assert all(torch.equal(a, b) for a, b in zip(shift, last, strict=True))


def test_results_are_bitwise_equal_in_all_threads():
    inputs = to_float32(srwm_inputs(4, 3, 40, 16))
    first = run_srwm("numba", inputs)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run_srwm("numba", inputs), range(8)):
            assert_equal(results, first)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_inputs_are_not_modified(implementation):
    inputs = to_float32(srwm_inputs(length=1, rows=16))
    copies = {name: x.clone() for name, x in inputs.items()}
    run_srwm(implementation, inputs)
    with torch.no_grad():
        out, last = call_srwm(inputs, implementation=implementation)
    assert_equal(inputs, copies)
    input_storage = {x.untyped_storage().data_ptr() for x in inputs.values()}
    assert not input_storage & {x.untyped_storage().data_ptr() for x in (out, *last)}


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_memory_layout_does_not_matter(implementation):
    inputs = to_float32(srwm_inputs(length=7, rows=16))
    permuted = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in permuted.values())
    assert_close(run_srwm(implementation, permuted), run_srwm(implementation, inputs), 1e-6)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_reset_blocks_state_and_gradients(implementation):
    """After a reset, results depend only on the base and not on the shift before the reset."""
    inputs = srwm_inputs(length=6, reset_rate=0)
    inputs["done"][3] = True
    inputs["d_out"][:, :, :3] = 0
    results = run_srwm(implementation, inputs)
    assert (results["d_x"][:, :, :3] == 0).all()
    assert all((results[f"d_shift_{suffix}"] == 0).all() for suffix in MATRICES)
    assert all((results[f"d_base_{suffix}"] != 0).any() for suffix in MATRICES)
    for suffix in MATRICES:
        inputs[f"shift_{suffix}"] = torch.full_like(inputs[f"shift_{suffix}"], torch.nan)
    out, last = call_srwm(inputs, implementation=implementation)
    assert out[:, :, :3].isnan().all()
    assert torch.equal(out[:, :, 3:], results["out"][:, :, 3:])
    assert all(torch.equal(w, results[f"last_{suffix}"]) for suffix, w in zip(MATRICES, last, strict=True))


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_nan_does_not_spread_to_other_batch_entries(implementation):
    inputs = srwm_inputs(batch=3, length=6, rows=5, columns=7, reset_rate=0)
    expected = run_srwm(implementation, inputs)
    inputs["x"][1, 0, 2] = torch.nan
    results = run_srwm(implementation, inputs)
    for name in ("out", "last_y", "last_b", "d_x", "d_shift_y", "d_shift_b"):
        assert torch.equal(results[name][::2], expected[name][::2]), name
        assert results[name][1, 0].isnan().any(), name


@pytest.mark.parametrize("length", [1, 2, 51])
def test_all_four_matrices_have_gradients_for_two_or_more_steps(length):
    """In the published code only Wy had a gradient."""
    inputs = srwm_inputs(length=length, rows=16, reset_rate=0)
    inputs |= {name: torch.zeros_like(x) for name, x in inputs.items() if name.startswith("d_last")}
    results = run_srwm("numba", inputs)
    assert (results["d_base_y"] != 0).all()
    for suffix in ("q", "k", "b"):
        assert (results[f"d_base_{suffix}"] != 0).any() == (length > 1)


@pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)
def test_only_the_output_matrix_has_a_truncated_gradient(implementation):
    inputs = srwm_inputs(length=11, rows=5, columns=7)
    inputs |= {name: torch.zeros_like(x) for name, x in inputs.items() if name.startswith("d_last")}
    results = run_srwm(implementation, inputs, truncate=True)
    for name in ("d_base_q", "d_base_k", "d_base_b", *(f"d_shift_{suffix}" for suffix in MATRICES)):
        assert (results[name] == 0).all(), name
    expected = torch.einsum("bhte,bhtm->hem", inputs["x"], inputs["d_out"])
    torch.testing.assert_close(results["d_base_y"], expected)
