"""Delta rule, with or without decay, on CPUs: forward and backward kernels compiled by Numba, float32 and float64.

In this module, a sequence is the computation for one head of one batch entry. A call runs in a single thread, which
computes the sequences one after the other. The state matrix of the current sequence thus stays in the L1 cache. The
backward pass needs the state before each step. To save memory, the forward pass saves only the state at every CHUNK-th
step, and the error v - kW of each step. From these data, the backward pass recomputes the states of a chunk (CHUNK
steps). The recomputation is exact, even if an episode starts within the chunk. Results are deterministic.

Shapes: N = B * H sequences, B batch entries, H heads, T steps, E rows and M columns of the state matrix W. The columns
are padded with zeros to a multiple of the SIMD vector length (`vector_length`). Names that end in `_at` are offsets in
flat arrays.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.kernels import numba_simd
from bestiary.kernels.numba_simd import (
    CHUNK,
    as_arrays,
    broadcast,
    copy,
    dot,
    fill_zero,
    fma,
    horizontal_sum,
    load,
    mul,
    needs_backward,
    pad_columns,
    scale,
    store,
    sub,
    vector_length,
    zeros,
)
from bestiary.utils.numba_jit import cached_njit

compile_kernel = partial(cached_njit, depends_on=(numba_simd.__file__,))


@compile_kernel
def delta_forward(q, k, v, beta, decay, done, state, out, errors, saved):
    """Run the forward pass of the delta rule. Overwrite the last four arguments with the results.

    Shapes: N sequences (one per head of each batch entry), T steps, B batch entries, a state of E rows and M columns.

    Args:
        q, k, v, beta: inputs [N,T,E], [N,T,E], [N,T,M], [N,T].
        decay: factors [N,T] by which the state is multiplied before each step. Empty: no decay.
        done: bool [T,B]; if True, an episode starts, and the state is set to zero before the step.
        state: initial state [N,E,M]; overwritten with the final state.
        out: overwritten with the outputs q W [N,T,M].
        errors: overwritten with v - kW [N,T,M], where W is the decayed state before the update. Empty if no
            backward pass follows.
        saved: overwritten with the state at the start of each chunk of CHUNK steps, [N,chunks,E,M]. Empty if no
            backward pass follows.
    """
    num_sequences, num_steps, rows = k.shape
    columns = v.shape[2]
    matrix_size = rows * columns
    num_heads = num_sequences // done.shape[1]
    for n in range(num_sequences):
        state_at = n * matrix_size
        for t in range(num_steps):
            step = n * num_steps + t
            if done[t, n // num_heads]:
                fill_zero(state, state_at, matrix_size)
            if len(saved) and t % CHUNK == 0:
                copy(state, state_at, saved, (n * saved.shape[1] + t // CHUNK) * matrix_size, matrix_size)
            if len(decay):
                scale(state, state_at, matrix_size, decay, step)
            # The columns of W do not depend on each other: compute the whole step for the first SIMD vector of columns,
            # then for the next one.
            for c in range(0, columns, vector_length(out)):
                recalled = zeros(out)
                for e in range(rows):
                    recalled = fma(broadcast(k, step * rows + e), load(state, state_at + e * columns + c), recalled)
                error = sub(load(v, step * columns + c), recalled)
                update = mul(broadcast(beta, step), error)
                read_out = zeros(out)
                for e in range(rows):
                    new_row = fma(broadcast(k, step * rows + e), update, load(state, state_at + e * columns + c))
                    store(state, state_at + e * columns + c, new_row)
                    read_out = fma(broadcast(q, step * rows + e), new_row, read_out)
                store(out, step * columns + c, read_out)
                if len(errors):
                    store(errors, step * columns + c, error)


@compile_kernel
def delta_backward(q, k, beta, decay, done, errors, saved, d_out, d_state, truncate, d_q, d_k, d_v, d_beta, d_decay):
    """Run the backward pass of the delta rule. Overwrite the last five arguments with the gradients of the inputs.

    See `delta_forward` for the shapes. `errors` and `saved` are results of the forward pass. `d_out` [N,T,M] is the
    gradient of the outputs. `d_state` [N,E,M] is the gradient of the final state, and is overwritten with the gradient
    of the initial state. If `truncate` is not 0, no gradient flows from the steps 0, `truncate`, 2 `truncate`, ... to
    the previous step. Without decay, `decay` and `d_decay` are empty.
    """
    num_sequences, num_steps, rows = k.shape
    columns = d_out.shape[2]
    matrix_size = rows * columns
    num_heads = num_sequences // done.shape[1]
    states = np.empty((CHUNK, rows, columns), k.dtype)  # for each step of a chunk: the state after decay, before update
    undecayed = np.empty((CHUNK if len(decay) else 0, rows, columns), k.dtype)  # the states before decay
    update = np.empty(columns, k.dtype)  # beta (v - kW)
    minus_d_error = np.empty(columns, k.dtype)  # negative gradient of the error v - kW
    for n in range(num_sequences):
        grad_at = n * matrix_size
        for chunk in range(saved.shape[1] - 1, -1, -1):
            start, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, num_steps)
            copy(saved, (n * saved.shape[1] + chunk) * matrix_size, states, 0, matrix_size)
            if len(decay):
                copy(states, 0, undecayed, 0, matrix_size)
                scale(states, 0, matrix_size, decay, n * num_steps + start)
            for t in range(start + 1, end):
                previous_at = (t - start - 1) * matrix_size
                current_at = (t - start) * matrix_size
                step = n * num_steps + t - 1
                if done[t, n // num_heads]:
                    fill_zero(states, current_at, matrix_size)
                    if len(decay):
                        fill_zero(undecayed, current_at, matrix_size)
                    continue
                for c in range(0, columns, vector_length(states)):
                    written = mul(broadcast(beta, step), load(errors, step * columns + c))
                    for e in range(rows):
                        at = e * columns + c
                        new_row = fma(broadcast(k, step * rows + e), written, load(states, previous_at + at))
                        store(states, current_at + at, new_row)
                if len(decay):
                    copy(states, current_at, undecayed, current_at, matrix_size)
                    scale(states, current_at, matrix_size, decay, n * num_steps + t)
            for t in range(end - 1, start - 1, -1):
                step = n * num_steps + t
                w_at = (t - start) * matrix_size
                update_dot_d_out, d_beta_sum = zeros(beta), zeros(beta)
                for c in range(0, columns, vector_length(beta)):
                    at = step * columns + c
                    d_out_part, error = load(d_out, at), load(errors, at)
                    d_update = zeros(beta)
                    for e in range(rows):
                        grad_row_at = grad_at + e * columns + c
                        grad_row = fma(broadcast(q, step * rows + e), d_out_part, load(d_state, grad_row_at))
                        store(d_state, grad_row_at, grad_row)
                        d_update = fma(broadcast(k, step * rows + e), grad_row, d_update)
                    d_beta_sum = fma(d_update, error, d_beta_sum)
                    error = mul(broadcast(beta, step), error)
                    d_update = mul(broadcast(beta, step), d_update)
                    update_dot_d_out = fma(error, d_out_part, update_dot_d_out)
                    store(update, c, error)
                    store(d_v, at, d_update)
                    store(minus_d_error, c, sub(zeros(beta), d_update))
                d_beta[n, t] = horizontal_sum(d_beta_sum)
                # The output is q (W + k ⊗ update), but `states` contains W, the weights before the update. The gradient
                # of q therefore has a second term, which comes from k ⊗ update.
                own_update = horizontal_sum(update_dot_d_out)
                for e in range(rows):
                    d_q_sum, d_k_sum = zeros(beta), zeros(beta)
                    for c in range(0, columns, vector_length(beta)):
                        grad_row_at = grad_at + e * columns + c
                        w_row = load(states, w_at + e * columns + c)
                        grad_row = load(d_state, grad_row_at)
                        d_q_sum = fma(w_row, load(d_out, step * columns + c), d_q_sum)
                        d_k_sum = fma(grad_row, load(update, c), fma(w_row, load(minus_d_error, c), d_k_sum))
                        grad_row = fma(broadcast(k, step * rows + e), load(minus_d_error, c), grad_row)
                        store(d_state, grad_row_at, grad_row)
                    d_q[n, t, e] = horizontal_sum(d_q_sum) + k[n, t, e] * own_update
                    d_k[n, t, e] = horizontal_sum(d_k_sum)
                if len(decay):
                    d_decay[n, t] = dot(d_state, grad_at, undecayed, w_at, matrix_size)
                    scale(d_state, grad_at, matrix_size, decay, step)
                if (truncate and t % truncate == 0) or done[t, n // num_heads]:
                    fill_zero(d_state, grad_at, matrix_size)


class DeltaFunction(torch.autograd.Function):
    """Autograd function of `delta_seq`. All tensors are contiguous.

    The first axis of all tensors except `done` [T,B] has N = B * H entries, one per head of each batch entry. The
    columns of v and state must be padded to a multiple of the SIMD vector length. `decay` is empty if there is no
    decay. If `save` is False, the forward pass saves nothing, and no backward pass is possible.
    """

    @staticmethod
    def forward(ctx: Any, q, k, v, beta, decay, done, state, truncate, save):
        num_sequences, num_steps, rows = k.shape
        columns = v.shape[2]
        num_chunks = -(-num_steps // CHUNK)
        out = torch.empty_like(v)
        state = state.clone()
        errors = v.new_empty((num_sequences, num_steps, columns) if save else (0, 0, 0))
        saved = v.new_empty((num_sequences, num_chunks, rows, columns) if save else (0, 0, 0, 0))
        delta_forward(*as_arrays(q, k, v, beta, decay, done, state, out, errors, saved))
        if save:
            ctx.save_for_backward(q, k, beta, decay, done, errors, saved)
            ctx.truncate = truncate
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out, d_state):
        q, k, beta, decay, done, errors, saved = ctx.saved_tensors
        d_out = d_out.contiguous()
        d_state = d_state.clone(memory_format=torch.contiguous_format)
        gradients = [torch.empty_like(x) for x in (q, k, d_out, beta, decay)]
        arrays = as_arrays(q, k, beta, decay, done, errors, saved, d_out, d_state)
        delta_backward(*arrays, ctx.truncate, *as_arrays(*gradients))
        return *gradients, None, d_state, None, None


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
    batch, heads, steps, rows = k.shape
    columns = v.shape[-1]
    decays = v.new_empty(0, 0) if decay is None else decay.reshape(-1, steps).contiguous()
    save = needs_backward(q, k, v, beta, decays, state)
    out, final_state = DeltaFunction.apply(
        q.reshape(-1, steps, rows).contiguous(),
        k.reshape(-1, steps, rows).contiguous(),
        pad_columns(v.reshape(-1, steps, columns)),
        beta.reshape(-1, steps).contiguous(),
        decays,
        done.contiguous(),
        pad_columns(state.reshape(-1, rows, columns)),
        int(truncate),
        save,
    )
    return (
        out[..., :columns].reshape(batch, heads, steps, columns),
        final_state[..., :columns].reshape(batch, heads, rows, columns),
    )
