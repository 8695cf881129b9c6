"""Delta rule and self-referential weight matrix (SRWM) on GPUs: forward and backward kernels in Triton, float32.

In this module, a sequence is the computation for one head of one batch entry. One Triton program computes one sequence
and keeps its weight matrices in registers, padded to powers of two. The backward pass needs the weights before each
step. To save memory, the forward pass saves only the weights at every CHUNK-th step and the error of each step (SRWM:
also q, k and b of each step). The backward pass recomputes the weights of a chunk (CHUNK steps) and writes them to a
buffer. Programs write to disjoint memory, so results are deterministic.

Sizes in the kernels: T steps, B batch entries, H heads, E rows, M columns of v (delta rule) or y (SRWM). EP and MP are
E and M, padded to powers of two. D is the number of columns of the four SRWM matrices together.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 16  # number of steps in a chunk; the forward pass saves the weights at the start of each chunk
RUNTIME = ["T", "B", "H", "truncate"]  # kernel arguments that can change without a new compilation of the kernel


# --- operations on rows and matrices ----------------------------------------------------------------------------------
# In registers, rows and columns are padded with zeros; the padding is not written to memory. STRIDE is the distance in
# memory from one row of a matrix to the next, in elements.


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
def _vector_matrix(row, matrix):
    """Return row @ matrix."""
    return tl.sum(row[:, None] * matrix, axis=0)


@triton.jit
def _matrix_vector(matrix, row):
    """Return matrix @ row."""
    return tl.sum(matrix * row[None, :], axis=1)


@triton.jit
def _outer(a, b):
    return a[:, None] * b[None, :]


@triton.jit
def _softmax(scores, M: tl.constexpr, MP: tl.constexpr):
    scores = tl.where(tl.arange(0, MP) < M, scores, -float("inf"))
    exponentials = tl.exp(scores - tl.max(scores, axis=0))
    return exponentials / tl.sum(exponentials, axis=0)


@triton.jit
def _softmax_backward(probs, d_probs):
    return probs * (d_probs - tl.sum(probs * d_probs, axis=0))


@triton.jit
def _element(vector, z: tl.constexpr):
    """Return element z of a vector of length 4."""
    return tl.sum(tl.where(tl.arange(0, 4) == z, vector, 0.0), axis=0)


# --- delta rule -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=RUNTIME)
def delta_forward(
    q, k, v, beta, decay, done, state, out, last, errors, saved, T, B, H,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """Run the forward pass of the delta rule. Write the outputs to `out` and the final weights to `last`.

    The inputs, from `q` to `state`, have the shapes of `reference.delta_seq`; without DECAY, `decay` is empty. With
    SAVE, write also the error of each step to `errors` [B,H,T,M], and the weights at the start of each chunk to `saved`
    [B*H,chunks,E,M].
    """
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    weights = _load(state + n * E * M, M, E, M, EP, MP)
    for t in range(T):
        step = n * T + t
        weights = tl.where(tl.load(done + t * B + n // H) != 0, 0.0, weights)
        if SAVE and t % CHUNK == 0:
            _store(saved + (n * chunks + t // CHUNK) * E * M, weights, M, E, M, EP, MP)
        if DECAY:
            weights *= tl.load(decay + step)
        key = _load_row(k + step * E, E, EP)
        error = _load_row(v + step * M, M, MP) - _vector_matrix(key, weights)
        weights += _outer(key, tl.load(beta + step) * error)
        _store_row(out + step * M, _vector_matrix(_load_row(q + step * E, E, EP), weights), M, MP)
        if SAVE:
            _store_row(errors + step * M, error, M, MP)
    _store(last + n * E * M, weights, M, E, M, EP, MP)


@triton.jit(do_not_specialize=RUNTIME)
def delta_backward(
    q, k, beta, decay, done, errors, saved, buffer, d_out, d_last, d_q, d_k, d_v, d_beta, d_decay, d_state,
    T, B, H, truncate,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of the delta rule. Write the gradients of the inputs to the tensors `d_q` to `d_state`.

    `errors` and `saved` are results of the forward pass. `d_out` and `d_last` are the gradients of the outputs and of
    the final weights. `buffer` [B*H,CHUNK,E,M] is memory for the weights of one chunk.
    """
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    buffer += n * CHUNK * E * M
    d_weights = _load(d_last + n * E * M, M, E, M, EP, MP)
    for i in range(chunks):
        chunk = chunks - 1 - i
        first, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
        weights = _load(saved + (n * chunks + chunk) * E * M, M, E, M, EP, MP)
        tl.debug_barrier()  # wait until all threads have read the previous chunk from the buffer
        for t in range(first, end):
            step = n * T + t
            weights = tl.where(tl.load(done + t * B + n // H) != 0, 0.0, weights)
            _store(buffer + (t - first) * E * M, weights, M, E, M, EP, MP)
            if DECAY:
                weights *= tl.load(decay + step)
            error = _load_row(errors + step * M, M, MP)
            weights += _outer(_load_row(k + step * E, E, EP), tl.load(beta + step) * error)
        tl.debug_barrier()  # wait until all threads have written this chunk to the buffer
        for j in range(end - first):
            t = end - 1 - j
            step = n * T + t
            key, query = _load_row(k + step * E, E, EP), _load_row(q + step * E, E, EP)
            error, d_out_row = _load_row(errors + step * M, M, MP), _load_row(d_out + step * M, M, MP)
            strength = tl.load(beta + step)
            undecayed = _load(buffer + (t - first) * E * M, M, E, M, EP, MP)
            weights = undecayed
            if DECAY:
                weights = undecayed * tl.load(decay + step)
            update = strength * error
            d_weights += _outer(query, d_out_row)
            d_update = _vector_matrix(key, d_weights)
            d_query = _matrix_vector(weights, d_out_row) + key * tl.sum(update * d_out_row, axis=0)
            d_key = _matrix_vector(d_weights, update) - strength * _matrix_vector(weights, d_update)
            _store_row(d_q + step * E, d_query, E, EP)
            _store_row(d_k + step * E, d_key, E, EP)
            _store_row(d_v + step * M, strength * d_update, M, MP)
            tl.store(d_beta + step, tl.sum(d_update * error, axis=0))
            d_weights -= _outer(key, strength * d_update)
            if DECAY:
                tl.store(d_decay + step, tl.sum(tl.sum(d_weights * undecayed, axis=1), axis=0))
                d_weights *= tl.load(decay + step)
            is_cut = (truncate != 0) & (t % tl.maximum(truncate, 1) == 0)
            d_weights = tl.where((tl.load(done + t * B + n // H) != 0) | is_cut, 0.0, d_weights)
    _store(d_state + n * E * M, d_weights, M, E, M, EP, MP)


# --- self-referential weight matrix -----------------------------------------------------------------------------------
# In memory, the columns of the four matrices are concatenated: [Wy|Wq|Wk|Wb] of shape [E,D]. In registers, the matrices
# are separate.


@triton.jit
def _load_matrices(start, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    return (
        _load(start, D, E, M, EP, MP),
        _load(start + M, D, E, E, EP, EP),
        _load(start + M + E, D, E, E, EP, EP),
        _load(start + M + 2 * E, D, E, 4, EP, 4),
    )


@triton.jit
def _store_matrices(
    start, y, q, k, b, D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr
):
    _store(start, y, D, E, M, EP, MP)
    _store(start + M, q, D, E, E, EP, EP)
    _store(start + M + E, k, D, E, E, EP, EP)
    _store(start + M + 2 * E, b, D, E, 4, EP, 4)


@triton.jit
def _load_rows(start, E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr):
    return (
        _load_row(start, M, MP),
        _load_row(start + M, E, EP),
        _load_row(start + M + E, E, EP),
        _load_row(start + M + 2 * E, 4, 4),
    )


@triton.jit(do_not_specialize=RUNTIME)
def srwm_forward(
    x, done, base, shift, y, last, qs, ks, bs, errors, saved, T, B, H,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Run the forward pass of the SRWM. Write the outputs to `y` [B,H,T,M] and the final shift to `last` [B,H,E,D].

    The inputs are x [B,H,T,E], done [T,B], base [H,E,D] and shift [B,H,E,D]. With SAVE, write also the queries to `qs`
    [B*H,T,E], the keys to `ks` [B*H,T,E], the learning rates to `bs` [B*H,T,4], the errors (q - k) W to `errors`
    [B*H,T,D], and the shift at the start of each chunk to `saved` [B*H,chunks,E,D].
    """
    D: tl.constexpr = M + 2 * E + 4
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    base_y, base_q, base_k, base_b = _load_matrices(base + n % H * E * D, D, E, M, EP, MP)
    shift_y, shift_q, shift_k, shift_b = _load_matrices(shift + n * E * D, D, E, M, EP, MP)
    for t in range(T):
        step = n * T + t
        reset = tl.load(done + t * B + n // H) != 0
        shift_y, shift_q = tl.where(reset, 0.0, shift_y), tl.where(reset, 0.0, shift_q)
        shift_k, shift_b = tl.where(reset, 0.0, shift_k), tl.where(reset, 0.0, shift_b)
        if SAVE and t % CHUNK == 0:
            start = saved + (n * chunks + t // CHUNK) * E * D
            _store_matrices(start, shift_y, shift_q, shift_k, shift_b, D, E, M, EP, MP)
        w_y, w_q, w_k, w_b = base_y + shift_y, base_q + shift_q, base_k + shift_k, base_b + shift_b
        row = _load_row(x + step * E, E, EP)
        _store_row(y + step * M, _vector_matrix(row, w_y), M, MP)
        q, k = _softmax(_vector_matrix(row, w_q), E, EP), _softmax(_vector_matrix(row, w_k), E, EP)
        b = 1.0 / (1.0 + tl.exp(-_vector_matrix(row, w_b)))
        error_y = _vector_matrix(q - k, w_y)
        error_q = _vector_matrix(q - k, w_q)
        error_k = _vector_matrix(q - k, w_k)
        error_b = _vector_matrix(q - k, w_b)
        shift_y += _outer(k, _element(b, 0) * error_y)
        shift_q += _outer(k, _element(b, 1) * error_q)
        shift_k += _outer(k, _element(b, 2) * error_k)
        shift_b += _outer(k, _element(b, 3) * error_b)
        if SAVE:
            _store_row(qs + step * E, q, E, EP)
            _store_row(ks + step * E, k, E, EP)
            _store_row(bs + step * 4, b, 4, 4)
            _store_row(errors + step * D, error_y, M, MP)
            _store_row(errors + step * D + M, error_q, E, EP)
            _store_row(errors + step * D + M + E, error_k, E, EP)
            _store_row(errors + step * D + M + 2 * E, error_b, 4, 4)
    _store_matrices(last + n * E * D, shift_y, shift_q, shift_k, shift_b, D, E, M, EP, MP)


@triton.jit(do_not_specialize=RUNTIME)
def srwm_backward(
    x, done, base, qs, ks, bs, errors, saved, buffer, d_out, d_last, d_x, d_base, d_shift, T, B, H, truncate,
    E: tl.constexpr, M: tl.constexpr, EP: tl.constexpr, MP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Run the backward pass of the SRWM. Write the gradients of the inputs to `d_x`, `d_base` and `d_shift`.

    `d_base` [B,H,E,D] has one gradient for each batch entry; the caller adds them. `qs` to `saved` are results of the
    forward pass. `d_out` and `d_last` are the gradients of the outputs and of the final shift. `buffer`
    [B*H,CHUNK,E,D] is memory for the weights of one chunk.
    """
    D: tl.constexpr = M + 2 * E + 4
    n = tl.program_id(0).to(tl.int64)
    chunks = (T + CHUNK - 1) // CHUNK
    buffer += n * CHUNK * E * D
    g_y, g_q, g_k, g_b = _load_matrices(d_last + n * E * D, D, E, M, EP, MP)  # gradients of the shifts
    # Gradients of the base matrices: sums of the gradients of W at all steps. Unlike g_*, these sums are not set to
    # zero at starts of episodes.
    sum_y, sum_q = tl.zeros_like(g_y), tl.zeros_like(g_q)
    sum_k, sum_b = tl.zeros_like(g_k), tl.zeros_like(g_b)
    for i in range(chunks):
        chunk = chunks - 1 - i
        first, end = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, T)
        base_y, base_q, base_k, base_b = _load_matrices(base + n % H * E * D, D, E, M, EP, MP)
        shift_y, shift_q, shift_k, shift_b = _load_matrices(saved + (n * chunks + chunk) * E * D, D, E, M, EP, MP)
        tl.debug_barrier()  # wait until all threads have read the previous chunk from the buffer
        for t in range(first, end):
            step = n * T + t
            reset = tl.load(done + t * B + n // H) != 0
            shift_y, shift_q = tl.where(reset, 0.0, shift_y), tl.where(reset, 0.0, shift_q)
            shift_k, shift_b = tl.where(reset, 0.0, shift_k), tl.where(reset, 0.0, shift_b)
            w_y, w_q, w_k, w_b = base_y + shift_y, base_q + shift_q, base_k + shift_k, base_b + shift_b
            _store_matrices(buffer + (t - first) * E * D, w_y, w_q, w_k, w_b, D, E, M, EP, MP)
            k = _load_row(ks + step * E, E, EP)
            error_y, error_q, error_k, error_b = _load_rows(errors + step * D, E, M, EP, MP)
            shift_y += _outer(k, tl.load(bs + step * 4) * error_y)
            shift_q += _outer(k, tl.load(bs + step * 4 + 1) * error_q)
            shift_k += _outer(k, tl.load(bs + step * 4 + 2) * error_k)
            shift_b += _outer(k, tl.load(bs + step * 4 + 3) * error_b)
        tl.debug_barrier()  # wait until all threads have written this chunk to the buffer
        for j in range(end - first):
            t = end - 1 - j
            step = n * T + t
            row, q, k = _load_row(x + step * E, E, EP), _load_row(qs + step * E, E, EP), _load_row(ks + step * E, E, EP)
            b_y, b_q = tl.load(bs + step * 4), tl.load(bs + step * 4 + 1)
            b_k, b_b = tl.load(bs + step * 4 + 2), tl.load(bs + step * 4 + 3)
            error_y, error_q, error_k, error_b = _load_rows(errors + step * D, E, M, EP, MP)
            w_y, w_q, w_k, w_b = _load_matrices(buffer + (t - first) * E * D, D, E, M, EP, MP)
            # Gradients of the update shift <- shift + k ⊗ (b * error), with error = (q - k) W.
            d_update_y = _vector_matrix(k, g_y)
            d_update_q = _vector_matrix(k, g_q)
            d_update_k = _vector_matrix(k, g_k)
            d_update_b = _vector_matrix(k, g_b)
            d_error_y, d_error_q = b_y * d_update_y, b_q * d_update_q
            d_error_k, d_error_b = b_k * d_update_k, b_b * d_update_b
            d_q = (
                _matrix_vector(w_y, d_error_y)
                + _matrix_vector(w_q, d_error_q)
                + _matrix_vector(w_k, d_error_k)
                + _matrix_vector(w_b, d_error_b)
            )
            d_k = (
                _matrix_vector(g_y, b_y * error_y)
                + _matrix_vector(g_q, b_q * error_q)
                + _matrix_vector(g_k, b_k * error_k)
                + _matrix_vector(g_b, b_b * error_b)
            )
            # Gradient of the loss with respect to the product x W, computed from the gradients of y, q, k and b.
            z = tl.arange(0, 4)
            d_b_y, d_b_q = tl.sum(d_update_y * error_y, axis=0), tl.sum(d_update_q * error_q, axis=0)
            d_b_k, d_b_b = tl.sum(d_update_k * error_k, axis=0), tl.sum(d_update_b * error_b, axis=0)
            d_b = tl.where(z < 2, tl.where(z == 0, d_b_y, d_b_q), tl.where(z == 2, d_b_k, d_b_b))
            b = _load_row(bs + step * 4, 4, 4)
            d_score_b = d_b * b * (1.0 - b)
            d_score_q, d_score_k = _softmax_backward(q, d_q), _softmax_backward(k, d_k - d_q)
            d_score_y = _load_row(d_out + step * M, M, MP)
            d_x_row = (
                _matrix_vector(w_y, d_score_y)
                + _matrix_vector(w_q, d_score_q)
                + _matrix_vector(w_k, d_score_k)
                + _matrix_vector(w_b, d_score_b)
            )
            _store_row(d_x + step * E, d_x_row, E, EP)
            d_w_y = _outer(q - k, d_error_y) + _outer(row, d_score_y)
            d_w_q = _outer(q - k, d_error_q) + _outer(row, d_score_q)
            d_w_k = _outer(q - k, d_error_k) + _outer(row, d_score_k)
            d_w_b = _outer(q - k, d_error_b) + _outer(row, d_score_b)
            sum_y, sum_q, sum_k, sum_b = sum_y + d_w_y, sum_q + d_w_q, sum_k + d_w_k, sum_b + d_w_b
            reset = (tl.load(done + t * B + n // H) != 0) | (truncate != 0)
            g_y, g_q = tl.where(reset, 0.0, g_y + d_w_y), tl.where(reset, 0.0, g_q + d_w_q)
            g_k, g_b = tl.where(reset, 0.0, g_k + d_w_k), tl.where(reset, 0.0, g_b + d_w_b)
    _store_matrices(d_base + n * E * D, sum_y, sum_q, sum_k, sum_b, D, E, M, EP, MP)
    _store_matrices(d_shift + n * E * D, g_y, g_q, g_k, g_b, D, E, M, EP, MP)


# --- kernel launches --------------------------------------------------------------------------------------------------


def specialisation(kernel: Any, rows: int, columns: int, save: bool = True, has_decay: bool = False) -> dict[str, Any]:
    """Return a dict with the compile-time constants and the launch options of a kernel.

    `rows` is E, `columns` is M (the size of v or y). If `save` is False, the forward pass saves nothing for a backward
    pass. `has_decay` is only for the kernels of the delta rule.
    """
    padded_rows = triton.next_power_of_2(rows)
    padded_columns = triton.next_power_of_2(columns)
    constants = {"E": rows, "M": columns, "EP": padded_rows, "MP": padded_columns, "CHUNK": CHUNK}
    if "SAVE" in kernel.arg_names:
        constants["SAVE"] = save
    if "DECAY" in kernel.arg_names:
        constants["DECAY"] = has_decay
    elements = padded_rows * (padded_columns + (2 * padded_rows if kernel in (srwm_forward, srwm_backward) else 0))
    # Use few warps: one warp (32 threads) can keep 1024 elements of the matrices in its registers.
    warps = min(triton.next_power_of_2(triton.cdiv(elements, 1024)), 8)
    return {**constants, "num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def _launch(kernel: Any, num_sequences: int, *arguments: Any, **sizes: Any) -> None:
    """Run a kernel with one program per sequence, on the device of the first argument, in the current CUDA stream.

    `sizes` are passed to `specialisation`, which returns the compile-time constants of the kernel.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[(num_sequences,)](*arguments, **specialisation(kernel, **sizes))


class DeltaFunction(torch.autograd.Function):
    """Autograd function of `delta_seq`. All tensors are contiguous.

    If `save` is False, the forward pass saves nothing, and no backward pass is possible.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, beta, decay, done, state, truncate, save):
        batch, heads, steps, rows = k.shape
        columns = v.shape[-1]
        num_sequences = batch * heads
        out, final_state = torch.empty_like(v), torch.empty_like(state)
        errors = v.new_empty(v.shape if save else 1)
        saved = v.new_empty((num_sequences, -(-steps // CHUNK), rows, columns) if save else 1)
        tensors = (q, k, v, beta, decay, done, state, out, final_state, errors, saved)
        sizes = {"rows": rows, "columns": columns, "has_decay": decay.numel() > 0}
        _launch(delta_forward, num_sequences, *tensors, steps, batch, heads, save=save, **sizes)
        if save:
            ctx.save_for_backward(q, k, beta, decay, done, errors, saved)
            ctx.truncate = truncate
        return out, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out, d_last):
        q, k, beta, decay, done, errors, saved = ctx.saved_tensors
        batch, heads, steps, rows = k.shape
        columns = d_out.shape[-1]
        num_sequences = batch * heads
        d_out, d_last = d_out.contiguous(), d_last.contiguous()
        buffer = saved.new_empty(num_sequences, CHUNK, rows, columns)
        gradients = [torch.empty_like(x) for x in (q, k, d_out, beta, decay, d_last)]
        tensors = (q, k, beta, decay, done, errors, saved, buffer, d_out, d_last, *gradients)
        sizes = {"rows": rows, "columns": columns, "has_decay": decay.numel() > 0}
        _launch(delta_backward, num_sequences, *tensors, steps, batch, heads, int(ctx.truncate), **sizes)
        d_q, d_k, d_v, d_beta, d_decay, d_state = gradients
        return d_q, d_k, d_v, d_beta, d_decay, None, d_state, None, None


def delta_seq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    done: Tensor,
    state: Tensor,
    truncate: int = 0,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule over T steps. Arguments and results are those of `reference.delta_seq`."""
    decay = v.new_empty(0) if decay is None else decay
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, beta, decay, state))
    q, k, v, beta, decay, state = (x.contiguous() for x in (q, k, v, beta, decay, state))
    return DeltaFunction.apply(q, k, v, beta, decay, done.contiguous().view(torch.uint8), state, truncate, save)


class SRWMFunction(torch.autograd.Function):
    """Autograd function of `srwm_seq`.

    The columns of the four matrices are concatenated, D = M + 2E + 4: `base` [H,E,D] are the trained weights, `shift`
    [B,H,E,D] is the recurrent state. If `save` is False, the forward pass saves nothing, and no backward pass is
    possible.
    """

    @staticmethod
    def forward(ctx: Any, x, done, base, shift, truncate, save):
        batch, heads, steps, rows = x.shape
        total_columns = base.shape[-1]
        columns = total_columns - 2 * rows - 4
        num_sequences = batch * heads
        y, final_shift = x.new_empty(batch, heads, steps, columns), torch.empty_like(shift)
        # Buffers for the query q, the key k, the learning rates b and the error of each step.
        per_step = [x.new_empty((num_sequences, steps, n) if save else 1) for n in (rows, rows, 4, total_columns)]
        saved = x.new_empty((num_sequences, -(-steps // CHUNK), rows, total_columns) if save else 1)
        tensors = (x, done, base, shift, y, final_shift, *per_step, saved)
        _launch(srwm_forward, num_sequences, *tensors, steps, batch, heads, rows=rows, columns=columns, save=save)
        if save:
            ctx.save_for_backward(x, done, base, *per_step, saved)
            ctx.truncate = truncate
        return y, final_shift

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y, d_last):
        x, done, base, *per_step, saved = ctx.saved_tensors
        batch, heads, steps, rows = x.shape
        columns = d_y.shape[-1]
        num_sequences = batch * heads
        d_y, d_last = d_y.contiguous(), d_last.contiguous()
        buffer = x.new_empty(num_sequences, CHUNK, rows, base.shape[-1])
        d_x, d_base, d_shift = torch.empty_like(x), torch.empty_like(d_last), torch.empty_like(d_last)
        tensors = (x, done, base, *per_step, saved, buffer, d_y, d_last, d_x, d_base, d_shift)
        sizes = {"rows": rows, "columns": columns}
        _launch(srwm_backward, num_sequences, *tensors, steps, batch, heads, int(ctx.truncate), **sizes)
        return d_x, None, d_base.sum(0), d_shift, None, None


def srwm_seq(
    x: Tensor, done: Tensor, base: tuple[Tensor, ...], shift: tuple[Tensor, ...], truncate: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the recurrence of the SRWM over T steps. Arguments and results are those of `reference.srwm_seq`."""
    save = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *base, *shift))
    all_base, all_shift = torch.cat(base, dim=-1), torch.cat(shift, dim=-1)
    resets = done.contiguous().view(torch.uint8)
    y, final_shift = SRWMFunction.apply(x.contiguous(), resets, all_base, all_shift, truncate, save)
    widths = [matrix.shape[-1] for matrix in base]
    return y, tuple(matrix.contiguous() for matrix in final_shift.split(widths, dim=-1))
