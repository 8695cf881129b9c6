"""Self-referential weight matrix (SRWM) on CPUs: forward and backward kernels compiled by Numba, float32 and float64.

The weights are W = base + shift: `base` is trained, `shift` is the recurrent state (see `reference.srwm_seq`). In this
module, a sequence is the computation for one head of one batch entry. A call runs in a single thread, which computes
the sequences one after the other. The forward pass saves the shift at every CHUNK-th step, and a record of each step.
The record contains the query q [E], the key k [E], the four learning rates b, and the error (q - k) W [D]. The backward
pass recomputes the weights of a chunk (CHUNK steps) from the saved shift and the records. The recomputation is exact,
even if an episode starts within the chunk. Results are deterministic.

The four submatrices are stored as one matrix W = [Wy|Wq|Wk|Wb] of shape [E,D]. `offsets` contains the index of the
first column of each submatrix, followed by D. The columns of each submatrix and the four parts of a record are padded
to multiples of the SIMD vector length (`vector_length`).

Shapes: N = B * H sequences, B batch entries, H heads, T steps, E rows, D columns, My columns of Wy, R numbers in a
record. Names that end in `_at` are offsets in flat arrays.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.kernels import numba_simd
from bestiary.kernels.numba_simd import (
    CHUNK,
    VECTOR_BYTES,
    add,
    add_to,
    as_arrays,
    broadcast,
    copy,
    div,
    exp,
    fill_zero,
    fma,
    horizontal_max,
    horizontal_sum,
    load,
    matrix_vector_product,
    maximum,
    mul,
    needs_backward,
    ones,
    splat,
    store,
    sub,
    vector_length,
    vector_matrix_product,
    zeros,
)
from bestiary.utils.numba_jit import cached_njit

compile_kernel = partial(cached_njit, depends_on=(numba_simd.__file__,))


@compile_kernel
def softmax(scores, i, count, out, j):
    """Write the softmax of `count` scores, which start at scores[i], to out[j:].

    Scores and results are padded to a multiple of the SIMD vector length. The padding of `scores` is overwritten with
    minus infinity, the padding of `out` with zero.
    """
    padded = (count + vector_length(out) - 1) // vector_length(out) * vector_length(out)
    for c in range(count, padded):
        scores[i + c] = -np.inf
    largest = load(scores, i)
    for c in range(vector_length(out), count, vector_length(out)):
        largest = maximum(largest, load(scores, i + c))
    largest = splat(horizontal_max(largest))
    sums = zeros(out)
    for c in range(0, count, vector_length(out)):
        exponentials = exp(sub(load(scores, i + c), largest))
        sums = add(sums, exponentials)
        store(out, j + c, exponentials)
    sums = splat(horizontal_sum(sums))
    for c in range(0, count, vector_length(out)):
        store(out, j + c, div(load(out, j + c), sums))
    for c in range(count, padded):
        out[j + c] = 0


@compile_kernel
def softmax_backward(probs, i, d_probs, count, out, j):
    """Compute the backward pass of a softmax: write probs * (d_probs - probs · d_probs) to out[j:].

    · is the scalar product. The softmax returned `count` probabilities, which start at probs[i]. `d_probs` is the
    gradient of the loss with respect to these probabilities. The result is the gradient with respect to the inputs of
    the softmax.
    """
    sums = zeros(out)
    for c in range(0, count, vector_length(out)):
        sums = fma(load(probs, i + c), load(d_probs, c), sums)
    mean = splat(horizontal_sum(sums))
    for c in range(0, count, vector_length(out)):
        store(out, j + c, mul(load(probs, i + c), sub(load(d_probs, c), mean)))


@compile_kernel
def sigmoid(scores, i, out, j):
    """Load the SIMD vector at scores[i:], compute its sigmoid, and store the result at out[j:]."""
    store(out, j, div(ones(out), add(ones(out), exp(sub(zeros(out), load(scores, i))))))


@compile_kernel
def scale(row, i, b, j, offsets, out):
    """Multiply each of the four parts of row[i:] by its own factor, and write the result to `out` [D].

    Part z, from 0 to 3, consists of the columns offsets[z] to offsets[z + 1] - 1. The factor of part z is b[j + z].
    """
    for z in range(4):
        factor = broadcast(b, j + z)
        for c in range(offsets[z], offsets[z + 1], vector_length(out)):
            store(out, c, mul(factor, load(row, i + c)))


@compile_kernel
def srwm_forward(x, done, base, shift, offsets, y, records, saved):
    """Run the forward pass of the SRWM. Overwrite `shift`, `y`, `records` and `saved` with the results.

    The weights W = base + shift have E rows and D columns. Each of the four submatrices [Wy|Wq|Wk|Wb] is padded to a
    multiple of the SIMD vector length. D and My, the number of columns of Wy, include the padding.

    Shapes: N sequences (one per head of each batch entry), T steps, B batch entries, H heads. A record has R numbers.
    All arrays except x and done are flat, and the shapes describe their layout.

    Args:
        x: inputs [N,T,E].
        done: bool [T,B]; if True, an episode starts, and the shift is set to zero before the step.
        base: trained weights [H,E,D].
        shift: initial shift [N,E,D]; overwritten with the final shift.
        offsets: index of the first column of each submatrix, followed by D.
        y: overwritten with the outputs x Wy [N,T,My].
        records: overwritten with q, k, b and (q - k) W of all steps, [N,T,R]. If no backward pass follows, the array
            has space for only one step.
        saved: overwritten with the shift at the start of each chunk of CHUNK steps, [N,chunks,E,D]. Empty if no
            backward pass follows.
    """
    num_sequences, num_steps, rows = x.shape
    columns = offsets[4]
    padded = offsets[2] - offsets[1]  # padded size of q and k
    y_size = len(y) // (num_sequences * num_steps)
    matrix_size = rows * columns
    record_size = 2 * padded + vector_length(x) + columns
    num_chunks = (num_steps + CHUNK - 1) // CHUNK
    num_heads = num_sequences // done.shape[1]
    weights = np.empty(matrix_size, x.dtype)  # base + shift
    scores = np.empty(columns, x.dtype)  # x W
    update = np.empty(columns, x.dtype)  # b (q - k) W
    q_minus_k = np.empty(padded, x.dtype)
    for n in range(num_sequences):
        base_at, shift_at = n % num_heads * matrix_size, n * matrix_size
        for c in range(0, matrix_size, vector_length(x)):
            store(weights, c, add(load(base, base_at + c), load(shift, shift_at + c)))
        for t in range(num_steps):
            step = n * num_steps + t
            if done[t, n // num_heads]:
                fill_zero(shift, shift_at, matrix_size)
                copy(base, base_at, weights, 0, matrix_size)
            if t == 0 or done[t, n // num_heads]:
                vector_matrix_product(x, step * rows, weights, 0, rows, columns, scores, 0)
            if len(saved) and t % CHUNK == 0:
                copy(shift, shift_at, saved, (n * num_chunks + t // CHUNK) * matrix_size, matrix_size)
            q_at = step * record_size if len(saved) else 0  # the record begins with q
            k_at, b_at, error_at = q_at + padded, q_at + 2 * padded, q_at + 2 * padded + vector_length(x)
            for j in range(y_size):
                y[step * y_size + j] = scores[j]
            softmax(scores, offsets[1], rows, records, q_at)
            softmax(scores, offsets[2], rows, records, k_at)
            sigmoid(scores, offsets[3], records, b_at)
            for c in range(0, padded, vector_length(x)):
                store(q_minus_k, c, sub(load(records, q_at + c), load(records, k_at + c)))
            vector_matrix_product(q_minus_k, 0, weights, 0, rows, columns, records, error_at)
            scale(records, error_at, records, b_at, offsets, update)
            next_x_at = min(step + 1, n * num_steps + num_steps - 1) * rows
            for c in range(0, columns, vector_length(x)):
                written, sums = load(update, c), zeros(x)
                for e in range(rows):
                    at = e * columns + c
                    new_row = fma(broadcast(records, k_at + e), written, load(shift, shift_at + at))
                    store(shift, shift_at + at, new_row)
                    new_row = add(load(base, base_at + at), new_row)
                    store(weights, at, new_row)
                    sums = fma(broadcast(x, next_x_at + e), new_row, sums)  # x W of the next step
                store(scores, c, sums)


@compile_kernel
def srwm_backward(x, done, base, offsets, records, saved, d_y, d_shift, has_final_grad, truncate, d_x, d_base):
    """Run the backward pass of the SRWM.

    Overwrite `d_x` with the gradient of x, and add the gradient of `base` to `d_base` [H,E,D]. All arrays except x and
    done are flat; the given shapes describe their layout. `records` and `saved` are results of the forward pass. `d_y`
    [N,T,My] is the gradient of the outputs. `d_shift` [N,E,D] is the gradient of the final shift, and is overwritten
    with the gradient of the initial shift. `has_final_grad` is False if the gradient of the final shift is zero. If
    `truncate` is True, no gradient flows from a step to the previous step.
    """
    num_sequences, num_steps, rows = x.shape
    columns = offsets[4]
    padded = offsets[2] - offsets[1]  # padded size of q and k
    y_size = len(d_y) // (num_sequences * num_steps)
    matrix_size = rows * columns
    record_size = 2 * padded + vector_length(x) + columns
    num_chunks = (num_steps + CHUNK - 1) // CHUNK
    num_heads = num_sequences // done.shape[1]
    weights = np.empty(CHUNK * matrix_size, x.dtype)  # base + shift before each step of a chunk
    shift = np.empty(matrix_size, x.dtype)
    update = np.empty(columns, x.dtype)  # b (q - k) W
    d_update = np.empty(columns, x.dtype)
    d_error = np.empty(columns, x.dtype)
    d_scores = np.zeros(columns, x.dtype)
    d_q = np.zeros(padded, x.dtype)
    d_k = np.zeros(padded, x.dtype)
    q_minus_k = np.empty(padded, x.dtype)
    for n in range(num_sequences):
        base_at, grad_at = n % num_heads * matrix_size, n * matrix_size
        # The gradient of base is the sum of the gradients of W at all steps. The loop goes backwards in time and adds
        # the gradient of W at each step to d_shift. Before the loop, d_shift is the gradient of the final shift.
        # If the gradient of the final shift is zero, d_shift is a sum of gradients of W only. It is added to d_base at
        # the end of the loop, and each time before d_shift is set to zero (at an episode start or, with `truncate`,
        # after each step).
        # If the gradient of the final shift is not zero, `sum_separately` is True until d_shift is set to zero for the
        # first time. While `sum_separately` is True, the gradient of W at each step is added to d_base directly.
        sum_separately = has_final_grad
        last_k_at = (n * num_steps + num_steps - 1) * record_size + padded
        vector_matrix_product(records, last_k_at, d_shift, grad_at, rows, columns, d_update, 0)
        for chunk in range(num_chunks - 1, -1, -1):
            start, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, num_steps)
            copy(saved, (n * num_chunks + chunk) * matrix_size, shift, 0, matrix_size)
            for c in range(0, matrix_size, vector_length(x)):
                store(weights, c, add(load(base, base_at + c), load(shift, c)))
            for t in range(start + 1, end):
                current_at = (t - start) * matrix_size
                q_at = (n * num_steps + t - 1) * record_size  # record of the previous step
                k_at, b_at, error_at = q_at + padded, q_at + 2 * padded, q_at + 2 * padded + vector_length(x)
                if done[t, n // num_heads]:
                    fill_zero(shift, 0, matrix_size)
                    copy(base, base_at, weights, current_at, matrix_size)
                    continue
                scale(records, error_at, records, b_at, offsets, update)
                for c in range(0, columns, vector_length(x)):
                    written = load(update, c)
                    for e in range(rows):
                        at = e * columns + c
                        row = fma(broadcast(records, k_at + e), written, load(shift, at))
                        store(shift, at, row)
                        store(weights, current_at + at, add(load(base, base_at + at), row))
            for t in range(end - 1, start - 1, -1):
                step = n * num_steps + t
                w_at = (t - start) * matrix_size
                q_at = step * record_size
                k_at, b_at, error_at = q_at + padded, q_at + 2 * padded, q_at + 2 * padded + vector_length(x)
                # Gradients of the update shift <- shift + k ⊗ (b * error). At this point, d_update = k d_shift.
                scale(records, error_at, records, b_at, offsets, update)
                scale(d_update, 0, records, b_at, offsets, d_error)
                matrix_vector_product(weights, w_at, rows, columns, d_error, d_q, 0)
                matrix_vector_product(d_shift, grad_at, rows, columns, update, d_k, 0)
                for c in range(0, padded, vector_length(x)):
                    store(d_k, c, sub(load(d_k, c), load(d_q, c)))
                    store(q_minus_k, c, sub(load(records, q_at + c), load(records, k_at + c)))
                # Gradient of the loss with respect to the product x W, computed from the gradients of y, q, k and b.
                for j in range(y_size):
                    d_scores[j] = d_y[step * y_size + j]
                softmax_backward(records, q_at, d_q, rows, d_scores, offsets[1])
                softmax_backward(records, k_at, d_k, rows, d_scores, offsets[2])
                for z in range(4):
                    sums = zeros(x)
                    for c in range(offsets[z], offsets[z + 1], vector_length(x)):
                        sums = fma(load(d_update, c), load(records, error_at + c), sums)
                    rate = records[b_at + z]
                    d_scores[offsets[3] + z] = horizontal_sum(sums) * rate * (1 - rate)
                matrix_vector_product(weights, w_at, rows, columns, d_scores, d_x, step * rows)
                if sum_separately:
                    for e in range(rows):
                        for c in range(0, columns, vector_length(x)):
                            at = base_at + e * columns + c
                            row = fma(broadcast(x, step * rows + e), load(d_scores, c), load(d_base, at))
                            store(d_base, at, fma(broadcast(q_minus_k, e), load(d_error, c), row))
                previous_k_at = max(k_at - record_size, padded)
                for c in range(0, columns, vector_length(x)):
                    d_score, d_error_part, sums = load(d_scores, c), load(d_error, c), zeros(x)
                    for e in range(rows):
                        row = fma(broadcast(x, step * rows + e), d_score, load(d_shift, grad_at + e * columns + c))
                        row = fma(broadcast(q_minus_k, e), d_error_part, row)
                        store(d_shift, grad_at + e * columns + c, row)
                        sums = fma(broadcast(records, previous_k_at + e), row, sums)
                    store(d_update, c, sums)
                if truncate or done[t, n // num_heads]:
                    if not sum_separately:
                        add_to(d_base, base_at, d_shift, grad_at, matrix_size)
                    fill_zero(d_shift, grad_at, matrix_size)
                    fill_zero(d_update, 0, columns)
                    sum_separately = False
        if not sum_separately:
            add_to(d_base, base_at, d_shift, grad_at, matrix_size)


@compile_kernel
def copy_columns(source, i, target, j, width):
    """Copy columns i to i + width - 1 of the matrix `source` to columns j to j + width - 1 of the matrix `target`."""
    whole_vectors = width // vector_length(target) * vector_length(target)
    for r in range(len(source)):
        source_at = r * source.shape[1] + i
        target_at = r * target.shape[1] + j
        for c in range(0, whole_vectors, vector_length(target)):
            store(target, target_at + c, load(source, source_at + c))
        for c in range(whole_vectors, width):
            target[r, j + c] = source[r, i + c]


class SRWMFunction(torch.autograd.Function):
    """Autograd function of `srwm_seq`. `matrices` are the four base matrices [H,E,...] and the four shifts [N,E,...].

    x is [N,T,E], `done` is [T,B]. N = B * H is the number of sequences, one per head of each batch entry. If `save` is
    False, the forward pass saves nothing, and no backward pass is possible.
    """

    @staticmethod
    def forward(ctx: Any, x, done, truncate, save, *matrices):
        num_sequences, num_steps, rows = x.shape
        num_chunks = -(-num_steps // CHUNK)
        widths = [matrix.shape[-1] for matrix in matrices[:4]]
        base = _concat_padded(matrices[:4])
        shift = _concat_padded(matrices[4:])
        offsets = _column_offsets(matrices[:4])
        record_size = offsets[4] + 2 * (offsets[2] - offsets[1]) + VECTOR_BYTES // x.element_size()
        y = x.new_empty(num_sequences, num_steps, widths[0])
        records = x.new_empty(num_sequences * num_steps * record_size if save else record_size)
        saved = x.new_empty(num_sequences * num_chunks * rows * offsets[4] if save else 0)
        arrays = as_arrays(x, done, base.flatten(), shift.flatten())
        srwm_forward(*arrays, offsets, *as_arrays(y.flatten(), records, saved))
        if save:
            ctx.save_for_backward(x, done, base, records, saved)
            ctx.truncate = truncate
            ctx.widths = widths
            ctx.set_materialize_grads(False)
        return y, *_split_padded(shift, widths)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y, *d_final):
        x, done, base, records, saved = ctx.saved_tensors
        num_sequences, num_steps, rows = x.shape
        widths = ctx.widths
        has_final_grad = any(d is not None for d in d_final)
        d_y = x.new_zeros(num_sequences, num_steps, widths[0]) if d_y is None else d_y.contiguous()
        d_final_shift = [
            x.new_zeros(num_sequences, rows, width) if d is None else d
            for d, width in zip(d_final, widths, strict=True)
        ]
        d_shift = _concat_padded(d_final_shift)
        d_x = torch.empty_like(x)
        d_base = torch.zeros_like(base)
        srwm_backward(
            *as_arrays(x, done, base.flatten()),
            _column_offsets(d_final_shift),
            *as_arrays(records, saved, d_y.flatten(), d_shift.flatten()),
            has_final_grad,
            ctx.truncate,
            *as_arrays(d_x.flatten(), d_base.flatten()),
        )
        return d_x, None, None, None, *_split_padded(d_base, widths), *_split_padded(d_shift, widths)


def srwm_seq(
    x: Tensor, done: Tensor, base: tuple[Tensor, ...], shift: tuple[Tensor, ...], truncate: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute the recurrence of the SRWM over T steps. Arguments and results are those of `reference.srwm_seq`."""
    batch, heads, steps, rows = x.shape
    y, *final_shift = SRWMFunction.apply(
        x.reshape(-1, steps, rows).contiguous(),
        done.contiguous(),
        truncate,
        needs_backward(x, *base, *shift),
        *base,
        *(matrix.flatten(0, 1) for matrix in shift),
    )
    return y.unflatten(0, (batch, heads)), tuple(matrix.unflatten(0, (batch, heads)) for matrix in final_shift)


def _column_offsets(matrices: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the index of the first column of each matrix in the result of `_concat_padded`, then the total width."""
    length = VECTOR_BYTES // matrices[0].element_size()
    return tuple(accumulate((-(-matrix.shape[-1] // length) * length for matrix in matrices), initial=0))


def _concat_padded(matrices: Sequence[Tensor]) -> Tensor:
    """Return the columns of four matrices [N,E,...], concatenated to one tensor [N,E,D].

    The columns of each matrix are padded with zeros to a multiple of the SIMD vector length.
    """
    offsets = _column_offsets(matrices)
    fused = matrices[0].new_zeros(*matrices[0].shape[:2], offsets[4])
    (target,) = as_arrays(fused.flatten(0, 1))
    for matrix, offset in zip(matrices, offsets, strict=False):
        (source,) = as_arrays(matrix.flatten(0, 1).contiguous())
        copy_columns(source, 0, target, offset, matrix.shape[-1])
    return fused


def _split_padded(fused: Tensor, widths: list[int]) -> list[Tensor]:
    """Split the result of `_concat_padded` [N,E,D] into matrices [N,E,...] with the given numbers of columns."""
    matrices = [fused.new_empty(*fused.shape[:2], width) for width in widths]
    (source,) = as_arrays(fused.flatten(0, 1))
    for matrix, offset in zip(matrices, _column_offsets(matrices), strict=False):
        (target,) = as_arrays(matrix.flatten(0, 1))
        copy_columns(source, offset, target, 0, matrix.shape[-1])
    return matrices
