"""SIMD vectors for code that Numba compiles, and functions that `numba_delta` and `numba_srwm` share.

The innermost loops of the kernels are short, for example 16 columns, and the compiler does not vectorise them well.
Therefore the kernels use explicit SIMD vectors of 64 bytes (`SimdVector`). A vector contains neighbouring columns of a
matrix row. The vector length is its number of elements: 16 for float32, 8 for float64. Rows are padded with zeros to a
multiple of the vector length.

Functions with the decorator `intrinsic` can be called only in compiled code. A call leaves out the first parameter
(`typing_context`), which Numba adds.
"""

import math
from typing import Any

import numba.extending
import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import models, register_model
from torch import Tensor

from bestiary.utils.numba_jit import cached_njit

VECTOR_BYTES = 64  # size of a SIMD vector: one cache line; it fills 1, 2 or 4 registers, depending on the CPU
CHUNK = 16  # number of steps in a chunk; the forward pass saves the state at the start of each chunk
ALLOW_FMA = ("contract",)  # LLVM flag: a product and a sum may become one multiply-add instruction

# Calls of an intrinsic leave out the first parameter. The type is Any, so that type checkers do not report this.
intrinsic: Any = numba.extending.intrinsic


# --- vector type ------------------------------------------------------------------------------------------------------


class SimdVector(types.Type):
    """Numba type of a SIMD vector of VECTOR_BYTES bytes, with float32 or float64 elements."""

    def __init__(self, dtype: types.Float):
        super().__init__(name=f"SimdVector({dtype})")
        self.dtype = dtype


@register_model(SimdVector)
class SimdVectorModel(models.PrimitiveModel):
    """Representation of a `SimdVector` as an LLVM vector."""

    def __init__(self, manager: Any, vector: SimdVector):
        element = ir.FloatType() if vector.dtype == types.float32 else ir.DoubleType()
        super().__init__(manager, vector, ir.VectorType(element, VECTOR_BYTES * 8 // vector.dtype.bitwidth))


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])


def _splat(builder: Any, vector_type: ir.VectorType, number: Any) -> Any:
    """Emit code for a SIMD vector whose elements all equal `number`."""
    first = builder.insert_element(ir.Constant(vector_type, ir.Undefined), number, ir.IntType(32)(0))
    indices = ir.Constant(ir.VectorType(ir.IntType(32), vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(first, first, indices)


def _constant(vector_type: ir.VectorType, number: Any) -> ir.Constant:
    return ir.Constant(vector_type, [number] * vector_type.count)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit code for a * b + c."""
    return builder.fadd(builder.fmul(a, b, flags=ALLOW_FMA), c, flags=ALLOW_FMA)


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """Emit code for the elementwise maximum of two SIMD vectors."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, vector: Any, combine: Any) -> Any:
    """Emit code that reduces a SIMD vector to one number, for example to the sum of its elements.

    The code combines the two halves of the vector, then the two halves of the result, and so on. `combine(a, b)` emits
    the code that combines two vectors element by element.
    """
    count = vector.type.count
    while count > 1:
        count //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), count), list(indices)))
            for indices in (range(count), range(count, 2 * count))
        ]
        vector = combine(*halves)
    return builder.extract_element(vector, ir.IntType(32)(0))


# --- operations on vectors --------------------------------------------------------------------------------------------


@intrinsic
def vector_length(typing_context, array):
    """Return the SIMD vector length for the type of `array`: the number of elements of this type in one vector."""

    def build(context, builder, signature, arguments):
        return context.get_constant(types.intp, VECTOR_BYTES * 8 // signature.args[0].dtype.bitwidth)

    return types.intp(array), build


@intrinsic
def load(typing_context, array, i):
    """Return a SIMD vector of the elements i, i + 1, ... of a contiguous array, counted in memory order."""

    def build(context, builder, signature, arguments):
        vector_type = context.get_value_type(signature.return_type)
        address = _element_pointer(context, builder, signature.args[0], *arguments)
        address = builder.bitcast(address, vector_type.as_pointer())
        return builder.load(address, align=signature.args[0].dtype.bitwidth // 8)

    return SimdVector(array.dtype)(array, types.intp), build


@intrinsic
def store(typing_context, array, i, vector):
    """Write a SIMD vector to the elements i, i + 1, ... of a contiguous array, counted in memory order."""

    def build(context, builder, signature, arguments):
        address = _element_pointer(context, builder, signature.args[0], *arguments[:2])
        address = builder.bitcast(address, arguments[2].type.as_pointer())
        builder.store(arguments[2], address, align=signature.args[0].dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, vector), build


@intrinsic
def broadcast(typing_context, array, i):
    """Return a SIMD vector whose elements all equal element i of a contiguous array, counted in memory order."""

    def build(context, builder, signature, arguments):
        number = builder.load(_element_pointer(context, builder, signature.args[0], *arguments))
        return _splat(builder, context.get_value_type(signature.return_type), number)

    return SimdVector(array.dtype)(array, types.intp), build


@intrinsic
def splat(typing_context, number):
    """Return a SIMD vector whose elements all equal `number`."""

    def build(context, builder, signature, arguments):
        return _splat(builder, context.get_value_type(signature.return_type), arguments[0])

    return SimdVector(number)(number), build


def _constant_vector(number: float) -> Any:
    @intrinsic
    def constant(typing_context, array):
        def build(context, builder, signature, arguments):
            return _constant(context.get_value_type(signature.return_type), number)

        return SimdVector(array.dtype)(array), build

    return constant


# zeros(array) and ones(array) return a SIMD vector of zeros or ones, which has the element type of the array.
zeros = _constant_vector(0.0)
ones = _constant_vector(1.0)


@intrinsic
def fma(typing_context, a, b, c):
    """Return a * b + c for three SIMD vectors, element by element."""

    def build(context, builder, signature, arguments):
        return _multiply_add(builder, *arguments)

    return c(a, b, c), build


def _elementwise(name: str) -> Any:
    @intrinsic
    def operation(typing_context, a, b):
        def build(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments, flags=ALLOW_FMA)

        return a(a, b), build

    return operation


add, sub, mul, div = (_elementwise(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def maximum(typing_context, a, b):
    """Return the elementwise maximum of two SIMD vectors."""

    def build(context, builder, signature, arguments):
        return _larger(builder, *arguments)

    return a(a, b), build


@intrinsic
def horizontal_sum(typing_context, vector):
    """Return the sum of all elements of a SIMD vector."""

    def build(context, builder, signature, arguments):
        return _reduce(builder, arguments[0], builder.fadd)

    return vector.dtype(vector), build


@intrinsic
def horizontal_max(typing_context, vector):
    """Return the largest element of a SIMD vector."""

    def build(context, builder, signature, arguments):
        return _reduce(builder, arguments[0], lambda a, b: _larger(builder, a, b))

    return vector.dtype(vector), build


@intrinsic
def exp(typing_context, vector):
    """Return e^x for each element x of a SIMD vector.

    First, x is clamped to avoid overflow: to [-87, 87] for float32, to [-708, 708] for float64. Then e^x is computed as
    2^n e^r with an integer n and |r| <= ln(2)/2. e^r is computed by a Taylor polynomial. 2^n is the floating-point
    number whose exponent bits encode n. If x is NaN, the result is NaN.
    """
    single = vector.dtype == types.float32
    bits, mantissa, degree, limit = (32, 23, 7, 87.0) if single else (64, 52, 13, 708.0)

    def build(context, builder, signature, arguments):
        x = arguments[0]
        vector_type = x.type
        integers = ir.VectorType(ir.IntType(bits), vector_type.count)

        def constant(number):
            return _constant(vector_type, number)

        for sign, end in (("<", -limit), (">", limit)):
            x = builder.select(builder.fcmp_ordered(sign, x, constant(end)), constant(end), x)
        # Adding this constant rounds x / ln(2) to the integer n and leaves n in the lowest bits of the mantissa.
        rounding = constant(1.5 * 2.0**mantissa)
        shifted = _multiply_add(builder, x, constant(1 / math.log(2)), rounding)
        n = builder.fsub(shifted, rounding)
        # Compute r = x - n ln(2). ln(2) is split into two numbers: a rounded value with few bits, whose product with n
        # is exact, and the small rest.
        r = _multiply_add(builder, n, constant(-0.693145751953125), x)
        r = _multiply_add(builder, n, constant(-1.428606820309417232e-06), r)
        series = constant(1 / math.factorial(degree))
        for i in reversed(range(degree)):
            series = _multiply_add(builder, series, r, constant(1 / math.factorial(i)))
        exponent = builder.shl(builder.bitcast(shifted, integers), _constant(integers, mantissa))
        bits_of_one = (2 ** (bits - mantissa - 2) - 1) << mantissa
        power = builder.bitcast(builder.add(exponent, _constant(integers, bits_of_one)), vector_type)
        return builder.fmul(series, power)

    return vector(vector), build


# --- operations on arrays ---------------------------------------------------------------------------------------------
# A matrix is given by a contiguous array and the offset of its first element in this array. It is stored row by row.
# The arguments `columns` and `count` must be multiples of the SIMD vector length.


@cached_njit
def vector_matrix_product(row, i, matrix, j, rows, columns, out, o):
    """Write the product of a row vector [rows] and a matrix [rows,columns] to out[o:].

    The row vector starts at row[i], the matrix starts at matrix[j]. `columns` is a multiple of the SIMD vector length.
    """
    for c in range(0, columns, vector_length(out)):
        sums = zeros(out)
        for e in range(rows):
            sums = fma(broadcast(row, i + e), load(matrix, j + e * columns + c), sums)
        store(out, o + c, sums)


@cached_njit
def matrix_vector_product(matrix, j, rows, columns, row, out, o):
    """Write the product of a matrix [rows,columns] and a vector `row` [columns] to out[o:].

    The matrix starts at matrix[j]. `columns` is a multiple of the SIMD vector length.
    """
    for e in range(0, rows - 3, 4):
        a, b, c, d = zeros(out), zeros(out), zeros(out), zeros(out)
        for i in range(0, columns, vector_length(out)):
            at, factor = j + e * columns + i, load(row, i)
            a = fma(load(matrix, at), factor, a)
            b = fma(load(matrix, at + columns), factor, b)
            c = fma(load(matrix, at + 2 * columns), factor, c)
            d = fma(load(matrix, at + 3 * columns), factor, d)
        out[o + e] = horizontal_sum(a)
        out[o + e + 1] = horizontal_sum(b)
        out[o + e + 2] = horizontal_sum(c)
        out[o + e + 3] = horizontal_sum(d)
    for e in range(rows // 4 * 4, rows):
        sums = zeros(out)
        for i in range(0, columns, vector_length(out)):
            sums = fma(load(matrix, j + e * columns + i), load(row, i), sums)
        out[o + e] = horizontal_sum(sums)


@cached_njit
def copy(source, i, target, j, count):
    """Copy the first `count` elements of source[i:] to target[j:]. `count` is a multiple of the SIMD vector length."""
    for c in range(0, count, vector_length(target)):
        store(target, j + c, load(source, i + c))


@cached_njit
def fill_zero(array, i, count):
    """Set the first `count` elements of array[i:] to zero. `count` is a multiple of the SIMD vector length."""
    for c in range(0, count, vector_length(array)):
        store(array, i + c, zeros(array))


@cached_njit
def scale(array, i, count, factors, j):
    """Multiply the first `count` elements of array[i:] by factors[j]. `count` is a multiple of the SIMD vector length.

    `factors` is a contiguous array; its elements are counted in memory order.
    """
    factor = broadcast(factors, j)
    for c in range(0, count, vector_length(array)):
        store(array, i + c, mul(factor, load(array, i + c)))


@cached_njit
def dot(a, i, b, j, count):
    """Return the sum of the products of the first `count` elements of a[i:] and b[j:].

    `count` is a multiple of the SIMD vector length.
    """
    sums = zeros(a)
    for c in range(0, count, vector_length(a)):
        sums = fma(load(a, i + c), load(b, j + c), sums)
    return horizontal_sum(sums)


@cached_njit
def add_to(target, i, source, j, count):
    """Add the first `count` elements of source[j:] to target[i:]. `count` is a multiple of the SIMD vector length."""
    for c in range(0, count, vector_length(target)):
        store(target, i + c, add(load(target, i + c), load(source, j + c)))


# --- tensors ----------------------------------------------------------------------------------------------------------


def pad_columns(x: Tensor) -> Tensor:
    """Return x as a contiguous tensor whose last axis is padded with zeros to a multiple of the SIMD vector length."""
    missing = -x.shape[-1] % (VECTOR_BYTES // x.element_size())
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def needs_backward(*inputs: Tensor) -> bool:
    """Return True if autograd needs the gradient of at least one of the inputs."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def as_arrays(*tensors: Tensor) -> list[np.ndarray]:
    """Return NumPy arrays that share the memory of the tensors."""
    return [tensor.detach().numpy() for tensor in tensors]
