"""One tile of keys: find its pages, score it, turn scores into weights, weigh the values.

Matrices of the kernel's scratch are float32, a row's elements side by side: queries [row, key_dim], scores (later
weights) [row, KEY_TILE], states [row, state_width]. Rows are padded to a multiple of FEW_ROWS; what
padding rows hold is never read out.
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
    round_weight,
    store_operand,
)
from pagedkv.attention.cpu.vectors import (
    LOG2E,
    advance,
    exp2,
    finite_shift,
    fma,
    keep_lanes,
    largest_lane,
    load,
    maximum,
    prefetch_pair,
    splat,
    store,
    tanh,
)

GROUP_TOKENS = 16
"""Tokens whose keys fill the lanes of one vector; every page size is a multiple of it."""

KEY_TILE = 64
"""Tokens between two rescalings of the online softmax."""

STATE_HEADER = 32
"""Floats before a row's accumulated values: its maximum (lane 0 of 16), then 16 lanes that add up to its weights.

The maximum is put there when a chunk is done; until then it is in an array of maxima.
"""


@njit(error_model="numpy", forceinline=True)
def state_width(value_dim: Any) -> Any:
    """Floats of a row's state: the header and its accumulated values, padded to a multiple of 32."""
    return STATE_HEADER + (value_dim + 31) // 32 * 32


@njit(error_model="numpy")
def locate(a: Any, offsets: Any, side: Any, table: Any, row: Any, head: Any, base: Any, first: Any, end: Any) -> Any:
    """Element offsets of the tile at token `base`: key groups from offsets[side], value groups from offsets[side + 4].

    `side` is 0 or 8: one half is for the tile at hand, the other for the next.

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
def _score_block(total: Any, key: Any, places: Any, ahead: Any, rows: Any, base: Any, dim: Any) -> Any:
    """Scores of a block of rows against the key groups at places[0:2]; those at ahead[0:2] are fetched meanwhile."""
    left, right, next_left, next_right = places[0], places[1], ahead[0], ahead[1]
    for k in range(dim // 2):
        prefetch_pair(key, next_left + 32 * k)
        prefetch_pair(key, next_right + 32 * k)
        pairs = (load_pair(key, left + 32 * k), load_pair(key, right + 32 * k))
        total = block_dot(total, pairs, rows, base, dim, k)
    return total


@njit(error_model="numpy")
def score(key: Any, rows: Any, count: Any, dim: Any, offsets: Any, side: Any, first: Any, end: Any, scores: Any) -> Any:
    """scores[row, token of the tile] for all groups with a token in [first, end), two groups at a time."""
    for g in range(first // 32 * 2, -(-end // 16), 2):
        places, ahead = advance(offsets, side + g), advance(offsets, 8 - side + g)
        r = np.int64(0)
        while r + MANY_ROWS <= count:
            zeros = block_zeros(MANY_ROWS, 2)
            total = _score_block(zeros, key, places, ahead, rows, r * dim, dim)
            block_store(total, scores, r * KEY_TILE + g * GROUP_TOKENS, KEY_TILE)
            r += MANY_ROWS
        while r < count:
            few = block_zeros(FEW_ROWS, 2)
            part = _score_block(few, key, places, ahead, rows, r * dim, dim)
            block_store(part, scores, r * KEY_TILE + g * GROUP_TOKENS, KEY_TILE)
            r += FEW_ROWS


@njit(error_model="numpy", forceinline=True)
def _largest_score(scores: Any, at: Any, first: Any, end: Any, scale: Any, softcap: Any) -> Any:
    """The largest of a row's scores, before the scale; masked and capped scores are put back in their place.

    Visible are the tokens first <= t < end of the tile; the others become -inf.
    """
    s0, s1, s2, s3 = load(scores, at), load(scores, at + 16), load(scores, at + 32), load(scores, at + 48)
    if softcap != np.float32(0.0):
        inner, outer = splat(scale / softcap), splat(softcap / scale)
        s0, s1 = tanh(s0 * inner) * outer, tanh(s1 * inner) * outer
        s2, s3 = tanh(s2 * inner) * outer, tanh(s3 * inner) * outer
    partial = first > 0 or end < KEY_TILE
    if partial:
        s0, s1 = keep_lanes(s0, first, end), keep_lanes(s1, first - 16, end - 16)
        s2, s3 = keep_lanes(s2, first - 32, end - 32), keep_lanes(s3, first - 48, end - 48)
    if partial or softcap != np.float32(0.0):
        store(scores, at, s0)
        store(scores, at + 16, s1)
        store(scores, at + 32, s2)
        store(scores, at + 48, s3)
    return largest_lane(maximum(maximum(s0, s1), maximum(s2, s3)))


@njit(error_model="numpy", forceinline=True)
def _row_weights(scores: Any, at: Any, scale: Any, shift: Any, value: Any) -> Any:
    """Turn a row of scores into weights in the form of an operand; returns their sum in 16 lanes."""
    p0 = round_weight(exp2(fma(load(scores, at), scale, shift)), value)
    p1 = round_weight(exp2(fma(load(scores, at + 16), scale, shift)), value)
    p2 = round_weight(exp2(fma(load(scores, at + 32), scale, shift)), value)
    p3 = round_weight(exp2(fma(load(scores, at + 48), scale, shift)), value)
    store_operand(scores, at, 0, p0, value)
    store_operand(scores, at, 16, p1, value)
    store_operand(scores, at, 32, p2, value)
    store_operand(scores, at, 48, p3, value)
    return (p0 + p1) + (p2 + p3)


@njit(error_model="numpy")
def softmax_rows(
    a: Any, value: Any, work: Any, state: Any, count: Any, position: Any, row: Any, base: Any, end: Any
) -> Any:
    """Scores of all rows on the tile at token `base` become weights; maxima, factors and sums move on.

    Row numbers start at `row`, whose token is at position + row // group. A row that sees nothing here keeps its state
    exactly: its factor is 1 and its weights are 0.
    """
    _, scores, factors, maxima, shifts = work
    width, scale = state_width(a.value_dim), a.scale * LOG2E
    token, member = position + row // a.group - base, row % a.group
    for r in range(count):
        last = min(token + 1, end - base)
        largest = _largest_score(scores, r * KEY_TILE, token + 1 - a.window, last, a.scale, a.softcap)
        shifts[r] = max(maxima[r], largest * scale)
        member += 1
        if member == a.group:
            member = 0
            token += 1
    for r in range(0, count, 16):
        largest_16 = load(shifts, r)
        shift_16 = finite_shift(largest_16)
        store(factors, r, exp2(load(maxima, r) + shift_16))
        store(maxima, r, largest_16)
        store(shifts, r, shift_16)
    scales = splat(scale)
    for r in range(count):
        total = _row_weights(scores, r * KEY_TILE, scales, splat(shifts[r]), value)
        here = r * width + 16
        store(state, here, fma(load(state, here), splat(factors[r]), total))


@njit(error_model="numpy", forceinline=True)
def _weigh_block(
    total: Any,
    value: Any,
    weights: Any,
    at: Any,
    places: Any,
    ahead: Any,
    left: Any,
    right: Any,
    first: Any,
    end: Any,
    step: Any,
) -> Any:
    """total + weights @ values for the tokens first <= t < end of the tile, in ascending order.

    `left` and `right` are the two columns' offsets in a token pair, `step` elements are from one pair to the next. The
    same columns of the groups at `ahead` are fetched meanwhile.
    """
    t, stop = first // 2, end // 2
    if first % 2:
        place = places[t // 8] + t % 8 * step
        pairs = (keep_half(load_pair(value, place + left), True), keep_half(load_pair(value, place + right), True))
        total = block_dot(total, pairs, weights, at, KEY_TILE, t)
        t += 1
    while t < stop:
        place, next_place = places[t // 8] + t % 8 * step, ahead[t // 8] + t % 8 * step
        group_end = min(stop, t // 8 * 8 + 8)
        while t < group_end:
            prefetch_pair(value, next_place + left)
            prefetch_pair(value, next_place + right)
            pairs = (load_pair(value, place + left), load_pair(value, place + right))
            total = block_dot(total, pairs, weights, at, KEY_TILE, t)
            place += step
            next_place += step
            t += 1
    if end % 2 and end > first:
        place = places[stop // 8] + stop % 8 * step
        pairs = (keep_half(load_pair(value, place + left), False), keep_half(load_pair(value, place + right), False))
        total = block_dot(total, pairs, weights, at, KEY_TILE, stop)
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
    """Scale what each row has accumulated by its factor and add its weights times the values.

    Two columns of 16 elements at a time; where dim is an odd multiple of 16, the last is done twice, into the padding.
    """
    width = state_width(dim)
    places, ahead = advance(offsets, side + 4), advance(offsets, 12 - side)
    r = np.int64(0)
    while r < count:
        many = r + MANY_ROWS <= count
        for d in range(0, dim, 32):
            here, at, left = r * width + STATE_HEADER + d, r * KEY_TILE, 2 * d
            right = left + 32 if d + 32 <= dim else left
            if many:
                total = block_load(MANY_ROWS, 2, state, here, width, factors, r)
                total = _weigh_block(total, value, weights, at, places, ahead, left, right, first, end, 2 * dim)
                block_store(total, state, here, width)
            else:
                part = block_load(FEW_ROWS, 2, state, here, width, factors, r)
                part = _weigh_block(part, value, weights, at, places, ahead, left, right, first, end, 2 * dim)
                block_store(part, state, here, width)
        r += MANY_ROWS if many else FEW_ROWS
