"""The multiply-accumulate at the heart of the kernel: a block of rows x 32 float32 accumulators held in registers.

Both products of attention are the same step. With A the queries and B the keys of 16 tokens, or with A the weights and
B the values of 16 elements, it is

    block[row, lane] += A[row, 2k + 1] * B[2k + 1, lane]      then
    block[row, lane] += A[row, 2k]     * B[2k, lane]

for one pair index k. B holds a pair as 32 consecutive elements: bfloat16 interleaved (lane 0 of 2k, lane 0 of 2k + 1,
lane 1 of 2k, ...), which is what the dot-product instruction reads; float32 as 16 lanes of 2k, then 16 of 2k + 1.

Why the instruction and its emulation agree: VDPBF16PS adds the odd product first, then the even one, each as an FMA
rounded to nearest even (Intel SDM, "VDPBF16PS", Operation), and the emulation does those two FMAs in that order. A
product of two bfloat16 has at most 16 significant bits, so it is exact in float32 and only the additions round. What is
left: the instruction takes denormal inputs as zero and flushes denormal results, so where numbers below 1.2e-38 meet,
the two differ by less than that for each product.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import models, register_model

from pagedkv.attention.cpu.vectors import (
    BF16_POINTER,
    F32_LANES,
    F32_POINTER,
    I32_LANES,
    LANES,
    call_llvm,
    constant,
    fma_value,
    intrinsic,
    lanes,
    literal_intrinsic,
    load_value,
    round_bf16_value,
    splat_value,
    store_value,
)

_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_UPPER_HALF = -0x10000


def _target_assembly(body: str) -> str:
    """Assembly of a snippet of LLVM IR for the CPU that Numba compiles for."""
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=2)
    module = llvm.parse_assembly(body)
    module.triple = target.triple
    return str(machine.emit_assembly(module))


def has_bf16_dot() -> bool:
    """Whether the CPU that Numba compiles for has AVX512-BF16.

    Asked of LLVM itself, by compiling a conversion for which it has a slower way on other CPUs, so that CPU names,
    feature lists and NUMBA_CPU_NAME / NUMBA_CPU_FEATURES all count as Numba counts them.
    """
    body = (
        "define <16 x bfloat> @f(<16 x float> %x) {\n"
        "  %y = fptrunc <16 x float> %x to <16 x bfloat>\n  ret <16 x bfloat> %y\n}"
    )
    assembly = _target_assembly(body)
    return "vcvtneps2bf16" in assembly and "zmm" in assembly


def has_wide_registers() -> bool:
    """Whether the CPU that Numba compiles for holds 16 float32 in one register."""
    body = "define <16 x float> @f(<16 x float> %x) {\n  %y = fadd <16 x float> %x, %x\n  ret <16 x float> %y\n}"
    return "zmm" in _target_assembly(body)


BF16_DOT = has_bf16_dot()
"""Whether bfloat16 products use the dot-product instruction."""

MANY_ROWS = 8 if has_wide_registers() else 2
"""Rows of a block where there are many: as many accumulators as leave registers for the operands."""

FEW_ROWS = 4 if has_wide_registers() else 2
"""Rows of a block where there are few; rows are padded to a multiple of it."""


class Pair(types.Type):
    """The lanes of elements 2k and 2k + 1 of B."""

    def __init__(self, element: str) -> None:
        self.bf16 = element == "bf16"
        super().__init__(name=f"pair_{element}")


bf16_pair = Pair("bf16")
f32_pair = Pair("f32")


@register_model(Pair)
class _PairModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Pair) -> None:
        super().__init__(manager, fe_type, I32_LANES if fe_type.bf16 else ir.ArrayType(F32_LANES, 2))


class Block(types.Type):
    """rows x columns vectors of 16 float32 accumulators."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        super().__init__(name=f"block_{rows}x{columns}")


@register_model(Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Block) -> None:
        super().__init__(manager, fe_type, ir.ArrayType(F32_LANES, fe_type.rows * fe_type.columns))


def _add(b: ir.IRBuilder, base: ir.Value, offset: int) -> ir.Value:
    return b.add(base, ir.Constant(_I64, offset))


def _row_start(b: ir.IRBuilder, base: ir.Value, stride: ir.Value, row: int) -> ir.Value:
    return b.add(base, b.mul(stride, ir.Constant(_I64, row)))


@literal_intrinsic
def block_zeros(typing: Any, rows: Any, columns: Any) -> Any:
    """A block of zeros; both sizes are literals."""
    block = Block(rows.literal_value, columns.literal_value)

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        zeros = constant(F32_LANES, 0.0)
        return ir.Constant(ir.ArrayType(F32_LANES, block.rows * block.columns), [zeros] * (block.rows * block.columns))

    return block(rows, columns), generate


@literal_intrinsic
def block_load(
    typing: Any, rows: Any, columns: Any, pointer: Any, base: Any, stride: Any, factors: Any, first: Any
) -> Any:
    """Rows base, base + stride, ... of a float32 matrix, each times factors[first + row]."""
    block = Block(rows.literal_value, columns.literal_value)

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _, _, pointer, base, stride, factors, first = args
        value = ir.Constant(ir.ArrayType(F32_LANES, block.rows * block.columns), ir.Undefined)
        for row in range(block.rows):
            factor = splat_value(b, b.load(b.gep(factors, [_add(b, first, row)])), F32_LANES)
            start = _row_start(b, base, stride, row)
            for column in range(block.columns):
                loaded = load_value(b, pointer, _add(b, start, column * LANES), F32_LANES)
                value = b.insert_value(value, b.fmul(loaded, factor), row * block.columns + column)
        return value

    arguments = (rows, columns, F32_POINTER, types.int64, types.int64, F32_POINTER, types.int64)
    return block(*arguments), generate


@intrinsic
def block_store(typing: Any, value: Any, pointer: Any, base: Any, stride: Any) -> Any:
    """Store the block's rows at base, base + stride, ... of a float32 matrix."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        block = sig.args[0]
        for row in range(block.rows):
            start = _row_start(b, args[2], args[3], row)
            for column in range(block.columns):
                vector = b.extract_value(args[0], row * block.columns + column)
                store_value(b, vector, args[1], _add(b, start, column * LANES))
        return ctx.get_dummy_value()

    return types.void(value, F32_POINTER, types.int64, types.int64), generate


def _pair_value(b: ir.IRBuilder, pointer: ir.Value, index: ir.Value, bf16: bool) -> ir.Value:
    if bf16:
        return b.bitcast(load_value(b, pointer, index, ir.VectorType(_I16, 2 * LANES)), I32_LANES)
    value = ir.Constant(ir.ArrayType(F32_LANES, 2), ir.Undefined)
    for half in range(2):
        loaded = load_value(b, pointer, _add(b, index, half * LANES), F32_LANES)
        value = b.insert_value(value, loaded, half)
    return value


def _pair_type(pointer: types.Type) -> Pair:
    return bf16_pair if pointer == BF16_POINTER else f32_pair


@intrinsic
def load_pair(typing: Any, pointer: Any, index: Any) -> Any:
    """The pair of 32 consecutive elements at `index`."""
    bf16 = pointer == BF16_POINTER

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if bf16:
            return b.bitcast(load_value(b, args[0], args[1], ir.VectorType(_I16, 2 * LANES)), I32_LANES)
        value = ir.Constant(ir.ArrayType(F32_LANES, 2), ir.Undefined)
        for half in range(2):
            loaded = load_value(b, args[0], _add(b, args[1], half * LANES), F32_LANES)
            value = b.insert_value(value, loaded, half)
        return value

    return (bf16_pair if bf16 else f32_pair)(pointer, types.int64), generate


@intrinsic
def keep_half(typing: Any, pair: Any, odd: Any) -> Any:
    """The pair with only element 2k + 1 (if `odd`) or 2k left; the other is zero, whatever it held."""

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        pair, odd = args
        if sig.args[0].bf16:
            half = b.select(odd, ir.Constant(_I32, _UPPER_HALF), ir.Constant(_I32, 0xFFFF))
            return b.and_(pair, splat_value(b, half, I32_LANES))
        zeros = constant(F32_LANES, 0.0)
        even_half = b.select(odd, zeros, b.extract_value(pair, 0))
        odd_half = b.select(odd, b.extract_value(pair, 1), zeros)
        return b.insert_value(b.insert_value(pair, even_half, 0), odd_half, 1)

    return pair(pair, types.boolean), generate


def _halves(b: ir.IRBuilder, pair: Pair, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The float32 lanes of elements 2k and 2k + 1."""
    if not pair.bf16:
        return b.extract_value(value, 0), b.extract_value(value, 1)
    even = b.shl(value, constant(I32_LANES, 16))
    odd = b.and_(value, constant(I32_LANES, _UPPER_HALF))
    return b.bitcast(even, F32_LANES), b.bitcast(odd, F32_LANES)


@intrinsic
def block_dot(typing: Any, value: Any, pairs: Any, operand: Any, base: Any, stride: Any, k: Any) -> Any:
    """The step of the module's docstring: one pair index k, all rows, one pair of B for each column of the block.

    `operand` is A as `store_operand` left it, row r at base + r * stride.
    """

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        block, kind = sig.args[0], sig.args[1].dtype
        value, pairs, operand, base, stride, k = args
        starts = [_row_start(b, base, stride, row) for row in range(block.rows)]
        columns = [b.extract_value(pairs, column) for column in range(block.columns)]
        if kind.bf16 and BF16_DOT:
            for row, start in enumerate(starts):
                word = b.load(b.bitcast(b.gep(operand, [b.add(start, k)]), _I32.as_pointer()))
                word = splat_value(b, word, I32_LANES)
                for column, pair in enumerate(columns):
                    place = row * block.columns + column
                    arguments = [b.extract_value(value, place), word, pair]
                    total = call_llvm(b, "llvm.x86.avx512bf16.dpbf16ps.512", F32_LANES, arguments)
                    value = b.insert_value(value, total, place)
            return value
        halves = [_halves(b, kind, pair) for pair in columns]
        twice = b.shl(k, ir.Constant(_I64, 1))
        for half in (1, 0):
            for row, start in enumerate(starts):
                factor = b.load(b.gep(operand, [_add(b, b.add(start, twice), half)]))
                factor = splat_value(b, factor, F32_LANES)
                for column in range(block.columns):
                    place = row * block.columns + column
                    total = fma_value(b, factor, halves[column][half], b.extract_value(value, place))
                    value = b.insert_value(value, total, place)
        return value

    return value(value, pairs, F32_POINTER, types.int64, types.int64, types.int64), generate


@intrinsic
def store_operand(typing: Any, pointer: Any, base: Any, k: Any, value: Any, other: Any) -> Any:
    """Store elements k ... k + 15 of a row of A, as `block_dot` wants them beside B of `other`'s element type.

    float32 as they are. bfloat16, to which the lanes must have been rounded: packed two to a 32-bit word for the
    instruction, else still as float32, so that the emulation need not unpack them. k is a multiple of 16.
    """
    packed = other == BF16_POINTER and BF16_DOT

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        pointer, base, k, value, _ = args
        if packed:
            k = b.lshr(k, ir.Constant(_I64, 1))
            upper = b.lshr(b.bitcast(value, I32_LANES), constant(I32_LANES, 16))
            value = b.bitcast(b.trunc(upper, ir.VectorType(_I16, LANES)), ir.VectorType(_F32, LANES // 2))
        store_value(b, value, pointer, b.add(base, k))
        return ctx.get_dummy_value()

    return types.void(F32_POINTER, types.int64, types.int64, lanes, other), generate


@intrinsic
def round_operand(typing: Any, value: Any, other: Any) -> Any:
    """Rounded to `other`'s element type, to nearest, ties to even."""
    bf16 = other == BF16_POINTER

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return b.bitcast(round_bf16_value(b, args[0]), F32_LANES) if bf16 else args[0]

    return lanes(lanes, other), generate


@intrinsic
def round_weight(typing: Any, value: Any, other: Any) -> Any:
    """Rounded to `other`'s element type, to nearest, ties away from zero: as near, in fewer instructions."""
    bf16 = other == BF16_POINTER

    def generate(ctx: Any, b: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if not bf16:
            return args[0]
        half = b.add(b.bitcast(args[0], I32_LANES), constant(I32_LANES, 0x8000))
        return b.bitcast(b.and_(half, constant(I32_LANES, _UPPER_HALF)), F32_LANES)

    return lanes(lanes, other), generate
