"""The vector values by themselves: each function on plain arrays, through a small compiled wrapper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from pagedkv.attention.cpu import vectors as v
from pagedkv.attention.cpu.blocks import round_operand, round_weight


def apply(function: Any, values: np.ndarray) -> np.ndarray:
    """function over float32 values, whose number is a multiple of 16."""

    @njit
    def loop(source: int, target: int, count: int) -> None:
        x, y = v.pointer_to(source, False), v.pointer_to(target, False)
        for i in range(0, count, 16):
            v.store(y, i, function(v.load(x, i)))

    values = np.ascontiguousarray(values, dtype=np.float32)
    result = np.empty_like(values)
    loop(values.ctypes.data, result.ctypes.data, len(values))
    return result


def test_exp2_is_within_two_parts_in_ten_million() -> None:
    x = np.linspace(-125, 0, 16 * 4096).astype(np.float32)
    expected = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(apply(v.exp2, x) / expected - 1)) < 2e-7


def test_exp2_where_it_must_be_exact() -> None:
    """Exactly 1 and 0 there: what a row may not see then changes nothing."""
    x = np.array([0.0, -0.0, -np.inf, -126.0, -1e30, -3e38, 1.0, -1.0] * 2)
    assert apply(v.exp2, x)[:8].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.5]
    assert math.isnan(apply(v.exp2, np.full(16, np.nan))[0])


def test_tanh() -> None:
    x = np.concatenate([np.linspace(-30, 30, 16 * 1024), [-np.inf, np.inf, 0.0, 1e-8] * 4])
    assert np.max(np.abs(apply(v.tanh, x) - np.tanh(x.astype(np.float32)))) < 2e-7


def test_rounding_to_bf16_is_torchs() -> None:
    x = np.random.default_rng(0).standard_normal(1600).astype(np.float32)
    x[:3] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)]  # ties

    @njit
    def round_loop(source: int, target: int, count: int) -> None:
        a, b = v.pointer_to(source, False), v.pointer_to(target, True)
        for i in range(0, count, 16):
            v.store(b, i, round_operand(v.load(a, i), b))

    result = torch.empty(len(x), dtype=torch.bfloat16)
    round_loop(x.ctypes.data, result.data_ptr(), len(x))
    assert torch.equal(result, torch.from_numpy(x).bfloat16())


def test_a_weight_is_rounded_to_a_nearest_bf16() -> None:
    x = np.random.default_rng(0).random(1600).astype(np.float32)

    @njit
    def round_loop(source: int, target: int, count: int) -> None:
        a, b, like = v.pointer_to(source, False), v.pointer_to(target, False), v.pointer_to(target, True)
        for i in range(0, count, 16):
            v.store(b, i, round_weight(v.load(a, i), like))

    result = np.empty_like(x)
    round_loop(x.ctypes.data, result.ctypes.data, len(x))
    assert torch.equal(torch.from_numpy(result).bfloat16().float(), torch.from_numpy(result)), "not a bf16"
    best = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.all(np.abs(result - x) <= np.abs(best - x))


@pytest.mark.parametrize(("reduce", "expected"), [(v.largest_lane, np.max), (v.sum_lanes, np.sum)])
def test_folding_the_lanes(reduce: Any, expected: Callable[[np.ndarray], float]) -> None:
    x = np.random.default_rng(1).integers(-99, 99, 16).astype(np.float32)

    @njit
    def fold(source: int) -> float:
        return reduce(v.load(v.pointer_to(source, False), 0))

    assert fold(x.ctypes.data) == expected(x)


def test_lanes_that_are_not_kept_become_minus_infinity_even_nan() -> None:
    @njit
    def keep(source: int, target: int, first: int, end: int) -> None:
        v.store(v.pointer_to(target, False), 0, v.keep_lanes(v.load(v.pointer_to(source, False), 0), first, end))

    x, y = np.full(16, np.nan, dtype=np.float32), np.empty(16, dtype=np.float32)
    x[3:7] = 1.0
    keep(x.ctypes.data, y.ctypes.data, 3, 7)
    assert y.tolist() == [-np.inf] * 3 + [1.0] * 4 + [-np.inf] * 9
    keep(x.ctypes.data, y.ctypes.data, -9, 0)
    assert (y == -np.inf).all()


def test_tickets_are_handed_out_in_order() -> None:
    @njit
    def take(counter: int) -> int:
        return v.take_ticket(v.pointer_i64(counter))

    counter = np.zeros(1, dtype=np.int64)
    assert [take(counter.ctypes.data) for _ in range(3)] == [0, 1, 2]
