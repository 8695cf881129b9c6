"""Which implementation is taken, what it refuses, and what it keeps for backward."""

import sys
from importlib.util import find_spec

import pytest
import torch

from bestiary.errors import UserError
from bestiary.kernels import bench, choose, cpu
from tests.kernels.helpers import (
    assert_near,
    call_delta,
    call_srwm,
    delta_inputs,
    run_delta,
    run_srwm,
    single,
    srwm_inputs,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numba_is_taken_on_cpus(dtype, monkeypatch):
    def taken(*inputs):
        raise StopIteration

    monkeypatch.setattr(cpu, "delta_seq", taken)
    inputs = delta_inputs() if dtype == torch.float64 else single(delta_inputs())
    with pytest.raises(StopIteration):
        call_delta(inputs)


def test_other_devices_take_the_reference():
    inputs = {name: x.to("meta") for name, x in delta_inputs(length=3, columns=5).items()}
    out, last = call_delta(inputs)
    assert (out.shape, last.shape) == ((2, 2, 3, 5), (2, 2, 4, 5))
    assert out.device.type == "meta"


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_under_autocast_results_are_float32_and_not_rounded(implementation):
    for inputs, run in ((delta_inputs(length=9), run_delta), (srwm_inputs(length=9), run_srwm)):
        halves = {name: x.bfloat16() if name in ("q", "k", "v", "x") else x for name, x in single(inputs).items()}
        with torch.autocast("cpu", torch.bfloat16):
            results = run(implementation, halves)
        assert results["out"].dtype == torch.float32
        exact = run("reference", {name: x.double() if x.is_floating_point() else x for name, x in halves.items()})
        forward = [name for name in exact if not name.startswith("d_")]
        assert_near({name: results[name] for name in forward}, {name: exact[name] for name in forward}, 1e-5)


@pytest.mark.parametrize(
    ("device", "implementation", "message"),
    [
        ("cpu", "triton", "triton needs a GPU, and this is for cpu: choose numba or reference"),
        ("cpu", "cuda", "there is no kernel cuda: there are auto, reference, numba, triton"),
        ("meta", "numba", "numba computes on CPUs, and this is for meta: choose triton or reference"),
    ],
)
def test_impossible_choices_are_refused_in_one_line(device, implementation, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs = {name: x.to(device) for name, x in single(delta_inputs()).items()}
    with pytest.raises(UserError, match=message) as caught:
        call_delta(inputs, implementation=implementation)
    assert "\n" not in str(caught.value)


def test_triton_refuses_float64(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match=r"triton computes in float32, and this is torch\.float64: choose reference"):
        call_srwm(srwm_inputs(), implementation="triton")


@pytest.mark.parametrize(("package", "module", "device"), [("numba", "cpu", "cpu"), ("triton", "gpu", "cuda")])
@pytest.mark.parametrize("named", [True, False], ids=["asked for", "auto"])
def test_what_is_not_installed_is_said(package, module, device, named, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"bestiary.kernels.{module}", raising=False)
    said = f"{package} is not installed: pip install {package}, or choose reference, which is slow"
    with pytest.raises(UserError, match=said):
        choose(package if named else "auto", device)
    assert choose("reference", device)


@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_triton_is_there_to_be_tested():
    """Without it, test_triton is skipped, and a kernel that does not compile would go unnoticed."""
    assert find_spec("triton"), "pip install -e '.[test]'"


@pytest.mark.parametrize("name", ["q", "v", "beta", "done", "state"])
def test_wrong_shapes_are_refused(name):
    inputs = delta_inputs()
    inputs[name] = inputs[name][:1]
    with pytest.raises(ValueError, match=name):
        call_delta(inputs)


@pytest.mark.parametrize("name", ["base_q", "base_b", "shift_y", "shift_k"])
def test_wrong_shapes_of_parts_are_refused(name):
    inputs = srwm_inputs()
    inputs[name] = inputs[name][..., :3]
    with pytest.raises(ValueError, match=f"{name[:4]}.* of {name[-1]} must be"):
        call_srwm(inputs)


def test_done_must_be_bool():
    inputs = delta_inputs()
    inputs["done"] = inputs["done"].to(torch.uint8)
    with pytest.raises(ValueError, match="bool"):
        call_delta(inputs)


def test_kept_for_backward_grows_with_time_alone():
    """Far less than a matrix a step."""

    def kept(length):
        inputs = single(srwm_inputs(1, 1, length, 16, share=0))
        inputs = {name: x.requires_grad_() if name != "done" else x for name, x in inputs.items()}
        return bench.kept_bytes(lambda: call_srwm(inputs))

    assert kept(384) - kept(256) == kept(256) - kept(128) < 128 * (16 * 52 * 4) / 3
    with torch.no_grad():
        assert kept(128) == 0


def test_reference_is_what_it_says():
    """The loop that all else is compared with, against the sums written out for one head."""
    inputs = delta_inputs(1, 1, 4, 3, 2, share=0)
    out, last = call_delta(inputs, implementation="reference")
    q, k, v, beta, w = (inputs[name][0, 0].numpy() for name in ("q", "k", "v", "beta", "state"))
    for t in range(4):
        w = w + k[t][:, None] * (beta[t] * (v[t] - k[t] @ w))[None, :]
        torch.testing.assert_close(out[0, 0, t], torch.from_numpy(q[t] @ w))
    torch.testing.assert_close(last[0, 0], torch.from_numpy(w))
