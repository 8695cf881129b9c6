"""The matrix that rewrites itself: by hand, against the loop of torch operations, and against numerical derivatives."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.kernels import srwm_seq
from tests.kernels.helpers import PARTS, Tensors, assert_near, assert_same, call_srwm, run_srwm, single, srwm_inputs

pytestmark = pytest.mark.xdist_group("float64")  # compiled for the tests alone, and by one process
ON_CPU = ["reference", "numba"]


def floats(inputs: Tensors) -> list[str]:
    return [name for name in inputs if name[0] != "d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_two_steps_by_hand(implementation, dtype):
    def matrix(*rows):
        return torch.tensor([rows], dtype=dtype)

    none, four = torch.zeros(1, 2, 2, dtype=dtype), torch.zeros(1, 2, 4, dtype=dtype)
    inputs = {
        "x": matrix((1, 0), (0, 1))[None],
        "base_y": matrix((1, 0), (0, 2)),
        "base_q": matrix((math.log(3), 0), (0, 0)),
        "base_k": none,
        "base_b": four,
        **{f"shift_{part}": (four if part == "b" else none)[None] for part in PARTS},
        "done": torch.zeros(2, 1, dtype=torch.bool),
        "d_out": matrix((0, 0), (1, 1))[None],
        **{f"d_last_{part}": (four if part == "b" else none)[None] for part in PARTS},
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
    one = {name: x[:, :, :1] if name in ("x", "d_out") else x for name, x in inputs.items()}
    one["done"] = inputs["done"][:1]
    after = run_srwm(implementation, one)
    moved = {
        "y": matrix((1.0625, -0.125), (0.0625, 1.875)),
        "q": matrix((1.1672756, 0), (0.0686633, 0)),
        "k": none,
        "b": four,
    }
    for part, value in moved.items():
        torch.testing.assert_close(one[f"base_{part}"] + after[f"last_{part}"][0], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("share", [0, 0.1], ids=["one episode", "resets"])
@pytest.mark.parametrize("length", [1, 2, 17, 51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_numba_equals_the_loop(rows, length, share):
    inputs = srwm_inputs(2, 2, length, rows, share=share, seed=length + rows)
    truth = run_srwm("reference", inputs)
    assert_near(run_srwm("numba", inputs), truth, 1e-10)
    assert_near(run_srwm("numba", single(inputs)), truth, 1e-4)


@pytest.mark.parametrize("rows", [5, 16])
def test_numba_equals_the_loop_with_the_columns_of_a_slow_net(rows):
    inputs = srwm_inputs(2, 2, 51, rows, 3 * rows + 1, share=0.05)
    truth = run_srwm("reference", inputs)
    assert_near(run_srwm("numba", inputs), truth, 1e-10)
    assert_near(run_srwm("numba", single(inputs)), truth, 1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 19), st.integers(1, 25),
    st.sampled_from([0, 0.3, 1]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_numba_equals_the_loop_for_any_shape(batch, heads, length, rows, columns, share, truncate, seed):
    inputs = srwm_inputs(batch, heads, length, rows, columns, share, seed)
    assert_near(run_srwm("numba", inputs, truncate), run_srwm("reference", inputs, truncate), 1e-10)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_extreme_scores_stay_shares(implementation):
    """Softmax and sigmoid of scores far beyond the range of exp."""
    inputs = srwm_inputs(length=3, rows=5)
    for name in ("base_q", "base_k", "base_b"):
        inputs[name] *= 1e4
    truth = run_srwm("reference", inputs)
    assert all(x.isfinite().all() for x in truth.values())
    results = run_srwm(implementation, single(inputs))
    assert all(x.isfinite().all() for x in results.values())
    assert_near({"out": results["out"]}, {"out": truth["out"]}, 1e-4)


def check_derivatives(inputs: Tensors, fast: bool) -> None:
    names = floats(inputs)

    def function(*tensors):
        out, last = call_srwm({**dict(zip(names, tensors, strict=True)), "done": inputs["done"]})
        return out, *last

    x = tuple(inputs[name].requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, x, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_gradients_are_derivatives(length):
    check_derivatives(srwm_inputs(2, 1, length, 2, 3, share=0.2, seed=length), fast=False)


@pytest.mark.parametrize("length", [51, 130])
@pytest.mark.parametrize("rows", [2, 5, 16, 32])
def test_gradients_are_derivatives_at_length(rows, length):
    check_derivatives(srwm_inputs(1, 1, length, rows, share=0.05, seed=length), fast=True)


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("cut", [1, 8, 13, 19])
def test_two_calls_in_a_row_equal_one(implementation, cut):
    inputs = srwm_inputs(length=20, rows=5, columns=7)
    whole = run_srwm(implementation, inputs)
    leaves = {name: inputs[name].requires_grad_() for name in floats(inputs)}
    base, shift = (tuple(leaves[f"{kind}_{part}"] for part in PARTS) for kind in ("base", "shift"))
    outs = []
    for piece in (slice(0, cut), slice(cut, 20)):
        x = leaves["x"][:, :, piece]
        out, shift = srwm_seq(x, inputs["done"][piece], base, shift, implementation=implementation)
        outs.append(out)
    results = {"out": torch.cat(outs, dim=2), **{f"last_{part}": w for part, w in zip(PARTS, shift, strict=True)}}
    loss = (results["out"] * inputs["d_out"]).sum()
    loss = loss + sum((results[f"last_{part}"] * inputs[f"d_last_{part}"]).sum() for part in PARTS)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    results = {name: x.detach() for name, x in results.items()}
    results |= {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    assert_near(results, whole, 1e-11)


def test_step_by_step_equals_the_sequence():
    """What acting computes, a step at a time and without gradients, is what learning computes."""
    inputs = single(srwm_inputs(length=19, rows=16))
    base, shift = (tuple(inputs[f"{kind}_{part}"] for part in PARTS) for kind in ("base", "shift"))
    whole, last = srwm_seq(inputs["x"], inputs["done"], base, shift)
    for t in range(19):
        out, shift = srwm_seq(inputs["x"][:, :, t : t + 1], inputs["done"][t : t + 1], base, shift)
        assert torch.equal(out[:, :, 0], whole[:, :, t])
    assert all(torch.equal(a, b) for a, b in zip(shift, last, strict=True))


def test_repeats_bit_for_bit_in_any_thread():
    inputs = single(srwm_inputs(4, 3, 40, 16))
    first = run_srwm("numba", inputs)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run_srwm("numba", inputs), range(8)):
            assert_same(results, first)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_inputs_are_left_alone(implementation):
    inputs = single(srwm_inputs(length=1, rows=16))
    copies = {name: x.clone() for name, x in inputs.items()}
    run_srwm(implementation, inputs)
    with torch.no_grad():
        out, last = call_srwm(inputs, implementation=implementation)
    assert_same(inputs, copies)
    taken = {x.untyped_storage().data_ptr() for x in inputs.values()}
    assert not taken & {x.untyped_storage().data_ptr() for x in (out, *last)}


@pytest.mark.parametrize("implementation", ON_CPU)
def test_memory_layout_does_not_matter(implementation):
    inputs = single(srwm_inputs(length=7, rows=16))
    strange = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in strange.values())
    assert_near(run_srwm(implementation, strange), run_srwm(implementation, inputs), 1e-6)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_a_reset_forgets_everything(implementation):
    """After it, only the base counts: whatever the shift was."""
    inputs = srwm_inputs(length=6, share=0)
    inputs["done"][3] = True
    inputs["d_out"][:, :, :3] = 0
    results = run_srwm(implementation, inputs)
    assert (results["d_x"][:, :, :3] == 0).all()
    assert all((results[f"d_shift_{part}"] == 0).all() for part in PARTS)
    assert all((results[f"d_base_{part}"] != 0).any() for part in PARTS)
    for part in PARTS:
        inputs[f"shift_{part}"] = torch.full_like(inputs[f"shift_{part}"], torch.nan)
    out, last = call_srwm(inputs, implementation=implementation)
    assert out[:, :, :3].isnan().all()
    assert torch.equal(out[:, :, 3:], results["out"][:, :, 3:])
    assert all(torch.equal(w, results[f"last_{part}"]) for part, w in zip(PARTS, last, strict=True))


@pytest.mark.parametrize("implementation", ON_CPU)
def test_what_is_not_a_number_stays_with_its_batch_entry(implementation):
    inputs = srwm_inputs(batch=3, length=6, rows=5, columns=7, share=0)
    truth = run_srwm(implementation, inputs)
    inputs["x"][1, 0, 2] = torch.nan
    results = run_srwm(implementation, inputs)
    for name in ("out", "last_y", "last_b", "d_x", "d_shift_y", "d_shift_b"):
        assert torch.equal(results[name][::2], truth[name][::2]), name
        assert results[name][1, 0].isnan().any(), name


@pytest.mark.parametrize("length", [1, 2, 51])
def test_all_four_matrices_learn_from_two_steps_on(length):
    """The regression of the published code, in which only Wy ever had a gradient."""
    inputs = srwm_inputs(length=length, rows=16, share=0)
    inputs |= {name: torch.zeros_like(x) for name, x in inputs.items() if name.startswith("d_last")}
    results = run_srwm("numba", inputs)
    assert (results["d_base_y"] != 0).all()
    for part in ("q", "k", "b"):
        assert (results[f"d_base_{part}"] != 0).any() == (length > 1)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_truncated_only_the_output_matrix_learns(implementation):
    inputs = srwm_inputs(length=11, rows=5, columns=7)
    inputs |= {name: torch.zeros_like(x) for name, x in inputs.items() if name.startswith("d_last")}
    results = run_srwm(implementation, inputs, truncate=True)
    for name in ("d_base_q", "d_base_k", "d_base_b", *(f"d_shift_{part}" for part in PARTS)):
        assert (results[name] == 0).all(), name
    own = torch.einsum("bhte,bhtm->hem", inputs["x"], inputs["d_out"])
    torch.testing.assert_close(results["d_base_y"], own)
