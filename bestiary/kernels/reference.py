"""Reference implementation of the delta rule and of the self-referential weight matrix, as loops of PyTorch operations.

Autograd computes the gradients. The other implementations must give the same results, except for rounding errors. The
reference implementation supports all floating-point types and devices.

Vectors are rows, a matrix has the shape [in, out], and ⊗ is the outer product: (a ⊗ b)_ij = a_i b_j.

Shapes: B batch entries, H heads, T steps, E rows and M columns of a weight matrix.
"""

import torch
from torch import Tensor


def delta_seq(
    q: Tensor,  # [B,H,T,E]
    k: Tensor,  # [B,H,T,E]
    v: Tensor,  # [B,H,T,M]
    beta: Tensor,  # [B,H,T,1]
    done: Tensor,  # [T,B]
    state: Tensor,  # [B,H,E,M]
    truncate: int = 0,
    decay: Tensor | None = None,  # [B,H,T,1]
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule over T steps. Return the outputs o [B,H,T,M] and the final fast weights W [B,H,E,M].

    Each step computes W <- decay W, then W <- W + k ⊗ (beta (v - k W)) and then o = q W. If `done` is True, W is set to
    zero before the step. If `truncate` is not 0, no gradient flows from the steps 0, `truncate`, 2 `truncate`, ... to
    the previous step.
    """
    weights = state
    outputs = []
    for t in range(k.shape[2]):
        weights = _reset(weights, done[t], bool(truncate) and t % truncate == 0)
        if decay is not None:
            weights = weights * decay[:, :, t, :, None]
        key = k[:, :, t, :, None]  # [B,H,E,1]
        error = v[:, :, t] - _read(k[:, :, t], weights)  # [B,H,M]
        weights = weights + key * (beta[:, :, t] * error).unsqueeze(-2)
        outputs.append(_read(q[:, :, t], weights))
    return torch.stack(outputs, dim=2), weights


def srwm_seq(
    x: Tensor,  # [B,H,T,E]
    done: Tensor,  # [T,B]
    base: tuple[Tensor, ...],  # trained weights: Wy [H,E,M], Wq [H,E,E], Wk [H,E,E], Wb [H,E,4]
    shift: tuple[Tensor, ...],  # initial state: for each of the four matrices, current weights - base, [B,H,E,...]
    truncate: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the self-referential weight matrix over T steps. Return the outputs y [B,H,T,M] and the final shifts.

    Each step multiplies the input x by the four matrices W_i = base_i + shift_i (Wy, Wq, Wk, Wb), and then updates the
    four shifts. The learning rate of the i-th matrix is element i of b:

        y = x Wy,  q = softmax(x Wq),  k = softmax(x Wk),  b = sigmoid(x Wb)
        shift_i <- shift_i + k ⊗ (b_i (q - k) W_i)

    If `done` is True, the shifts are set to zero before the step. If `truncate` is True, no gradient flows from a step
    to the previous step.
    """
    outputs = []
    for t in range(x.shape[2]):
        shift = tuple(_reset(matrix, done[t], truncate) for matrix in shift)
        weights = [w_base + w_shift for w_base, w_shift in zip(base, shift, strict=True)]
        y, q, k, b = (_read(x[:, :, t], matrix) for matrix in weights)
        q, k, b = q.softmax(-1), k.softmax(-1), b.sigmoid()
        updates = [b[..., i, None] * _read(q - k, matrix) for i, matrix in enumerate(weights)]
        shift = tuple(
            w_shift + k.unsqueeze(-1) * update.unsqueeze(-2) for w_shift, update in zip(shift, updates, strict=True)
        )
        outputs.append(y)
    return torch.stack(outputs, dim=2), shift


def _read(row: Tensor, matrix: Tensor) -> Tensor:
    """Return the product [B,H,M] of a row [B,H,E] and a matrix [B,H,E,M]."""
    return (row.unsqueeze(-1) * matrix).sum(-2)  # faster than matmul for small matrices


def _reset(state: Tensor, done: Tensor, truncate: bool) -> Tensor:
    """Return a copy of the state [B,H,E,M] in which batch entry b is zero if done[b] is True.

    If `truncate` is True, the result is detached: no gradient flows back through it.
    """
    state = state.detach() if truncate else state
    return state.masked_fill(done[:, None, None, None], 0)
