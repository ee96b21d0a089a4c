"""Vectors of 16 lanes as values of Numba code: loads, stores, arithmetic, exp2 and tanh.

Numba's extension API lets a type's data model be any LLVM type; here it is `<16 x float>`, one AVX-512 register, which
LLVM splits into two or four registers where the CPU's are narrower. No fast-math flag is set anywhere: every function
is exactly the IEEE operations written here, in this order, so one row's result cannot depend on what it was computed
together with.

Pointers are Numba's `CPointer`: to float32, or to uint16 for bfloat16 bits. Indices count elements. Knows nothing about
attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import models, overload, register_model

LANES = 16

_F32 = ir.FloatType()
_I1 = ir.IntType(1)
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
F32_LANES = ir.VectorType(_F32, LANES)
I32_LANES = ir.VectorType(_I32, LANES)
I16_LANES = ir.VectorType(_I16, LANES)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's decorator, typed as compiled code sees the result: without the typing context that the source takes."""
    result: Callable[..., Any] = numba_intrinsic(function)
    return result


def literal_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with literal arguments kept literal."""
    result: Callable[..., Any] = numba_intrinsic(prefer_literal=True)(function)
    return result


def pointer_type(element: types.Type) -> types.Type:
    """The type of pointers to `element`."""
    return types.CPointer(element)


F32_POINTER = pointer_type(types.float32)
BF16_POINTER = pointer_type(types.uint16)
"""Points to bfloat16 elements, whose bits are handled as uint16."""

NEG_INF = np.float32(-np.inf)
LOG2E = np.float32(1.4426950408889634)


class Lanes(types.Type):
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Lanes) -> None:
        super().__init__(manager, fe_type, F32_LANES)


def splat_value(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    """The scalar in every lane."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    """The constant in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def load_value(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, vector: ir.VectorType) -> ir.Value:
    """Load a vector at an element index; needs no more than the element's own alignment."""
    address = builder.gep(pointer, [index])
    value = builder.load(builder.bitcast(address, vector.as_pointer()))
    value.align = 2 if vector.element == _I16 else 4
    return value


def store_value(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, index: ir.Value) -> None:
    """Store a vector at an element index."""
    address = builder.gep(pointer, [index])
    done = builder.store(value, builder.bitcast(address, value.type.as_pointer()))
    done.align = 2 if value.type.element == _I16 else 4


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def fma_value(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", F32_LANES, [a, b, c])


def round_bf16_value(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Lanes rounded to bfloat16 (nearest, ties to even), as uint32 with the bfloat16 in the upper half."""
    bits = builder.bitcast(value, I32_LANES)
    even = builder.and_(builder.lshr(bits, constant(I32_LANES, 16)), constant(I32_LANES, 1))
    rounded = builder.add(builder.add(bits, constant(I32_LANES, 0x7FFF)), even)
    return builder.and_(rounded, constant(I32_LANES, -0x10000))


# --- loads, stores, addresses ---------------------------------------------------------------------------------------


@literal_intrinsic
def pointer_to(typing: Any, address: Any, bf16: Any) -> Any:
    """The bfloat16 (if the literal `bf16` is true) or float32 pointer with this address."""
    kind, element = (BF16_POINTER, _I16) if bf16.literal_value else (F32_POINTER, _F32)
    return kind(types.int64, bf16), lambda ctx, b, sig, args: b.inttoptr(args[0], element.as_pointer())


@intrinsic
def pointer_i32(typing: Any, address: Any) -> Any:
    """The int32 pointer with this address."""
    return pointer_type(types.int32)(types.int64), lambda ctx, b, sig, args: b.inttoptr(args[0], _I32.as_pointer())


@intrinsic
def pointer_i64(typing: Any, address: Any) -> Any:
    """The int64 pointer with this address."""
    kind = ir.IntType(64).as_pointer()
    return pointer_type(types.int64)(types.int64), lambda ctx, b, sig, args: b.inttoptr(args[0], kind)


@intrinsic
def advance(typing: Any, pointer: Any, count: Any) -> Any:
    """The pointer moved on by `count` elements."""
    return pointer(pointer, types.int64), lambda ctx, b, sig, args: b.gep(args[0], [args[1]])


@intrinsic
def take_ticket(typing: Any, counter: Any) -> Any:
    """The counter's value before it is raised by one, atomically: which piece of work is mine."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return b.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(pointer_type(types.int64)), generate


@intrinsic
def prefetch_pair(typing: Any, pointer: Any, index: Any) -> Any:
    """Ask for the cache lines of 32 consecutive elements; any address is allowed."""
    lines = 2 if pointer == F32_POINTER else 1

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        hints = [ir.Constant(_I32, hint) for hint in (0, 3, 1)]  # read, keep in all caches, data
        for line in range(lines):
            place = b.add(args[1], ir.Constant(ir.IntType(64), line * LANES))
            address = b.bitcast(b.gep(args[0], [place]), _I8.as_pointer())
            call_llvm(b, "llvm.prefetch.p0", ir.VoidType(), [address, *hints])
        return ctx.get_dummy_value()

    return types.void(pointer, types.int64), generate


@intrinsic
def load(typing: Any, pointer: Any, index: Any) -> Any:
    """16 consecutive elements as float32; bfloat16 elements are widened, which is exact."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if sig.args[0] == F32_POINTER:
            return load_value(b, args[0], args[1], F32_LANES)
        wide = b.zext(load_value(b, args[0], args[1], I16_LANES), I32_LANES)
        return b.bitcast(b.shl(wide, constant(I32_LANES, 16)), F32_LANES)

    return lanes(pointer, types.int64), generate


@intrinsic
def store(typing: Any, pointer: Any, index: Any, value: Any) -> Any:
    """Store 16 consecutive elements; for bfloat16 rounded to nearest, ties to even."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value = args[2]
        if sig.args[0] != F32_POINTER:
            upper = b.lshr(round_bf16_value(b, value), constant(I32_LANES, 16))
            value = b.trunc(upper, I16_LANES)
        store_value(b, value, args[0], args[1])
        return ctx.get_dummy_value()

    return types.void(pointer, types.int64, lanes), generate


# --- arithmetic -----------------------------------------------------------------------------------------------------


@intrinsic
def splat(typing: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    return lanes(types.float32), lambda ctx, b, sig, args: splat_value(b, args[0], F32_LANES)


@intrinsic
def fma(typing: Any, a: Any, x: Any, y: Any) -> Any:
    """a * x + y, rounded once."""
    return lanes(lanes, lanes, lanes), lambda ctx, b, sig, args: fma_value(b, *args)


@intrinsic
def maximum(typing: Any, x: Any, y: Any) -> Any:
    """Lane by lane x where x > y, else y: the maximum of numbers, in one instruction."""
    return lanes(lanes, lanes), lambda ctx, b, sig, args: b.select(b.fcmp_ordered(">", *args), *args)


@intrinsic
def minimum(typing: Any, x: Any, y: Any) -> Any:
    """Lane by lane x where x < y, else y."""
    return lanes(lanes, lanes), lambda ctx, b, sig, args: b.select(b.fcmp_ordered("<", *args), *args)


@intrinsic
def finite_shift(typing: Any, x: Any) -> Any:
    """-x where x > -inf, else 0: what to add to scores whose maximum is x."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        empty = b.fcmp_ordered("==", args[0], constant(F32_LANES, float("-inf")))
        return b.select(empty, constant(F32_LANES, 0.0), b.fsub(constant(F32_LANES, 0.0), args[0]))

    return lanes(lanes), generate


@intrinsic
def keep_lanes(typing: Any, x: Any, first: Any, end: Any) -> Any:
    """Lanes first <= lane < end as they are, all others -inf, whatever they held."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        number = ir.Constant(I32_LANES, list(range(LANES)))
        first = splat_value(b, b.trunc(args[1], _I32), I32_LANES)
        end = splat_value(b, b.trunc(args[2], _I32), I32_LANES)
        inside = b.and_(b.icmp_signed(">=", number, first), b.icmp_signed("<", number, end))
        return b.select(inside, args[0], constant(F32_LANES, float("-inf")))

    return lanes(lanes, types.int64, types.int64), generate


def _operator(python: Callable[[Any, Any], Any], generate: Callable[[ir.IRBuilder, ir.Value, ir.Value], Any]) -> None:
    """Teach Numba one infix operator on two vectors."""

    @intrinsic
    def lane_by_lane(typing: Any, x: Any, y: Any) -> Any:
        return lanes(lanes, lanes), lambda ctx, b, sig, args: generate(b, args[0], args[1])

    @overload(python)
    def implementation(x: Any, y: Any) -> Any:
        if not (isinstance(x, Lanes) and isinstance(y, Lanes)):
            return None

        def apply(x: Any, y: Any) -> Any:
            return lane_by_lane(x, y)

        return apply


_operator(operator.add, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, lambda b, x, y: b.fdiv(x, y))


def _reduction(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Callable[..., Any]:
    """An intrinsic that folds the 16 lanes in halves: 8, 4, 2, 1."""

    @intrinsic
    def fold(typing: Any, x: Any) -> Any:
        def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
            value = args[0]
            for half in (8, 4, 2, 1):
                order = [lane if lane >= half else lane + half for lane in range(LANES)]
                other = b.shuffle_vector(value, value, ir.Constant(I32_LANES, order))
                value = combine(b, value, other)
            return b.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(lanes), generate

    return fold


largest_lane = _reduction(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
sum_lanes = _reduction(lambda b, x, y: b.fadd(x, y))


@intrinsic
def first_lane(typing: Any, x: Any) -> Any:
    """Lane 0."""
    return types.float32(lanes), lambda ctx, b, sig, args: b.extract_element(args[0], ir.Constant(_I32, 0))


_ROUND_TO_INT = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits of the mantissa


@intrinsic
def _scale_by_power(typing: Any, x: Any, shifted: Any) -> Any:
    """x * 2**n, where `shifted` is n + 1.5 * 2**23; the result must be a normal number."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        exponent = b.shl(b.bitcast(args[1], I32_LANES), constant(I32_LANES, 23))
        return b.bitcast(b.add(b.bitcast(args[0], I32_LANES), exponent), F32_LANES)

    return lanes(lanes, lanes), generate


@intrinsic
def _zero_below(typing: Any, x: Any, test: Any) -> Any:
    """x where test >= -125, else 0 (x where test is NaN)."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        small = b.fcmp_ordered("<", args[1], constant(F32_LANES, -125.0))
        return b.select(small, constant(F32_LANES, 0.0), args[0])

    return lanes(lanes, lanes), generate


@njit(error_model="numpy", forceinline=True)
def exp2(x: Any) -> Any:
    """2**x for x <= 126 within 2e-7 (relative); exactly 1 at 0, exactly 0 below -125 (and at -inf).

    x = n + f with n the nearest integer; 2**f is the minimax polynomial of degree 5 on |f| <= 1/2 that is 1 at 0.
    """
    shifted = x + splat(np.float32(_ROUND_TO_INT))
    f = x - (shifted - splat(np.float32(_ROUND_TO_INT)))
    y = fma(splat(np.float32(1.326472725e-3)), f, splat(np.float32(9.671512688e-3)))
    y = fma(y, f, splat(np.float32(5.550733744e-2)))
    y = fma(y, f, splat(np.float32(2.402224208e-1)))
    y = fma(y, f, splat(np.float32(6.931469776e-1)))
    y = fma(y, f, splat(np.float32(1.0)))
    return _zero_below(_scale_by_power(y, shifted), x)


@njit(error_model="numpy", forceinline=True)
def exp2_scalar(x: Any) -> Any:
    """The same function, bit for bit, of one number."""
    return first_lane(exp2(splat(x)))


@njit(error_model="numpy", forceinline=True)
def tanh(x: Any) -> Any:
    """Hyperbolic tangent within 1.2e-7 (absolute), as 1 - 2 / (exp(2x) + 1)."""
    twice = minimum(maximum(x + x, splat(np.float32(-40.0))), splat(np.float32(40.0)))
    one = splat(np.float32(1.0))
    return one - splat(np.float32(2.0)) / (exp2(twice * splat(LOG2E)) + one)
