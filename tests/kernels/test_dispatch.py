"""Selection of the implementation, validation of inputs, and memory kept for the backward pass."""

import sys
from importlib.util import find_spec

import pytest
import torch

from bestiary.bench.kernels import saved_bytes
from bestiary.kernels import load_implementation, numba_kernels
from bestiary.utils.errors import UserError
from tests.kernels.helpers import (
    assert_close,
    call_delta,
    call_srwm,
    delta_inputs,
    run_delta,
    run_srwm,
    srwm_inputs,
    to_float32,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numba_is_the_default_on_cpus(dtype, monkeypatch):
    def called(*inputs):
        raise StopIteration

    monkeypatch.setattr(numba_kernels, "delta_seq", called)
    inputs = delta_inputs() if dtype == torch.float64 else to_float32(delta_inputs())
    with pytest.raises(StopIteration):
        call_delta(inputs)


def test_reference_is_the_default_on_other_devices():
    inputs = {name: x.to("meta") for name, x in delta_inputs(length=3, columns=5).items()}
    out, last = call_delta(inputs)
    assert (out.shape, last.shape) == ((2, 2, 3, 5), (2, 2, 4, 5))
    assert out.device.type == "meta"


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_autocast_does_not_round_results(implementation):
    for inputs, run in ((delta_inputs(length=9), run_delta), (srwm_inputs(length=9), run_srwm)):
        halves = {name: x.bfloat16() if name in ("q", "k", "v", "x") else x for name, x in to_float32(inputs).items()}
        with torch.autocast("cpu", torch.bfloat16):
            results = run(implementation, halves)
        assert results["out"].dtype == torch.float32
        exact = run("reference", {name: x.double() if x.is_floating_point() else x for name, x in halves.items()})
        forward = [name for name in exact if not name.startswith("d_")]
        assert_close({name: results[name] for name in forward}, {name: exact[name] for name in forward}, 1e-5)


@pytest.mark.parametrize(
    ("device", "implementation", "message"),
    [
        ("cpu", "triton", "triton supports only GPUs, not cpu; choose --memory.kernel numba or reference"),
        ("cpu", "cuda", "unknown kernel cuda; choose one of auto, reference, numba, triton"),
        ("meta", "numba", "numba supports only CPUs, not meta; choose --memory.kernel triton or reference"),
    ],
)
def test_unsupported_choices_are_rejected_in_one_line(device, implementation, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = {name: x.to(device) for name, x in to_float32(delta_inputs()).items()}
    with pytest.raises(UserError, match=message) as caught:
        call_delta(inputs, implementation=implementation)
    assert "\n" not in str(caught.value)


def test_triton_rejects_float64(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(
        UserError, match=r"triton supports only float32, not torch\.float64; choose --memory.kernel reference"
    ):
        call_srwm(srwm_inputs(), implementation="triton")


@pytest.mark.parametrize(("package", "device"), [("numba", "cpu"), ("triton", "cuda")])
@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
def test_missing_package_is_reported(package, device, named, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for module in [name for name in sys.modules if name.startswith(f"bestiary.kernels.{package}_")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UserError, match=f"{package} is not installed.*pip install {package}.* reference"):
        load_implementation(package if named else "auto", device)
    assert load_implementation("reference", device)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_triton_is_installed():
    """Without Triton, test_triton is skipped and would not detect a kernel that does not compile."""
    assert find_spec("triton"), "pip install -e '.[test]'"


@pytest.mark.parametrize("name", ["q", "v", "beta", "done", "state"])
def test_wrong_shapes_are_rejected(name):
    inputs = delta_inputs()
    inputs[name] = inputs[name][:1]
    with pytest.raises(ValueError, match=name):
        call_delta(inputs)


@pytest.mark.parametrize("name", ["base_q", "base_b", "shift_y", "shift_k"])
def test_wrong_shapes_of_matrices_are_rejected(name):
    inputs = srwm_inputs()
    inputs[name] = inputs[name][..., :3]
    with pytest.raises(ValueError, match=f"{name[:4]}.* of W{name[-1]}: expected shape"):
        call_srwm(inputs)


def test_done_must_be_bool():
    inputs = delta_inputs()
    inputs["done"] = inputs["done"].to(torch.uint8)
    with pytest.raises(ValueError, match="bool"):
        call_delta(inputs)


def test_memory_kept_for_backward_is_linear_in_time():
    """The kernels keep far less than one matrix per step."""

    def bytes_kept(length):
        inputs = to_float32(srwm_inputs(1, 1, length, 16, reset_rate=0))
        inputs = {name: x.requires_grad_() if name != "done" else x for name, x in inputs.items()}
        return saved_bytes(lambda: call_srwm(inputs))

    increase = bytes_kept(384) - bytes_kept(256)
    assert increase == bytes_kept(256) - bytes_kept(128) < 128 * (16 * 52 * 4) / 3
    with torch.no_grad():
        assert bytes_kept(128) == 0


def test_reference_equals_the_formula():
    """The reference implementation equals the formula written in NumPy for one head."""
    inputs = delta_inputs(1, 1, 4, 3, 2, reset_rate=0)
    out, last = call_delta(inputs, implementation="reference")
    q, k, v, beta, w = (inputs[name][0, 0].numpy() for name in ("q", "k", "v", "beta", "state"))
    for t in range(4):
        w = w + k[t][:, None] * (beta[t] * (v[t] - k[t] @ w))[None, :]
        torch.testing.assert_close(out[0, 0, t], torch.from_numpy(q[t] @ w))
    torch.testing.assert_close(last[0, 0], torch.from_numpy(w))
