"""Inputs of both operations, all that comes out of them, and how far two such results are apart."""

from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import delta_seq, srwm_seq

Tensors = dict[str, Tensor]
PARTS = ("y", "q", "k", "b")


def resets(length: int, batch: int, share: float, generator: torch.Generator) -> Tensor:
    return torch.rand(length, batch, generator=generator) < share


def delta_inputs(
    batch: int = 2, heads: int = 2, length: int = 5, rows: int = 4, columns: int = 4, share: float = 0.2, seed: int = 0
) -> Tensors:
    """float64. `d_out` and `d_last` are the gradients that arrive."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    lead = (batch, heads, length)
    return {
        "q": normal(*lead, rows).softmax(-1),
        "k": normal(*lead, rows).softmax(-1),
        "v": normal(*lead, columns),
        "beta": normal(*lead, 1).sigmoid(),
        "state": normal(batch, heads, rows, columns),
        "done": resets(length, batch, share, g),
        "d_out": normal(*lead, columns),
        "d_last": normal(batch, heads, rows, columns),
    }


def call_delta(inputs: Tensors, **options: Any) -> tuple[Tensor, Tensor]:
    q, k, v, beta, done, state = (inputs[name] for name in ("q", "k", "v", "beta", "done", "state"))
    return delta_seq(q, k, v, beta, done, state, **options)


def run_delta(implementation: str, inputs: Tensors, truncate: bool = False) -> Tensors:
    """out, last, and the gradient of every input."""
    x = {name: inputs[name].detach().requires_grad_() for name in ("q", "k", "v", "beta", "state")}
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
    share: float = 0.2,
    seed: int = 0,
) -> Tensors:
    """float64, base scaled as at initialisation. `d_out` and `d_last_*` are the gradients that arrive."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    widths = dict(zip(PARTS, (columns or rows, rows, rows, 4), strict=True))
    return {
        "x": normal(batch, heads, length, rows).softmax(-1),
        **{f"base_{part}": normal(heads, rows, width) / rows**0.5 for part, width in widths.items()},
        **{f"shift_{part}": normal(batch, heads, rows, width) / rows for part, width in widths.items()},
        "done": resets(length, batch, share, g),
        "d_out": normal(batch, heads, length, widths["y"]),
        **{f"d_last_{part}": normal(batch, heads, rows, width) for part, width in widths.items()},
    }


def call_srwm(inputs: Tensors, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    base, shift = (tuple(inputs[f"{kind}_{part}"] for part in PARTS) for kind in ("base", "shift"))
    return srwm_seq(inputs["x"], inputs["done"], base, shift, **options)


def run_srwm(implementation: str, inputs: Tensors, truncate: bool = False) -> Tensors:
    """out, last_*, and the gradient of every input."""
    x = {name: v.detach().requires_grad_() for name, v in inputs.items() if name[0] != "d"}
    out, last = call_srwm({**x, "done": inputs["done"]}, truncate=truncate, implementation=implementation)
    loss = (out * inputs["d_out"]).sum()
    loss = loss + sum((w * inputs[f"d_last_{part}"]).sum() for part, w in zip(PARTS, last, strict=True))
    gradients = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
    results = {"out": out.detach(), **{f"last_{part}": w.detach() for part, w in zip(PARTS, last, strict=True)}}
    return results | {f"d_{name}": gradient for name, gradient in zip(x, gradients, strict=True)}


def single(inputs: Tensors) -> Tensors:
    return {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}


def assert_near(results: Tensors, truth: Tensors, tolerance: float) -> None:
    """Relative to the greatest number of each tensor: element by element, what is near zero would decide."""
    assert results.keys() == truth.keys()
    for name, expected in truth.items():
        got = results[name]
        assert got.shape == expected.shape, name
        apart = (got.double() - expected.double()).abs().max().item()
        assert apart <= tolerance * max(expected.abs().max().item(), 1e-6), f"{name}: {apart} apart"


def assert_same(results: Tensors, others: Tensors) -> None:
    """Bit for bit."""
    assert results.keys() == others.keys()
    for name, other in others.items():
        assert torch.equal(results[name], other), name
