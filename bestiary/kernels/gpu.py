"""The recurrences on GPUs: Triton kernels, forward and backward, float32. One program takes one head through time.

A program keeps its matrices in registers, padded to powers of two. Backward needs the matrix before each step: forward saves
it every CHUNK steps, and what each step changed; backward replays a chunk from there into a buffer. No two programs
write to the same place, so results repeat bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # steps between two saved matrices
RUNTIME = ["T", "B", "H", "truncate"]  # change from call to call: no kernel is compiled anew for them


# --- on rows and matrices -----------------------------------------------------------------------------------------------
# Padding is zero. STRIDE is the length of a stored row, E and M are the sizes, EP and MP the padded ones.


@triton.jit
def _load_row(start, M: tl.constexpr, MP: tl.constexpr):
    m = tl.arange(0, MP)
    return tl.load(start + m, mask=m < M, other=0.0)


@triton.jit
def _store_row(start, row, M: tl.constexpr, MP: tl.constexpr):
    m = tl.arange(0, MP)
    tl.store(start + m, row, mask=m < M)


@triton.jit
def _load(start, STRIDE: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    e, m = tl.arange(0, EP)[:, None], tl.arange(0, MP)[None, :]
    return tl.load(start + e * STRIDE + m, mask=(e < E) & (m < M), other=0.0)


@triton.jit
def _store(start, matrix, STRIDE: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    e, m = tl.arange(0, EP)[:, None], tl.arange(0, MP)[None, :]
    tl.store(start + e * STRIDE + m, matrix, mask=(e < E) & (m < M))


@triton.jit
def _read(row, matrix):
    """row matrix"""
    return tl.sum(row[:, None] * matrix, axis=0)


@triton.jit
def _apply(matrix, row):
    """matrix row^T"""
    return tl.sum(matrix * row[None, :], axis=1)


@triton.jit
def _outer(a, b):
    return a[:, None] * b[None, :]


@triton.jit
def _softmax(scores, M: tl.constexpr, MP: tl.constexpr):
    scores = tl.where(tl.arange(0, MP) < M, scores, -float("inf"))
    powers = tl.exp(scores - tl.max(scores, axis=0))
    return powers / tl.sum(powers, axis=0)


@triton.jit
def _softmax_backward(shares, d_shares):
    return shares * (d_shares - tl.sum(shares * d_shares, axis=0))


@triton.jit
def _pick(four, z: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 4) == z, four, 0.0), axis=0)


# --- the delta rule ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=RUNTIME)
def delta_forward(
    q, k, v, beta, done, state, out, last, errors, saved, T, B, H,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    weights = _load(state + n * E * M, M, E, M, EP, MP)
    for t in range(T):
        step = n * T + t
        weights = tl.where(tl.load(done + t * B + n // H) != 0, 0.0, weights)
        if SAVE and t % CHUNK == 0:
            _store(saved + (n * chunks + t // CHUNK) * E * M, weights, M, E, M, EP, MP)
        key = _load_row(k + step * E, E, EP)
        error = _load_row(v + step * M, M, MP) - _read(key, weights)
        weights += _outer(key, tl.load(beta + step) * error)
        _store_row(out + step * M, _read(_load_row(q + step * E, E, EP), weights), M, MP)
        if SAVE:
            _store_row(errors + step * M, error, M, MP)
    _store(last + n * E * M, weights, M, E, M, EP, MP)


@triton.jit(do_not_specialize=RUNTIME)
def delta_backward(
    q, k, beta, done, errors, saved, before, d_out, d_last, d_q, d_k, d_v, d_beta, d_state, T, B, H, truncate,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    before += n * CHUNK * E * M
    gradient = _load(d_last + n * E * M, M, E, M, EP, MP)
    for i in range(chunks):
        chunk = chunks - 1 - i
        first, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
        weights = _load(saved + (n * chunks + chunk) * E * M, M, E, M, EP, MP)
        tl.debug_barrier()  # the buffer has been read
        for t in range(first, end):
            step = n * T + t
            weights = tl.where(tl.load(done + t * B + n // H) != 0, 0.0, weights)
            _store(before + (t - first) * E * M, weights, M, E, M, EP, MP)
            error = _load_row(errors + step * M, M, MP)
            weights += _outer(_load_row(k + step * E, E, EP), tl.load(beta + step) * error)
        tl.debug_barrier()  # the buffer has been written
        for j in range(end - first):
            t = end - 1 - j
            step = n * T + t
            key, query = _load_row(k + step * E, E, EP), _load_row(q + step * E, E, EP)
            error, d_read = _load_row(errors + step * M, M, MP), _load_row(d_out + step * M, M, MP)
            strength = tl.load(beta + step)
            weights = _load(before + (t - first) * E * M, M, E, M, EP, MP)
            change = strength * error
            gradient += _outer(query, d_read)
            d_change = _read(key, gradient)
            _store_row(d_q + step * E, _apply(weights, d_read) + key * tl.sum(change * d_read, axis=0), E, EP)
            _store_row(d_k + step * E, _apply(gradient, change) - strength * _apply(weights, d_change), E, EP)
            _store_row(d_v + step * M, strength * d_change, M, MP)
            tl.store(d_beta + step, tl.sum(d_change * error, axis=0))
            gradient -= _outer(key, strength * d_change)
            gradient = tl.where((tl.load(done + t * B + n // H) != 0) | (truncate != 0), 0.0, gradient)
    _store(d_state + n * E * M, gradient, M, E, M, EP, MP)


# --- the matrix that rewrites itself -------------------------------------------------------------------------------------
# Stored, its four parts lie side by side, [Wy|Wq|Wk|Wb]: [E,D]. In registers they are four.


@triton.jit
def _load_four(start, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    return (
        _load(start, D, E, M, EP, MP),
        _load(start + M, D, E, E, EP, EP),
        _load(start + M + E, D, E, E, EP, EP),
        _load(start + M + 2 * E, D, E, 4, EP, 4),
    )


@triton.jit
def _store_four(
    start, y, q, k, b, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr
):
    _store(start, y, D, E, M, EP, MP)
    _store(start + M, q, D, E, E, EP, EP)
    _store(start + M + E, k, D, E, E, EP, EP)
    _store(start + M + 2 * E, b, D, E, 4, EP, 4)


@triton.jit
def _load_four_rows(start, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    return (
        _load_row(start, M, MP),
        _load_row(start + M, E, EP),
        _load_row(start + M + E, E, EP),
        _load_row(start + M + 2 * E, 4, 4),
    )


@triton.jit(do_not_specialize=RUNTIME)
def srwm_forward(
    x, done, base, shift, y, last, qs, ks, bs, ds, saved, T, B, H,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = M + 2 * E + 4
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    base_y, base_q, base_k, base_b = _load_four(base + n % H * E * D, D, E, M, EP, MP)
    shift_y, shift_q, shift_k, shift_b = _load_four(shift + n * E * D, D, E, M, EP, MP)
    for t in range(T):
        step = n * T + t
        reset = tl.load(done + t * B + n // H) != 0
        shift_y, shift_q = tl.where(reset, 0.0, shift_y), tl.where(reset, 0.0, shift_q)
        shift_k, shift_b = tl.where(reset, 0.0, shift_k), tl.where(reset, 0.0, shift_b)
        if SAVE and t % CHUNK == 0:
            start = saved + (n * chunks + t // CHUNK) * E * D
            _store_four(start, shift_y, shift_q, shift_k, shift_b, D, E, M, EP, MP)
        w_y, w_q, w_k, w_b = base_y + shift_y, base_q + shift_q, base_k + shift_k, base_b + shift_b
        row = _load_row(x + step * E, E, EP)
        _store_row(y + step * M, _read(row, w_y), M, MP)
        q, k = _softmax(_read(row, w_q), E, EP), _softmax(_read(row, w_k), E, EP)
        b = 1.0 / (1.0 + tl.exp(-_read(row, w_b)))
        d_y, d_q, d_k, d_b = _read(q - k, w_y), _read(q - k, w_q), _read(q - k, w_k), _read(q - k, w_b)
        shift_y += _outer(k, _pick(b, 0) * d_y)
        shift_q += _outer(k, _pick(b, 1) * d_q)
        shift_k += _outer(k, _pick(b, 2) * d_k)
        shift_b += _outer(k, _pick(b, 3) * d_b)
        if SAVE:
            _store_row(qs + step * E, q, E, EP)
            _store_row(ks + step * E, k, E, EP)
            _store_row(bs + step * 4, b, 4, 4)
            _store_row(ds + step * D, d_y, M, MP)
            _store_row(ds + step * D + M, d_q, E, EP)
            _store_row(ds + step * D + M + E, d_k, E, EP)
            _store_row(ds + step * D + M + 2 * E, d_b, 4, 4)
    _store_four(last + n * E * D, shift_y, shift_q, shift_k, shift_b, D, E, M, EP, MP)


@triton.jit(do_not_specialize=RUNTIME)
def srwm_backward(
    x, done, base, qs, ks, bs, ds, saved, before, d_out, d_last, d_x, d_base, d_shift, T, B, H, truncate,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = M + 2 * E + 4
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    before += n * CHUNK * E * D
    g_y, g_q, g_k, g_b = _load_four(d_last + n * E * D, D, E, M, EP, MP)  # the gradient of shift
    sum_y, sum_q, sum_k, sum_b = (
        tl.zeros_like(g_y),
        tl.zeros_like(g_q),
        tl.zeros_like(g_k),
        tl.zeros_like(g_b),
    )  # that of base: of all that was read
    for i in range(chunks):
        chunk = chunks - 1 - i
        first, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
        base_y, base_q, base_k, base_b = _load_four(base + n % H * E * D, D, E, M, EP, MP)
        shift_y, shift_q, shift_k, shift_b = _load_four(saved + (n * chunks + chunk) * E * D, D, E, M, EP, MP)
        tl.debug_barrier()  # the buffer has been read
        for t in range(first, end):
            step = n * T + t
            reset = tl.load(done + t * B + n // H) != 0
            shift_y, shift_q = tl.where(reset, 0.0, shift_y), tl.where(reset, 0.0, shift_q)
            shift_k, shift_b = tl.where(reset, 0.0, shift_k), tl.where(reset, 0.0, shift_b)
            w_y, w_q, w_k, w_b = base_y + shift_y, base_q + shift_q, base_k + shift_k, base_b + shift_b
            _store_four(before + (t - first) * E * D, w_y, w_q, w_k, w_b, D, E, M, EP, MP)
            k = _load_row(ks + step * E, E, EP)
            d_y, d_q, d_k, d_b = _load_four_rows(ds + step * D, E, M, EP, MP)
            shift_y += _outer(k, tl.load(bs + step * 4) * d_y)
            shift_q += _outer(k, tl.load(bs + step * 4 + 1) * d_q)
            shift_k += _outer(k, tl.load(bs + step * 4 + 2) * d_k)
            shift_b += _outer(k, tl.load(bs + step * 4 + 3) * d_b)
        tl.debug_barrier()  # the buffer has been written
        for j in range(end - first):
            t = end - 1 - j
            step = n * T + t
            row, q, k = _load_row(x + step * E, E, EP), _load_row(qs + step * E, E, EP), _load_row(ks + step * E, E, EP)
            b_y, b_q = tl.load(bs + step * 4), tl.load(bs + step * 4 + 1)
            b_k, b_b = tl.load(bs + step * 4 + 2), tl.load(bs + step * 4 + 3)
            d_y, d_q, d_k, d_b = _load_four_rows(ds + step * D, E, M, EP, MP)
            w_y, w_q, w_k, w_b = _load_four(before + (t - first) * E * D, D, E, M, EP, MP)
            # the write: shift + k ⊗ b d, with d = (q - k) W
            wrote_y, wrote_q, wrote_k, wrote_b = _read(k, g_y), _read(k, g_q), _read(k, g_k), _read(k, g_b)
            read_y, read_q, read_k, read_b = b_y * wrote_y, b_q * wrote_q, b_k * wrote_k, b_b * wrote_b
            for_q = _apply(w_y, read_y) + _apply(w_q, read_q) + _apply(w_k, read_k) + _apply(w_b, read_b)
            for_k = _apply(g_y, b_y * d_y) + _apply(g_q, b_q * d_q) + _apply(g_k, b_k * d_k) + _apply(g_b, b_b * d_b)
            # q, k and b, and what they were computed from
            z = tl.arange(0, 4)
            opened_y, opened_q = tl.sum(wrote_y * d_y, axis=0), tl.sum(wrote_q * d_q, axis=0)
            opened_k, opened_b = tl.sum(wrote_k * d_k, axis=0), tl.sum(wrote_b * d_b, axis=0)
            opened = tl.where(z < 2, tl.where(z == 0, opened_y, opened_q), tl.where(z == 2, opened_k, opened_b))
            b = _load_row(bs + step * 4, 4, 4)
            score_b = opened * b * (1.0 - b)
            score_q, score_k = _softmax_backward(q, for_q), _softmax_backward(k, for_k - for_q)
            score_y = _load_row(d_out + step * M, M, MP)
            for_x = _apply(w_y, score_y) + _apply(w_q, score_q) + _apply(w_k, score_k) + _apply(w_b, score_b)
            _store_row(d_x + step * E, for_x, E, EP)
            all_y = _outer(q - k, read_y) + _outer(row, score_y)
            all_q = _outer(q - k, read_q) + _outer(row, score_q)
            all_k = _outer(q - k, read_k) + _outer(row, score_k)
            all_b = _outer(q - k, read_b) + _outer(row, score_b)
            sum_y, sum_q, sum_k, sum_b = sum_y + all_y, sum_q + all_q, sum_k + all_k, sum_b + all_b
            reset = (tl.load(done + t * B + n // H) != 0) | (truncate != 0)
            g_y, g_q = tl.where(reset, 0.0, g_y + all_y), tl.where(reset, 0.0, g_q + all_q)
            g_k, g_b = tl.where(reset, 0.0, g_k + all_k), tl.where(reset, 0.0, g_b + all_b)
    _store_four(d_base + n * E * D, sum_y, sum_q, sum_k, sum_b, D, E, M, EP, MP)
    _store_four(d_shift + n * E * D, g_y, g_q, g_k, g_b, D, E, M, EP, MP)


# --- launching -----------------------------------------------------------------------------------------------------------


def specialisation(kernel: Any, rows: int, columns: int, save: bool = True) -> dict[str, Any]:
    """What a kernel is compiled for: its constants and warps, given E and the columns of v or y."""
    padded, wide = triton.next_power_of_2(rows), triton.next_power_of_2(columns)
    constants = {"E": rows, "M": columns, "EP": padded, "MP": wide, "CHUNK": CHUNK}
    if "SAVE" in kernel.arg_names:
        constants["SAVE"] = save
    cells = padded * (wide + (2 * padded if kernel in (srwm_forward, srwm_backward) else 0))
    warps = min(triton.next_power_of_2(triton.cdiv(cells, 1024)), 8)  # so few that the matrices fill the registers
    return {**constants, "num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def _launch(kernel: Any, heads: int, *arguments: Any, rows: int, columns: int, save: bool = True) -> None:
    """One program a head, on the device of the tensors and its current stream."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(heads,)](*arguments, **specialisation(kernel, rows, columns, save))


class Delta(torch.autograd.Function):
    """delta_seq on contiguous tensors [B,H,...]."""

    @staticmethod
    def forward(ctx: Any, q, k, v, beta, done, state, truncate, save):
        (batch, group, steps, rows), columns, heads = k.shape, v.shape[-1], k.shape[0] * k.shape[1]
        sizes = {"rows": rows, "columns": columns}
        out, last = torch.empty_like(v), torch.empty_like(state)
        errors = v.new_empty(v.shape if save else 1)
        saved = v.new_empty((heads, -(-steps // CHUNK), rows, columns) if save else 1)
        tensors = (q, k, v, beta, done, state, out, last, errors, saved)
        _launch(delta_forward, heads, *tensors, steps, batch, group, save=save, **sizes)
        if save:
            ctx.save_for_backward(q, k, beta, done, errors, saved)
            ctx.truncate = truncate
        return out, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out, d_last):
        q, k, beta, done, errors, saved = ctx.saved_tensors
        (batch, group, steps, rows), columns, heads = k.shape, d_out.shape[-1], k.shape[0] * k.shape[1]
        d_out, d_last = d_out.contiguous(), d_last.contiguous()
        before = saved.new_empty(heads, CHUNK, rows, columns)
        gradients = [torch.empty_like(x) for x in (q, k, d_out, beta, d_last)]
        tensors = (q, k, beta, done, errors, saved, before, d_out, d_last, *gradients)
        _launch(delta_backward, heads, *tensors, steps, batch, group, int(ctx.truncate), rows=rows, columns=columns)
        d_q, d_k, d_v, d_beta, d_state = gradients
        return d_q, d_k, d_v, d_beta, None, d_state, None, None


def delta_seq(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, done: Tensor, state: Tensor, truncate: bool = False
) -> tuple[Tensor, Tensor]:
    """As reference.delta_seq."""
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, beta, state))
    q, k, v, beta, state = (x.contiguous() for x in (q, k, v, beta, state))
    return Delta.apply(q, k, v, beta, done.contiguous().view(torch.uint8), state, truncate, save)


class SRWM(torch.autograd.Function):
    """srwm_seq with the parts side by side: x [B,H,T,E], base [H,E,D], shift [B,H,E,D], D = My + 2E + 4."""

    @staticmethod
    def forward(ctx: Any, x, done, base, shift, truncate, save):
        (batch, group, steps, rows), fused, heads = x.shape, base.shape[-1], x.shape[0] * x.shape[1]
        columns = fused - 2 * rows - 4
        y, last = x.new_empty(batch, group, steps, columns), torch.empty_like(shift)
        per_step = [x.new_empty((heads, steps, size) if save else 1) for size in (rows, rows, 4, fused)]  # q, k, b, d
        saved = x.new_empty((heads, -(-steps // CHUNK), rows, fused) if save else 1)
        tensors = (x, done, base, shift, y, last, *per_step, saved)
        _launch(srwm_forward, heads, *tensors, steps, batch, group, rows=rows, columns=columns, save=save)
        if save:
            ctx.save_for_backward(x, done, base, *per_step, saved)
            ctx.truncate = truncate
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y, d_last):
        x, done, base, *per_step, saved = ctx.saved_tensors
        (batch, group, steps, rows), columns, heads = x.shape, d_y.shape[-1], x.shape[0] * x.shape[1]
        d_y, d_last = d_y.contiguous(), d_last.contiguous()
        before = x.new_empty(heads, CHUNK, rows, base.shape[-1])
        d_x, d_base, d_shift = torch.empty_like(x), torch.empty_like(d_last), torch.empty_like(d_last)
        tensors = (x, done, base, *per_step, saved, before, d_y, d_last, d_x, d_base, d_shift)
        _launch(srwm_backward, heads, *tensors, steps, batch, group, int(ctx.truncate), rows=rows, columns=columns)
        return d_x, None, d_base.sum(0), d_shift, None, None


def srwm_seq(
    x: Tensor, done: Tensor, base: tuple[Tensor, ...], shift: tuple[Tensor, ...], truncate: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As reference.srwm_seq."""
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *base, *shift))
    fused, moved = torch.cat(base, dim=-1), torch.cat(shift, dim=-1)
    y, last = SRWM.apply(x.contiguous(), done.contiguous().view(torch.uint8), fused, moved, truncate, save)
    return y, tuple(part.contiguous() for part in last.split([part.shape[-1] for part in base], dim=-1))
