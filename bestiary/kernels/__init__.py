"""Kernels of the fast-weight memories.

The recurrent state of a fast-weight memory is a weight matrix, which is updated at each step. A kernel is a function
that computes the updates and the outputs of all steps of a sequence, and their gradients.

Operations:
    delta_seq   delta rule: each step changes the value stored for a key towards a new value, and then reads the value
                stored for a query; optionally, each step first multiplies the matrix by a factor (decay)
    sum_seq     sum rule of linear transformers: each step adds a value to the value stored for a key, and then reads
                the value stored for a query; one implementation for all devices and floating-point types
    srwm_seq    self-referential weight matrix (SRWM): a matrix that also computes its own updates

Implementations of delta_seq and srwm_seq:
    reference   loops of PyTorch operations, for all devices and floating-point types
    numba       for CPUs, float32 and float64; uses one thread and releases the GIL
    triton      for GPUs, float32
    auto        numba for CPU tensors, triton for float32 CUDA tensors, reference otherwise

When `torch.export` traces an agent (`bestiary export`), the implementation is always `reference`, because an exported
program can only contain PyTorch operations.

Shapes: B batch entries, H heads, T steps. A weight matrix has E rows (the size of queries and keys) and M columns (the
size of values).

All implementations compute the gradients of all inputs except `done`. A loss may depend on the outputs and on the final
state. Inputs are never modified, and results never share memory with inputs. Half-precision inputs (autocast) are
converted to float32, and the results are then float32.

With `truncate=True`, no gradient flows from a step to the previous step, as in the code of Irie et al. (2022). The
gradient of an output then reaches only the inputs of the same step.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import sum_rule
from bestiary.utils.errors import UserError

IMPLEMENTATIONS = ("auto", "reference", "numba", "triton")


def delta_seq(
    q: Tensor,  # queries [B,H,T,E]
    k: Tensor,  # keys [B,H,T,E]
    v: Tensor,  # values [B,H,T,M]
    beta: Tensor,  # learning rates [B,H,T,1], in [0,1]; delta-product: up to 2
    done: Tensor,  # bool [T,B]: if True, an episode starts and the state is set to zero before the step
    state: Tensor,  # initial fast weights [B,H,E,M]
    *,
    decay: Tensor | None = None,  # factors by which W is multiplied before each step, [B,H,T,1]; None: no decay
    truncate: int = 0,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule over T steps. Return the outputs o [B,H,T,M] and the final fast weights W [B,H,E,M].

    Each step computes W <- decay W, then W <- W + k ⊗ (beta (v - k W)) and then o = q W, where ⊗ is the outer product.
    If `truncate` is not 0, no gradient flows from the steps 0, `truncate`, 2 `truncate`, ... to the previous step; True
    is the same as 1. Raise ValueError if the shapes of the arguments are inconsistent.
    """
    batch, heads, steps, rows = k.shape
    columns = v.shape[-1]
    _check("q", q, (batch, heads, steps, rows))
    _check("v", v, (batch, heads, steps, columns))
    _check("beta", beta, (batch, heads, steps, 1))
    _check("done", done, (steps, batch), torch.bool)
    _check("state", state, (batch, heads, rows, columns))
    if decay is not None:
        _check("decay", decay, (batch, heads, steps, 1))
    q, k, v, beta, state, *decays = _to_common_dtype(q, k, v, beta, state, *(() if decay is None else (decay,)))
    with _without_autocast(k.device.type):
        module = load_implementation(implementation, k.device.type, k.dtype)
        return module.delta_seq(q, k, v, beta, done, state, truncate, *decays)


def sum_seq(
    q: Tensor,  # queries [B,H,T,E]
    k: Tensor,  # keys [B,H,T,E]
    v: Tensor,  # values [B,H,T,M]
    done: Tensor,  # bool [T,B]: if True, an episode starts and the state is set to zero before the step
    state: Tensor,  # initial fast weights [B,H,E,M]
    *,
    truncate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the sum rule over T steps. Return the outputs o [B,H,T,M] and the final fast weights W [B,H,E,M].

    Each step computes W <- W + k ⊗ v and then o = q W, where ⊗ is the outer product. If `truncate` is True, no gradient
    flows from a step to the previous step. Raise ValueError if the shapes of the arguments are inconsistent.
    """
    batch, heads, steps, rows = k.shape
    _check("q", q, (batch, heads, steps, rows))
    _check("v", v, (batch, heads, steps, v.shape[-1]))
    _check("done", done, (steps, batch), torch.bool)
    _check("state", state, (batch, heads, rows, v.shape[-1]))
    q, k, v, state = _to_common_dtype(q, k, v, state)
    with _without_autocast(k.device.type):
        return sum_rule.sum_seq(q, k, v, done, state, truncate)


def srwm_seq(
    x: Tensor,  # inputs [B,H,T,E]
    done: Tensor,  # bool [T,B]: if True, an episode starts and the shift is set to zero before the step
    base: tuple[Tensor, ...],  # trained weights: Wy [H,E,M], Wq [H,E,E], Wk [H,E,E], Wb [H,E,4]
    shift: tuple[Tensor, ...],  # initial state: for each of the four matrices, current weights - base, [B,H,E,...]
    *,
    truncate: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the self-referential weight matrix over T steps. Return the outputs y [B,H,T,M] and the final shifts.

    Each step multiplies the input x by the four matrices W_i = base_i + shift_i (Wy, Wq, Wk, Wb),

        y = x Wy,  q = softmax(x Wq),  k = softmax(x Wk),  b = sigmoid(x Wb)

    and then updates the four shifts. ⊗ is the outer product, and the learning rate b_i of matrix i is element i of b:

        shift_i <- shift_i + k ⊗ (b_i (q - k) W_i)

    If `truncate` is True, no gradient flows from a step to the previous step. Raise ValueError if the shapes of the
    arguments are inconsistent.
    """
    batch, heads, steps, rows = x.shape
    columns = base[0].shape[-1]
    widths = (columns, rows, rows, 4)
    _check("done", done, (steps, batch), torch.bool)
    for name, w_base, w_shift, width in zip("yqkb", base, shift, widths, strict=True):
        _check(f"base of W{name}", w_base, (heads, rows, width))
        _check(f"shift of W{name}", w_shift, (batch, heads, rows, width))
    x, *matrices = _to_common_dtype(x, *base, *shift)
    with _without_autocast(x.device.type):
        module = load_implementation(implementation, x.device.type, x.dtype)
        return module.srwm_seq(x, done, tuple(matrices[:4]), tuple(matrices[4:]), truncate)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def _to_common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors converted to float64 if one of them is float64, else to float32."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    return [x.to(dtype) for x in tensors]


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off for a device type, for example "cuda".

    With autocast, the steps would be computed in half precision, and their rounding errors would add up in the state.
    """
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def load_implementation(name: str, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the module that contains the implementation `name`, one of IMPLEMENTATIONS.

    `device` is a device type, for example "cpu".

    Raises:
        UserError: the name is unknown, the implementation does not support the device type or the dtype, or a package
            that the implementation needs is not installed.
    """
    if torch.compiler.is_exporting():
        name = "reference"
    if name == "auto":
        name = _default_implementation(device, dtype)
    if name == "reference":
        return import_module("bestiary.kernels.reference")
    if name == "numba":
        if device != "cpu":
            raise UserError(f"numba supports only CPUs, not {device}; choose --memory.kernel triton or reference")
        return _import("bestiary.kernels.numba_kernels", "numba", "llvmlite")
    if name == "triton":
        if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(f"triton supports only GPUs, not {device}; choose --memory.kernel numba or reference")
        if dtype != torch.float32:
            raise UserError(f"triton supports only float32, not {dtype}; choose --memory.kernel reference")
        return _import("bestiary.kernels.triton_kernels", "triton")
    raise UserError(f"unknown kernel {name}; choose one of {', '.join(IMPLEMENTATIONS)}")


def _default_implementation(device: str, dtype: torch.dtype) -> str:
    if device == "cpu":
        return "numba"
    if device == "cuda" and dtype == torch.float32:
        return "triton"
    return "reference"


def _import(module: str, *packages: str) -> Any:
    """Import a module and return it.

    If the import fails because one of `packages` is missing, raise UserError with the advice to install packages[0].
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        package = packages[0]
        raise UserError(
            f"{package} is not installed; run pip install {package}, or choose --memory.kernel reference (slow)"
        ) from None
