"""Recurrences over whole sequences, of memories that are matrices: differentiable operations in three implementations.

    delta_seq   the delta rule: a matrix in which keys are given new values
    srwm_seq    a matrix that also writes itself: the self-referential weight matrix

    reference   a loop of torch operations, which says what is computed: any device, any type
    numba       CPUs, float32 and float64; one thread, without Python's lock
    triton      GPUs, float32

`auto` takes numba for tensors of a CPU, triton for those of a GPU, and the reference for the rest. All give the gradients of
every input but `done`, and take gradients of the last state. Inputs are never changed and results never share memory with
them. Half-precision inputs, as under autocast, are computed with and answered in float32.

`truncate=True` lets no gradient pass from a step to the step before, as in the first published code: then only what a
step's own output depends on is learnt.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bestiary.errors import UserError

IMPLEMENTATIONS = ("auto", "reference", "numba", "triton")


def delta_seq(
    q: Tensor,  # [B,H,T,E] what is asked for
    k: Tensor,  # [B,H,T,E] where is written
    v: Tensor,  # [B,H,T,M] what is written
    beta: Tensor,  # [B,H,T,1] how much of it, 0..1
    done: Tensor,  # bool [T,B] an episode began: the state is zero before this step
    state: Tensor,  # [B,H,E,M]
    *,
    truncate: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """At each step W <- W + k ⊗ beta (v - k W), then o = q W. Gives o [B,H,T,M] and the last W [B,H,E,M]."""
    (batch, heads, steps, rows), columns = k.shape, v.shape[-1]
    _check("q", q, (batch, heads, steps, rows))
    _check("v", v, (batch, heads, steps, columns))
    _check("beta", beta, (batch, heads, steps, 1))
    _check("done", done, (steps, batch), torch.bool)
    _check("state", state, (batch, heads, rows, columns))
    q, k, v, beta, state = _one_type(q, k, v, beta, state)
    with _exact(k.device.type):
        return choose(implementation, k.device.type, k.dtype).delta_seq(q, k, v, beta, done, state, truncate)


def srwm_seq(
    x: Tensor,  # [B,H,T,E], a distribution over E
    done: Tensor,  # bool [T,B] an episode began: the shift is zero before this step
    base: tuple[Tensor, ...],  # Wy [H,E,My], Wq [H,E,E], Wk [H,E,E], Wb [H,E,4]
    shift: tuple[Tensor, ...],  # how far each is from its base: the same shapes with B in front
    *,
    truncate: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """At each step, with W = base + shift, read and then rewrite. Gives y [B,H,T,My] and the last four shifts.

    y = x Wy,  q = softmax(x Wq),  k = softmax(x Wk),  b = sigmoid(x Wb), and for each of the four with its own b, at once,
    shift <- shift + k ⊗ b (q - k) W.
    """
    (batch, heads, steps, rows), columns = x.shape, base[0].shape[-1]
    widths = (columns, rows, rows, 4)
    _check("done", done, (steps, batch), torch.bool)
    for part, fixed, moved, width in zip("yqkb", base, shift, widths, strict=True):
        _check(f"base of {part}", fixed, (heads, rows, width))
        _check(f"shift of {part}", moved, (batch, heads, rows, width))
    x, *parts = _one_type(x, *base, *shift)
    with _exact(x.device.type):
        chosen = choose(implementation, x.device.type, x.dtype)
        return chosen.srwm_seq(x, done, tuple(parts[:4]), tuple(parts[4:]), truncate)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, and is {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, and is {tensor.dtype}")


def _one_type(*tensors: Tensor) -> list[Tensor]:
    """All in float64 if one of them is, else in float32."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [x.to(dtype) for x in tensors]


def _exact(device: str) -> AbstractContextManager[Any]:
    """No autocast: what it would round is carried from step to step."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def choose(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """The module of an implementation, if it can compute with such tensors; else it is said what could."""
    if name == "auto":
        single = dtype == torch.float32
        name = "numba" if device == "cpu" else "triton" if device == "cuda" and single else "reference"
    if name == "reference":
        return import_module("bestiary.kernels.reference")
    if name == "numba":
        if device != "cpu":
            raise UserError(f"numba computes on CPUs, and this is for {device}: choose triton or reference")
        return _import("bestiary.kernels.cpu", "numba", "llvmlite")
    if name == "triton":
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(f"triton needs a GPU, and this is for {device}: choose numba or reference")
        if dtype != torch.float32:
            raise UserError(f"triton computes in float32, and this is {dtype}: choose reference")
        return _import("bestiary.kernels.gpu", "triton")
    raise UserError(f"there is no kernel {name}: there are {', '.join(IMPLEMENTATIONS)}")


def _import(module: str, *packages: str) -> Any:
    """A module that needs these packages, of which the first brings the others."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        missing = f"{packages[0]} is not installed: pip install {packages[0]}"
        raise UserError(f"{missing}, or choose reference, which is slow") from None
