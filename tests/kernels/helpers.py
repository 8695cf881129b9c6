"""Random inputs of both operations, their outputs and gradients, and comparisons of results."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import delta_seq, srwm_seq

Tensors = dict[str, Tensor]
MATRICES = ("y", "q", "k", "b")  # suffixes of the four matrices Wy, Wq, Wk, Wb


def random_resets(length: int, batch: int, reset_rate: float, generator: torch.Generator) -> Tensor:
    """Return bool [T,B] in which each element is True with probability `reset_rate`."""
    return torch.rand(length, batch, generator=generator) < reset_rate


def delta_inputs(
    batch: int = 2,
    heads: int = 2,
    length: int = 5,
    rows: int = 4,
    columns: int = 4,
    reset_rate: float = 0.2,
    seed: int = 0,
    has_decay: bool = False,
) -> Tensors:
    """Return float64 inputs of delta_seq and the gradients `d_out` and `d_last` of its outputs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    lead = (batch, heads, length)
    inputs = {
        "q": normal(*lead, rows).softmax(-1),
        "k": normal(*lead, rows).softmax(-1),
        "v": normal(*lead, columns),
        "beta": normal(*lead, 1).sigmoid(),
        "state": normal(batch, heads, rows, columns),
        "done": random_resets(length, batch, reset_rate, g),
        "d_out": normal(*lead, columns),
        "d_last": normal(batch, heads, rows, columns),
    }
    if has_decay:
        inputs["decay"] = normal(*lead, 1).sigmoid()
    return inputs


gated_inputs = partial(delta_inputs, has_decay=True)  # inputs of delta_seq with decay


def call_delta(inputs: Tensors, **options: Any) -> tuple[Tensor, Tensor]:
    """Call delta_seq with the named inputs."""
    q, k, v, beta, done, state = (inputs[name] for name in ("q", "k", "v", "beta", "done", "state"))
    return delta_seq(q, k, v, beta, done, state, decay=inputs.get("decay"), **options)


def run_delta(implementation: str, inputs: Tensors, truncate: int = 0) -> Tensors:
    """Return the output, the final state and the gradient of every input."""
    names = [name for name in ("q", "k", "v", "beta", "decay", "state") if name in inputs]
    x: Tensors = {name: inputs[name].detach().requires_grad_() for name in names}
    out, last = call_delta({**x, "done": inputs["done"]}, truncate=truncate, implementation=implementation)
    loss = (out * inputs["d_out"]).sum() + (last * inputs["d_last"]).sum()
    gradients = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
    results = {"out": out.detach(), "last": last.detach()}
    return results | {f"d_{name}": gradient for name, gradient in zip(x, gradients, strict=True)}


def srwm_inputs(
    batch: int = 2,
    heads: int = 2,
    length: int = 5,
    rows: int = 4,
    columns: int | None = None,
    reset_rate: float = 0.2,
    seed: int = 0,
) -> Tensors:
    """Return float64 inputs of srwm_seq and the gradients `d_out` and `d_last_*` of its outputs.

    The base is scaled as at initialisation.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    widths = dict(zip(MATRICES, (columns or rows, rows, rows, 4), strict=True))
    return {
        "x": normal(batch, heads, length, rows).softmax(-1),
        **{f"base_{suffix}": normal(heads, rows, width) / rows**0.5 for suffix, width in widths.items()},
        **{f"shift_{suffix}": normal(batch, heads, rows, width) / rows for suffix, width in widths.items()},
        "done": random_resets(length, batch, reset_rate, g),
        "d_out": normal(batch, heads, length, widths["y"]),
        **{f"d_last_{suffix}": normal(batch, heads, rows, width) for suffix, width in widths.items()},
    }


def call_srwm(inputs: Tensors, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call srwm_seq with the named inputs."""
    base, shift = (tuple(inputs[f"{kind}_{suffix}"] for suffix in MATRICES) for kind in ("base", "shift"))
    return srwm_seq(inputs["x"], inputs["done"], base, shift, **options)


def run_srwm(implementation: str, inputs: Tensors, truncate: bool = False) -> Tensors:
    """Return the output, the final shifts `last_*` and the gradient of every input."""
    x = {name: v.detach().requires_grad_() for name, v in inputs.items() if name[0] != "d"}
    out, last = call_srwm({**x, "done": inputs["done"]}, truncate=truncate, implementation=implementation)
    loss = (out * inputs["d_out"]).sum()
    loss = loss + sum((w * inputs[f"d_last_{suffix}"]).sum() for suffix, w in zip(MATRICES, last, strict=True))
    gradients = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
    results = {"out": out.detach(), **{f"last_{suffix}": w.detach() for suffix, w in zip(MATRICES, last, strict=True)}}
    return results | {f"d_{name}": gradient for name, gradient in zip(x, gradients, strict=True)}


def to_float32(inputs: Tensors) -> Tensors:
    """Convert floating-point tensors to float32."""
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}


def assert_close(results: Tensors, expected: Tensors, tolerance: float) -> None:
    """Check that errors are small relative to the largest magnitude of each tensor.

    Errors relative to to_float32 elements would be dominated by elements near zero.
    """
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        result = results[name]
        assert result.shape == tensor.shape, name
        error = (result.double() - tensor.double()).abs().max().item()
        assert error <= tolerance * max(tensor.abs().max().item(), 1e-6), f"{name}: error {error}"


def assert_equal(results: Tensors, expected: Tensors) -> None:
    """Check that tensors are bitwise equal."""
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(results[name], tensor), name
