"""One tile of keys: find its pages, score it, turn scores into weights, weigh the values.

Matrices of the kernel's scratch are float32, a row's elements side by side: queries [row, key_dim], scores (later weights) [row,
KEY_TILE], states [row, STATE_HEADER + value_dim]. Rows are padded to a multiple of FEW_ROWS; what padding rows hold is never read out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from pagedkv.attention.cpu.blocks import (
    FEW_ROWS,
    MANY_ROWS,
    block_dot,
    block_load,
    block_store,
    block_zeros,
    keep_half,
    load_pair,
    load_pairs,
    round_like,
    store_operand,
)
from pagedkv.attention.cpu.vectors import (
    LOG2E,
    NEG_INF,
    advance,
    exp2,
    exp2_scalar,
    fma,
    keep_lanes,
    largest_lane,
    load,
    maximum,
    prefetch,
    splat,
    store,
    tanh,
)

GROUP_TOKENS = 16
"""Tokens whose keys fill the lanes of one vector; every page size is a multiple of it."""

KEY_TILE = 64
"""Tokens between two rescalings of the online softmax."""

STATE_HEADER = 32
"""Floats before a row's accumulated values: lane 0 of the first 16 is its maximum, the next 16 lanes add up to its weights."""


@njit(error_model="numpy")
def locate(a: Any, offsets: Any, side: Any, table: Any, row: Any, head: Any, base: Any, first: Any, end: Any) -> Any:
    """Element offsets of the tile at token `base`: key groups from offsets[side], value groups from offsets[side + 4].

    Groups without a token in [first, end) are taken from the null page, whose zeros disturb nothing.
    """
    groups = a.page_size // GROUP_TOKENS
    for g in range(KEY_TILE // GROUP_TOKENS):
        token = base + g * GROUP_TOKENS
        place = np.int64(0)
        if token < end and token + GROUP_TOKENS > first:
            number = token // GROUP_TOKENS
            page = np.int64(table[row * a.table_stride + number // groups])
            place = (page * a.kv_heads + head) * groups + number % groups
        offsets[side + g] = place * (GROUP_TOKENS * a.key_dim)
        offsets[side + 4 + g] = place * (GROUP_TOKENS * a.value_dim)


@njit(error_model="numpy", forceinline=True)
def _score_block(total: Any, key: Any, left: Any, right: Any, rows: Any, base: Any, dim: Any) -> Any:
    """Scores of a block of rows against the two key groups at `left` and `right`."""
    for k in range(dim // 2):
        pairs = (load_pair(key, left + 32 * k), load_pair(key, right + 32 * k))
        total = block_dot(total, pairs, rows, base, dim, k)
    return total


@njit(error_model="numpy")
def score(key: Any, rows: Any, count: Any, dim: Any, offsets: Any, side: Any, first: Any, end: Any, scores: Any) -> Any:
    """scores[row, token of the tile] for all groups with a token in [first, end), two groups at a time."""
    for g in range(first // 32 * 2, -(-end // 16), 2):
        left, right = offsets[side + g], offsets[side + g + 1]
        r = np.int64(0)
        while r + MANY_ROWS <= count:
            zeros = block_zeros(MANY_ROWS, 2)
            total = _score_block(zeros, key, left, right, rows, r * dim, dim)
            block_store(total, scores, r * KEY_TILE + g * GROUP_TOKENS, KEY_TILE)
            r += MANY_ROWS
        while r < count:
            few = block_zeros(FEW_ROWS, 2)
            part = _score_block(few, key, left, right, rows, r * dim, dim)
            block_store(part, scores, r * KEY_TILE + g * GROUP_TOKENS, KEY_TILE)
            r += FEW_ROWS


@njit(error_model="numpy", forceinline=True)
def _capped(x: Any, scale: Any, softcap: Any) -> Any:
    """The score in units of log2(e): scaled, and capped where there is a cap."""
    if softcap == np.float32(0.0):
        return x * splat(scale * LOG2E)
    return tanh(x * splat(scale / softcap)) * splat(softcap * LOG2E)


@njit(error_model="numpy")
def _softmax_row(
    scores: Any, at: Any, state: Any, here: Any, first: Any, end: Any, scale: Any, softcap: Any, value: Any
) -> Any:
    """Turn a row of scores into weights and advance its maximum and sum; returns the factor for what is accumulated.

    Visible are the tokens first <= t < end of the tile. A row that sees nothing here keeps its state exactly.
    """
    s0, s1 = _capped(load(scores, at), scale, softcap), _capped(load(scores, at + 16), scale, softcap)
    s2, s3 = _capped(load(scores, at + 32), scale, softcap), _capped(load(scores, at + 48), scale, softcap)
    if first > 0 or end < KEY_TILE:
        s0, s1 = keep_lanes(s0, first, end), keep_lanes(s1, first - 16, end - 16)
        s2, s3 = keep_lanes(s2, first - 32, end - 32), keep_lanes(s3, first - 48, end - 48)
    before = state[here]
    largest = max(before, largest_lane(maximum(maximum(s0, s1), maximum(s2, s3))))
    shift = largest if largest > NEG_INF else np.float32(0.0)
    factor = exp2_scalar(before - shift)
    negative = splat(-shift)
    p0, p1, p2, p3 = exp2(s0 + negative), exp2(s1 + negative), exp2(s2 + negative), exp2(s3 + negative)
    p0, p1, p2, p3 = round_like(p0, value), round_like(p1, value), round_like(p2, value), round_like(p3, value)
    state[here] = largest
    store(state, here + 16, fma(load(state, here + 16), splat(factor), (p0 + p1) + (p2 + p3)))
    store_operand(scores, at, 0, p0, value)
    store_operand(scores, at, 16, p1, value)
    store_operand(scores, at, 32, p2, value)
    store_operand(scores, at, 48, p3, value)
    return factor


@njit(error_model="numpy")
def softmax_rows(
    a: Any,
    value: Any,
    scores: Any,
    state: Any,
    factors: Any,
    count: Any,
    position: Any,
    row: Any,
    base: Any,
    end: Any,
) -> Any:
    """The softmax step of all rows on the tile at token `base`; row numbers start at `row`, positions at `position`."""
    width = STATE_HEADER + a.value_dim
    member = row % a.group
    token = position + row // a.group - base
    for r in range(count):
        last = min(token + 1, end - base)
        factors[r] = _softmax_row(
            scores, r * KEY_TILE, state, r * width, token + 1 - a.window, last, a.scale, a.softcap, value
        )
        member += 1
        if member == a.group:
            member = 0
            token += 1
    for r in range(count, -(-count // FEW_ROWS) * FEW_ROWS):
        factors[r] = np.float32(0.0)


@njit(error_model="numpy", forceinline=True)
def _weigh_block(
    total: Any, value: Any, weights: Any, at: Any, places: Any, column: Any, first: Any, end: Any, dim: Any
) -> Any:
    """total + weights @ values for the tokens first <= t < end of the tile, in ascending order."""
    step = 2 * dim
    t, stop = first // 2, end // 2
    if first % 2:
        pairs = load_pairs(total, value, places[t // 8] + t % 8 * step + column)
        total = block_dot(total, keep_half(pairs, True), weights, at, KEY_TILE, t)
        t += 1
    while t < stop:
        place = places[t // 8] + t % 8 * step + column
        for t in range(t, min(stop, t // 8 * 8 + 8)):
            total = block_dot(total, load_pairs(total, value, place), weights, at, KEY_TILE, t)
            place += step
        t += 1
    if end % 2 and end > first:
        pairs = load_pairs(total, value, places[stop // 8] + stop % 8 * step + column)
        total = block_dot(total, keep_half(pairs, False), weights, at, KEY_TILE, stop)
    return total


@njit(error_model="numpy")
def weigh(
    value: Any,
    weights: Any,
    count: Any,
    dim: Any,
    offsets: Any,
    side: Any,
    first: Any,
    end: Any,
    factors: Any,
    state: Any,
) -> Any:
    """Scale what each row has accumulated by its factor and add its weights times the values."""
    width, places = STATE_HEADER + dim, advance(offsets, side + 4)
    r = np.int64(0)
    while r < count:
        many = r + MANY_ROWS <= count
        d = np.int64(0)
        while d < dim:
            here = r * width + STATE_HEADER + d
            if many and d + 32 <= dim:
                t82 = block_load(MANY_ROWS, 2, state, here, width, factors, r)
                t82 = _weigh_block(t82, value, weights, r * KEY_TILE, places, 2 * d, first, end, dim)
                block_store(t82, state, here, width)
                d += 32
            elif many:
                t81 = block_load(MANY_ROWS, 1, state, here, width, factors, r)
                t81 = _weigh_block(t81, value, weights, r * KEY_TILE, places, 2 * d, first, end, dim)
                block_store(t81, state, here, width)
                d += 16
            elif d + 32 <= dim:
                t42 = block_load(FEW_ROWS, 2, state, here, width, factors, r)
                t42 = _weigh_block(t42, value, weights, r * KEY_TILE, places, 2 * d, first, end, dim)
                block_store(t42, state, here, width)
                d += 32
            else:
                t41 = block_load(FEW_ROWS, 1, state, here, width, factors, r)
                t41 = _weigh_block(t41, value, weights, r * KEY_TILE, places, 2 * d, first, end, dim)
                block_store(t41, state, here, width)
                d += 16
        r += MANY_ROWS if many else FEW_ROWS


@njit(error_model="numpy")
def prefetch_tile(key: Any, value: Any, offsets: Any, side: Any, key_size: Any, value_size: Any) -> Any:
    """Ask for all cache lines of a tile; sizes are elements of a group."""
    for g in range(KEY_TILE // GROUP_TOKENS):
        for i in range(0, key_size, 32):
            prefetch(key, offsets[side + g] + i)
        for i in range(0, value_size, 32):
            prefetch(value, offsets[side + 4 + g] + i)
