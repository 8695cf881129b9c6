"""The recurrences on CPUs: loops compiled by Numba, forward and backward, float32 and float64, free of Python's lock.

One head of one batch entry after the other goes through time, its matrix in the nearest cache. The innermost loops are
too short (16 columns, say) for a compiler to vectorise them well, so they are written with vectors: `Lanes` are
neighbouring columns of a row. Rows are padded to whole Lanes with zeros.

Backward needs the matrix before each step. Forward saves it every CHUNK steps, and what each step changed; backward replays
a chunk from there. That is exact, also across restarts, and needs little memory. Nothing depends on the order of threads:
each call is one thread's, and repeats bit for bit.

All of it is one file because Numba knows that a compiled function is stale by its own file alone (`bestiary.jit`).
"""

import math
from collections.abc import Sequence
from itertools import accumulate as accumulate_sizes
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model
from torch import Tensor
from torch.autograd.function import once_differentiable

from bestiary.jit import compiled

LANE_BYTES = 64  # a line of cache: one, two or four registers, as the CPU has them
CHUNK = 16  # steps from one saved matrix to the next


# --- Lanes --------------------------------------------------------------------------------------------------------------


class Lanes(types.Type):
    """Neighbouring numbers that one instruction handles together. Lives in compiled code only."""

    def __init__(self, dtype: types.Float):
        super().__init__(name=f"Lanes({dtype})")
        self.dtype = dtype


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes):
        element = ir.FloatType() if lanes.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, lanes, ir.VectorType(element, LANE_BYTES * 8 // lanes.dtype.bitwidth))


instruction: Any = intrinsic  # what compiled code calls takes fewer arguments than what is written here
FUSED = ("contract",)  # a product and a sum may become one instruction


def _address(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])


def _spread(builder: Any, kind: ir.VectorType, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(
        first, first, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    )


def _constant(kind: ir.VectorType, number: Any) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _fold(builder: Any, vector: Any, join: Any) -> Any:
    """One number of all lanes: upper half with lower half, until one is left."""
    count = vector.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), count), list(places)))
            for places in (range(count), range(count, 2 * count))
        ]
        vector = join(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


@instruction
def lanes(typing_context, array):
    """How many elements of the array are one Lanes."""

    def build(context, builder, signature, arguments):
        return context.get_constant(types.intp, LANE_BYTES * 8 // signature.args[0].dtype.bitwidth)

    return types.intp(array), build


@instruction
def load(typing_context, array, i):
    """The Lanes that start at element i of a contiguous array, whatever its shape."""

    def build(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type)
        address = _address(context, builder, signature.args[0], *arguments)
        return builder.load(builder.bitcast(address, kind.as_pointer()), align=signature.args[0].dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), build


@instruction
def store(typing_context, array, i, vector):
    def build(context, builder, signature, arguments):
        address = _address(context, builder, signature.args[0], *arguments[:2])
        address = builder.bitcast(address, arguments[2].type.as_pointer())
        builder.store(arguments[2], address, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), build


@instruction
def spread(typing_context, array, i):
    """Element i of a contiguous array, in all lanes."""

    def build(context, builder, signature, arguments):
        number = builder.load(_address(context, builder, signature.args[0], *arguments))
        return _spread(builder, context.get_value_type(signature.return_type), number)

    return Lanes(array.dtype)(array, types.intp), build


def _everywhere(number: float) -> Any:
    @instruction
    def constant(typing_context, array):
        def build(context, builder, signature, arguments):
            return _constant(context.get_value_type(signature.return_type), number)

        return Lanes(array.dtype)(array), build

    return constant


zeros, ones = _everywhere(0.0), _everywhere(1.0)  # Lanes of an array's type


@instruction
def fma(typing_context, a, b, c):
    """a b + c"""

    def build(context, builder, signature, arguments):
        a, b, c = arguments
        return builder.fadd(builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

    return c(a, b, c), build


def _lane_by_lane(name: str) -> Any:
    @instruction
    def operation(typing_context, a, b):
        def build(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments, flags=FUSED)

        return a(a, b), build

    return operation


add, sub, mul, div = (_lane_by_lane(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@instruction
def maximum(typing_context, a, b):
    def build(context, builder, signature, arguments):
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return a(a, b), build


@instruction
def everywhere(typing_context, number):
    """A number in all lanes."""

    def build(context, builder, signature, arguments):
        return _spread(builder, context.get_value_type(signature.return_type), arguments[0])

    return Lanes(number)(number), build


@instruction
def total(typing_context, vector):
    def build(context, builder, signature, arguments):
        return _fold(builder, arguments[0], builder.fadd)

    return vector.dtype(vector), build


@instruction
def greatest(typing_context, vector):
    def build(context, builder, signature, arguments):
        return _fold(builder, arguments[0], lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return vector.dtype(vector), build


@instruction
def exponential(typing_context, vector):
    """e^x = 2^n e^r, n whole and |r| <= ln(2)/2: the exponent's bits, and a Taylor sum. Beyond the range, that of its end."""
    single = vector.dtype == types.float32
    bits, mantissa, degree, end = (32, 23, 7, 87.0) if single else (64, 52, 13, 708.0)

    def build(context, builder, signature, arguments):
        x, kind = arguments[0], arguments[0].type
        integers = ir.VectorType(ir.IntType(bits), kind.count)

        def number(value):
            return _constant(kind, value)

        def fused(a, b, c):
            return builder.fadd(builder.fmul(a, b, flags=FUSED), c, flags=FUSED)

        for sign, limit in (("<", -end), (">", end)):  # not a number stays what it is
            x = builder.select(builder.fcmp_ordered(sign, x, number(limit)), number(limit), x)
        to_whole = number(
            1.5 * 2.0**mantissa
        )  # added to a number, it leaves no bits for a fraction, and n in the lowest
        shifted = fused(x, number(1 / math.log(2)), to_whole)
        n = builder.fsub(shifted, to_whole)
        # ln 2 in two parts: n times the first is exact
        r = fused(n, number(-1.428606820309417232e-06), fused(n, number(-0.693145751953125), x))
        series = number(1 / math.factorial(degree))
        for i in reversed(range(degree)):
            series = fused(series, r, number(1 / math.factorial(i)))
        exponent = builder.shl(builder.bitcast(shifted, integers), _constant(integers, mantissa))
        one = (2 ** (bits - mantissa - 2) - 1) << mantissa  # the bits of 1.0
        power = builder.bitcast(builder.add(exponent, _constant(integers, one)), kind)
        return builder.fmul(series, power)

    return vector(vector), build


# --- on matrices ---------------------------------------------------------------------------------------------------------
# A matrix is its array and the element that it starts at, its rows one after the other.


@compiled
def read(row, i, matrix, j, rows, columns, out, o):
    """out[o:] = row[i:] matrix[j:], the product of a row and a matrix."""
    for c in range(0, columns, lanes(out)):
        sums = zeros(out)
        for e in range(rows):
            sums = fma(spread(row, i + e), load(matrix, j + e * columns + c), sums)
        store(out, o + c, sums)


@compiled
def apply(matrix, j, rows, columns, row, out, o):
    """out[o:] = matrix[j:] row^T, four rows of the matrix at a time."""
    for e in range(0, rows - 3, 4):
        a, b, c, d = zeros(out), zeros(out), zeros(out), zeros(out)
        for i in range(0, columns, lanes(out)):
            at, factor = j + e * columns + i, load(row, i)
            a = fma(load(matrix, at), factor, a)
            b = fma(load(matrix, at + columns), factor, b)
            c = fma(load(matrix, at + 2 * columns), factor, c)
            d = fma(load(matrix, at + 3 * columns), factor, d)
        out[o + e], out[o + e + 1], out[o + e + 2], out[o + e + 3] = total(a), total(b), total(c), total(d)
    for e in range(rows // 4 * 4, rows):
        sums = zeros(out)
        for i in range(0, columns, lanes(out)):
            sums = fma(load(matrix, j + e * columns + i), load(row, i), sums)
        out[o + e] = total(sums)


@compiled
def copy(source, i, target, j, count):
    for c in range(0, count, lanes(target)):
        store(target, j + c, load(source, i + c))


@compiled
def clear(array, i, count):
    for c in range(0, count, lanes(array)):
        store(array, i + c, zeros(array))


@compiled
def accumulate(target, i, source, j, count):
    for c in range(0, count, lanes(target)):
        store(target, i + c, add(load(target, i + c), load(source, j + c)))


# --- the delta rule ------------------------------------------------------------------------------------------------------


@compiled
def delta_forward(q, k, v, beta, done, state, out, errors, saved):
    """One pass through time of heads [N,T,...]. `state` [N,E,M] becomes the last; errors v - kW and saved: if not empty."""
    heads, steps, rows = k.shape
    columns = v.shape[2]
    size = rows * columns
    group = heads // done.shape[1]  # heads of one batch entry
    for n in range(heads):
        w = n * size
        for t in range(steps):
            step = n * steps + t
            if done[t, n // group]:
                clear(state, w, size)
            if len(saved) and t % CHUNK == 0:
                copy(state, w, saved, (n * saved.shape[1] + t // CHUNK) * size, size)
            for c in range(0, columns, lanes(out)):  # columns never meet: some of them at a time go through a step
                old = zeros(out)
                for e in range(rows):
                    old = fma(spread(k, step * rows + e), load(state, w + e * columns + c), old)
                error = sub(load(v, step * columns + c), old)
                change = mul(spread(beta, step), error)
                new = zeros(out)
                for e in range(rows):
                    row = fma(spread(k, step * rows + e), change, load(state, w + e * columns + c))
                    store(state, w + e * columns + c, row)
                    new = fma(spread(q, step * rows + e), row, new)
                store(out, step * columns + c, new)
                if len(errors):
                    store(errors, step * columns + c, error)


@compiled
def delta_backward(q, k, beta, done, errors, saved, d_out, d_state, truncate, d_q, d_k, d_v, d_beta):
    """Back through time. `d_state` [N,E,M], the last state's gradient, becomes the first one's. Fills d_q to d_beta."""
    heads, steps, rows = k.shape
    columns = d_out.shape[2]
    size = rows * columns
    group = heads // done.shape[1]
    before = np.empty((CHUNK, rows, columns), k.dtype)  # the state before each step of a chunk
    change = np.empty(columns, k.dtype)  # beta (v - kW), what k wrote
    loss = np.empty(columns, k.dtype)  # - beta times the gradient of `change`
    for n in range(heads):
        g = n * size
        for chunk in range(saved.shape[1] - 1, -1, -1):
            first, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, steps)
            copy(saved, (n * saved.shape[1] + chunk) * size, before, 0, size)
            for t in range(first + 1, end):
                was, now, step = (t - first - 1) * size, (t - first) * size, n * steps + t - 1
                if done[t, n // group]:
                    clear(before, now, size)
                    continue
                for c in range(0, columns, lanes(before)):
                    written = mul(spread(beta, step), load(errors, step * columns + c))
                    for e in range(rows):
                        at = e * columns + c
                        store(before, now + at, fma(spread(k, step * rows + e), written, load(before, was + at)))
            for t in range(end - 1, first - 1, -1):
                step, w = n * steps + t, (t - first) * size
                seen, gain = zeros(beta), zeros(beta)
                for c in range(0, columns, lanes(beta)):
                    at = step * columns + c
                    d_read, error = load(d_out, at), load(errors, at)
                    d_change = zeros(beta)
                    for e in range(rows):
                        row = fma(spread(q, step * rows + e), d_read, load(d_state, g + e * columns + c))
                        store(d_state, g + e * columns + c, row)
                        d_change = fma(spread(k, step * rows + e), row, d_change)
                    gain = fma(d_change, error, gain)
                    error, d_change = mul(spread(beta, step), error), mul(spread(beta, step), d_change)
                    seen = fma(error, d_read, seen)
                    store(change, c, error)
                    store(d_v, at, d_change)
                    store(loss, c, sub(zeros(beta), d_change))
                d_beta[n, t] = total(gain)
                own = total(seen)  # q also read what this step wrote
                for e in range(rows):
                    for_q, for_k = zeros(beta), zeros(beta)
                    for c in range(0, columns, lanes(beta)):
                        old, row = load(before, w + e * columns + c), load(d_state, g + e * columns + c)
                        for_q = fma(old, load(d_out, step * columns + c), for_q)
                        for_k = fma(row, load(change, c), fma(old, load(loss, c), for_k))
                        store(d_state, g + e * columns + c, fma(spread(k, step * rows + e), load(loss, c), row))
                    d_q[n, t, e] = total(for_q) + k[n, t, e] * own
                    d_k[n, t, e] = total(for_k)
                if truncate or done[t, n // group]:
                    clear(d_state, g, size)


class Delta(torch.autograd.Function):
    """delta_seq on heads [N,T,...], the columns of v and state padded."""

    @staticmethod
    def forward(ctx: Any, q, k, v, beta, done, state, truncate, save):
        heads, steps, rows = k.shape
        columns = v.shape[2]
        out, state = torch.empty_like(v), state.clone()
        errors = v.new_empty((heads, steps, columns) if save else (0, 0, 0))
        saved = v.new_empty((heads, -(-steps // CHUNK), rows, columns) if save else (0, 0, 0, 0))
        delta_forward(*_arrays(q, k, v, beta, done, state, out, errors, saved))
        if save:
            ctx.save_for_backward(q, k, beta, done, errors, saved)
            ctx.truncate = truncate
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out, d_state):
        q, k, beta, done, errors, saved = ctx.saved_tensors
        d_out, d_state = d_out.contiguous(), d_state.clone(memory_format=torch.contiguous_format)
        d_q, d_k, d_v, d_beta = (torch.empty_like(x) for x in (q, k, d_out, beta))
        arrays = _arrays(q, k, beta, done, errors, saved, d_out, d_state)
        delta_backward(*arrays, ctx.truncate, *_arrays(d_q, d_k, d_v, d_beta))
        return d_q, d_k, d_v, d_beta, None, d_state, None, None


def delta_seq(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, done: Tensor, state: Tensor, truncate: bool = False
) -> tuple[Tensor, Tensor]:
    """As reference.delta_seq."""
    (batch, heads, steps, rows), columns = k.shape, v.shape[-1]
    save = _needs_backward(q, k, v, beta, state)
    out, last = Delta.apply(
        q.reshape(-1, steps, rows).contiguous(),
        k.reshape(-1, steps, rows).contiguous(),
        _wide(v.reshape(-1, steps, columns)),
        beta.reshape(-1, steps).contiguous(),
        done.contiguous(),
        _wide(state.reshape(-1, rows, columns)),
        truncate,
        save,
    )
    return (
        out[..., :columns].reshape(batch, heads, steps, columns),
        last[..., :columns].reshape(batch, heads, rows, columns),
    )


# --- the matrix that rewrites itself -------------------------------------------------------------------------------------
# Its four parts lie side by side, [Wy|Wq|Wk|Wb], each padded to whole Lanes: [E,D]. `edges` are the columns at which they
# begin, and D. What a step computes is a record [q|k|b|d], padded likewise: q, k [E], the four b, and d = (q - k) W [D].


@compiled
def softmax(scores, i, count, out, j):
    """Of `count` scores from i on, to out[j:]. The padding of `out` becomes zero."""
    padded = (count + lanes(out) - 1) // lanes(out) * lanes(out)
    for c in range(count, padded):
        scores[i + c] = -np.inf
    top = load(scores, i)
    for c in range(lanes(out), count, lanes(out)):
        top = maximum(top, load(scores, i + c))
    top = everywhere(greatest(top))
    sums = zeros(out)
    for c in range(0, count, lanes(out)):
        power = exponential(sub(load(scores, i + c), top))
        sums = add(sums, power)
        store(out, j + c, power)
    sums = everywhere(total(sums))
    for c in range(0, count, lanes(out)):
        store(out, j + c, div(load(out, j + c), sums))
    for c in range(count, padded):
        out[j + c] = 0


@compiled
def softmax_backward(shares, i, d_shares, count, out, j):
    """The scores' gradient, shares (d - shares · d), to out[j:]."""
    sums = zeros(out)
    for c in range(0, count, lanes(out)):
        sums = fma(load(shares, i + c), load(d_shares, c), sums)
    mean = everywhere(total(sums))
    for c in range(0, count, lanes(out)):
        store(out, j + c, mul(load(shares, i + c), sub(load(d_shares, c), mean)))


@compiled
def sigmoid(scores, i, out, j):
    """Of the Lanes of scores at i, to out[j:]."""
    store(out, j, div(ones(out), add(ones(out), exponential(sub(zeros(out), load(scores, i))))))


@compiled
def scale(row, i, b, j, edges, out):
    """A row [D] from i on, each part's columns times its own b, of which the first is b[j]."""
    for z in range(4):
        factor = spread(b, j + z)
        for c in range(edges[z], edges[z + 1], lanes(out)):
            store(out, c, mul(factor, load(row, i + c)))


@compiled
def srwm_forward(x, done, base, shift, edges, y, records, saved):
    """One pass through time of heads [N,T,...]. base [H,E,D] stays, shift [N,E,D] becomes the last. All but x, done: flat.

    `records` [N,T,R] are kept if `saved` is not empty, and are otherwise room for one.
    """
    heads, steps, rows = x.shape
    columns, padded, width = edges[4], edges[2] - edges[1], len(y) // (heads * steps)
    size, record = rows * columns, 2 * padded + lanes(x) + columns
    chunks = (steps + CHUNK - 1) // CHUNK
    group = heads // done.shape[1]  # heads of one batch entry, each with its own base
    weights = np.empty(size, x.dtype)
    scores, change, contrast = np.empty(columns, x.dtype), np.empty(columns, x.dtype), np.empty(padded, x.dtype)
    for n in range(heads):
        fixed, moved = n % group * size, n * size
        for c in range(0, size, lanes(x)):
            store(weights, c, add(load(base, fixed + c), load(shift, moved + c)))
        for t in range(steps):
            step = n * steps + t
            if done[t, n // group]:
                clear(shift, moved, size)
                copy(base, fixed, weights, 0, size)
            if t == 0 or done[t, n // group]:
                read(x, step * rows, weights, 0, rows, columns, scores, 0)
            if len(saved) and t % CHUNK == 0:
                copy(shift, moved, saved, (n * chunks + t // CHUNK) * size, size)
            q = step * record if len(saved) else 0  # where the record begins, and the others in it
            k, b, d = q + padded, q + 2 * padded, q + 2 * padded + lanes(x)
            for j in range(width):
                y[step * width + j] = scores[j]
            softmax(scores, edges[1], rows, records, q)
            softmax(scores, edges[2], rows, records, k)
            sigmoid(scores, edges[3], records, b)
            for c in range(0, padded, lanes(x)):
                store(contrast, c, sub(load(records, q + c), load(records, k + c)))
            read(contrast, 0, weights, 0, rows, columns, records, d)
            scale(records, d, records, b, edges, change)
            following = min(step + 1, n * steps + steps - 1) * rows
            for c in range(0, columns, lanes(x)):
                written, sums = load(change, c), zeros(x)
                for e in range(rows):
                    at = e * columns + c
                    row = fma(spread(records, k + e), written, load(shift, moved + at))
                    store(shift, moved + at, row)
                    row = add(load(base, fixed + at), row)
                    store(weights, at, row)
                    sums = fma(spread(x, following + e), row, sums)  # what the next step will read
                store(scores, c, sums)


@compiled
def srwm_backward(x, done, base, edges, records, saved, d_y, d_shift, arrived, truncate, d_x, d_base):
    """Back through time. All but x, done: flat. `d_shift` [N,E,D], the last shift's gradient, becomes the first one's.

    Fills d_x and adds to d_base [H,E,D]. `arrived`: the last shift has a gradient at all.
    """
    heads, steps, rows = x.shape
    columns, padded, width = edges[4], edges[2] - edges[1], len(d_y) // (heads * steps)
    size, record = rows * columns, 2 * padded + lanes(x) + columns
    chunks = (steps + CHUNK - 1) // CHUNK
    group = heads // done.shape[1]
    before = np.empty(CHUNK * size, x.dtype)  # base + shift before each step of a chunk
    shift = np.empty(size, x.dtype)
    change = np.empty(columns, x.dtype)  # b (q - k) W, what k wrote
    d_change, d_read = np.empty(columns, x.dtype), np.empty(columns, x.dtype)
    d_scores = np.zeros(columns, x.dtype)
    d_q, d_k, contrast = np.zeros(padded, x.dtype), np.zeros(padded, x.dtype), np.empty(padded, x.dtype)
    for n in range(heads):
        fixed, g = n % group * size, n * size
        # The base has the gradients of all that was read. They gather in d_shift too: there on top of what arrived from
        # later, so that up to the last reset, where something did, they are summed apart.
        apart = arrived
        read(records, (n * steps + steps - 1) * record + padded, d_shift, g, rows, columns, d_change, 0)
        for chunk in range(chunks - 1, -1, -1):
            first, end = chunk * CHUNK, min(chunk * CHUNK + CHUNK, steps)
            copy(saved, (n * chunks + chunk) * size, shift, 0, size)
            for c in range(0, size, lanes(x)):
                store(before, c, add(load(base, fixed + c), load(shift, c)))
            for t in range(first + 1, end):
                now, q = (t - first) * size, (n * steps + t - 1) * record
                k, b, d = q + padded, q + 2 * padded, q + 2 * padded + lanes(x)
                if done[t, n // group]:
                    clear(shift, 0, size)
                    copy(base, fixed, before, now, size)
                    continue
                scale(records, d, records, b, edges, change)
                for c in range(0, columns, lanes(x)):
                    written = load(change, c)
                    for e in range(rows):
                        at = e * columns + c
                        row = fma(spread(records, k + e), written, load(shift, at))
                        store(shift, at, row)
                        store(before, now + at, add(load(base, fixed + at), row))
            for t in range(end - 1, first - 1, -1):
                step, w = n * steps + t, (t - first) * size
                q = step * record
                k, b, d = q + padded, q + 2 * padded, q + 2 * padded + lanes(x)
                # the write: shift + k ⊗ change; d_change is k d_shift
                scale(records, d, records, b, edges, change)
                scale(d_change, 0, records, b, edges, d_read)
                apply(before, w, rows, columns, d_read, d_q, 0)
                apply(d_shift, g, rows, columns, change, d_k, 0)
                for c in range(0, padded, lanes(x)):
                    store(d_k, c, sub(load(d_k, c), load(d_q, c)))
                    store(contrast, c, sub(load(records, q + c), load(records, k + c)))
                # q, k and b, and what they were computed from
                for j in range(width):
                    d_scores[j] = d_y[step * width + j]
                softmax_backward(records, q, d_q, rows, d_scores, edges[1])
                softmax_backward(records, k, d_k, rows, d_scores, edges[2])
                for z in range(4):
                    sums = zeros(x)
                    for c in range(edges[z], edges[z + 1], lanes(x)):
                        sums = fma(load(d_change, c), load(records, d + c), sums)
                    opening = records[b + z]
                    d_scores[edges[3] + z] = total(sums) * opening * (1 - opening)
                apply(before, w, rows, columns, d_scores, d_x, step * rows)
                if apart:
                    for e in range(rows):
                        for c in range(0, columns, lanes(x)):
                            at = fixed + e * columns + c
                            row = fma(spread(x, step * rows + e), load(d_scores, c), load(d_base, at))
                            store(d_base, at, fma(spread(contrast, e), load(d_read, c), row))
                earlier = max(k - record, padded)  # the k of the step before
                for c in range(0, columns, lanes(x)):
                    score, reading, sums = load(d_scores, c), load(d_read, c), zeros(x)
                    for e in range(rows):
                        row = fma(spread(x, step * rows + e), score, load(d_shift, g + e * columns + c))
                        row = fma(spread(contrast, e), reading, row)
                        store(d_shift, g + e * columns + c, row)
                        sums = fma(spread(records, earlier + e), row, sums)
                    store(d_change, c, sums)
                if truncate or done[t, n // group]:
                    if not apart:
                        accumulate(d_base, fixed, d_shift, g, size)
                    clear(d_shift, g, size)
                    clear(d_change, 0, columns)
                    apart = False
        if not apart:
            accumulate(d_base, fixed, d_shift, g, size)


@compiled
def copy_columns(source, i, target, j, width):
    """Of rows [R,...], `width` columns from i on, to those of others from j on."""
    whole = width // lanes(target) * lanes(target)
    for r in range(len(source)):
        a, b = r * source.shape[1] + i, r * target.shape[1] + j
        for c in range(0, whole, lanes(target)):
            store(target, b + c, load(source, a + c))
        for c in range(whole, width):
            target[r, j + c] = source[r, i + c]


class SRWM(torch.autograd.Function):
    """srwm_seq on heads [N,T,...]: x, done, truncate, save, the four of base [H,E,...], the four of shift [N,E,...]."""

    @staticmethod
    def forward(ctx: Any, x, done, truncate, save, *parts):
        heads, steps, rows = x.shape
        base, shift, edges = _side_by_side(parts[:4]), _side_by_side(parts[4:]), _edges(parts[:4])
        record = edges[4] + 2 * (edges[2] - edges[1]) + LANE_BYTES // x.element_size()
        y = x.new_empty(heads, steps, parts[0].shape[-1])
        records = x.new_empty(heads * steps * record if save else record)
        saved = x.new_empty(heads * -(-steps // CHUNK) * rows * edges[4] if save else 0)
        arrays = _arrays(x, done, base.flatten(), shift.flatten())
        srwm_forward(*arrays, edges, *_arrays(y.flatten(), records, saved))
        if save:
            ctx.save_for_backward(x, done, base, records, saved)
            ctx.truncate, ctx.widths = truncate, [part.shape[-1] for part in parts[:4]]
            ctx.set_materialize_grads(False)
        return y, *_apart(shift, [part.shape[-1] for part in parts[:4]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y, *d_last):
        x, done, base, records, saved = ctx.saved_tensors
        (heads, steps, rows), widths = x.shape, ctx.widths
        arrived = any(d is not None for d in d_last)
        d_y = x.new_zeros(heads, steps, widths[0]) if d_y is None else d_y.contiguous()
        last = [x.new_zeros(heads, rows, width) if d is None else d for d, width in zip(d_last, widths, strict=True)]
        edges, d_shift, d_x, d_base = _edges(last), _side_by_side(last), torch.empty_like(x), torch.zeros_like(base)
        srwm_backward(
            *_arrays(x, done, base.flatten()),
            edges,
            *_arrays(records, saved, d_y.flatten(), d_shift.flatten()),
            arrived,
            ctx.truncate,
            *_arrays(d_x.flatten(), d_base.flatten()),
        )
        return d_x, None, None, None, *_apart(d_base, widths), *_apart(d_shift, widths)


def srwm_seq(
    x: Tensor, done: Tensor, base: tuple[Tensor, ...], shift: tuple[Tensor, ...], truncate: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """As reference.srwm_seq."""
    batch, heads, steps, rows = x.shape
    y, *last = SRWM.apply(
        x.reshape(-1, steps, rows).contiguous(),
        done.contiguous(),
        truncate,
        _needs_backward(x, *base, *shift),
        *base,
        *(part.flatten(0, 1) for part in shift),
    )
    return y.unflatten(0, (batch, heads)), tuple(part.unflatten(0, (batch, heads)) for part in last)


def _edges(parts: Sequence[Tensor]) -> tuple[int, ...]:
    """The columns at which parts [N,E,...] begin when they lie side by side, padded to whole Lanes; last, where they end."""
    lane = LANE_BYTES // parts[0].element_size()
    return tuple(accumulate_sizes((-(-part.shape[-1] // lane) * lane for part in parts), initial=0))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Four parts [N,E,...] as one new [N,E,D], the padding zero."""
    edges = _edges(parts)
    fused = parts[0].new_zeros(*parts[0].shape[:2], edges[4])
    for part, edge in zip(parts, edges, strict=False):
        copy_columns(*_arrays(part.flatten(0, 1).contiguous()), 0, *_arrays(fused.flatten(0, 1)), edge, part.shape[-1])
    return fused


def _apart(fused: Tensor, widths: list[int]) -> list[Tensor]:
    """The way back."""
    parts = [fused.new_empty(*fused.shape[:2], width) for width in widths]
    for part, edge in zip(parts, _edges(parts), strict=False):
        copy_columns(*_arrays(fused.flatten(0, 1)), edge, *_arrays(part.flatten(0, 1)), 0, part.shape[-1])
    return parts


def _wide(x: Tensor) -> Tensor:
    """Contiguous, the last axis padded with zeros to whole Lanes."""
    missing = -x.shape[-1] % (LANE_BYTES // x.element_size())
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _needs_backward(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().numpy() for tensor in tensors]
