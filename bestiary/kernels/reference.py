"""The recurrences as plain loops of torch operations, differentiated by autograd: what the other implementations must equal.

Any floating-point type, any device. Vectors are rows, a matrix is [in, out], and (a ⊗ b)_ij = a_i b_j.
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
    truncate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The delta rule: W <- W + k ⊗ beta (v - k W), then o = q W. Gives o [B,H,T,M] and the last W [B,H,E,M]."""
    weights = state
    outputs = []
    for t in range(k.shape[2]):
        weights = _restart(weights, done[t], truncate)
        key = k[:, :, t, :, None]  # [B,H,E,1]
        error = v[:, :, t] - _read(k[:, :, t], weights)  # [B,H,M]
        weights = weights + key * (beta[:, :, t] * error).unsqueeze(-2)
        outputs.append(_read(q[:, :, t], weights))
    return torch.stack(outputs, dim=2), weights


def srwm_seq(
    x: Tensor,  # [B,H,T,E]
    done: Tensor,  # [T,B]
    base: tuple[Tensor, ...],  # Wy [H,E,My], Wq [H,E,E], Wk [H,E,E], Wb [H,E,4]
    shift: tuple[Tensor, ...],  # how far each is from its base: the same shapes with B in front
    truncate: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A matrix that rewrites itself. Gives y [B,H,T,My] and the last shifts.

    With W = base + shift:   y = x Wy,   q = softmax(x Wq),   k = softmax(x Wk),   b = sigmoid(x Wb)
    Then, for each of the four, its own b:   shift <- shift + k ⊗ b (q - k) W
    """
    outputs = []
    for t in range(x.shape[2]):
        shift = tuple(_restart(each, done[t], truncate) for each in shift)
        weights = [fixed + moved for fixed, moved in zip(base, shift, strict=True)]
        y, q, k, b = (_read(x[:, :, t], matrix) for matrix in weights)
        q, k, b = q.softmax(-1), k.softmax(-1), b.sigmoid()
        steps = [b[..., i, None] * _read(q - k, matrix) for i, matrix in enumerate(weights)]
        shift = tuple(moved + k.unsqueeze(-1) * step.unsqueeze(-2) for moved, step in zip(shift, steps, strict=True))
        outputs.append(y)
    return torch.stack(outputs, dim=2), shift


def _read(row: Tensor, matrix: Tensor) -> Tensor:
    """Of row [B,H,E] and matrix [B,H,E,M], their product [B,H,M]."""
    return (row.unsqueeze(-1) * matrix).sum(-2)  # for matrices this small faster than matmul


def _restart(state: Tensor, done: Tensor, truncate: bool) -> Tensor:
    """The state [B,H,E,M] that a step starts from: zero where an episode began; `truncate`: without a gradient."""
    state = state.detach() if truncate else state
    return state.masked_fill(done[:, None, None, None], 0)
