"""The kernel: ragged queries over paged keys and values, for prefill, chunks, decode and verification alike.

The unit of work is a task: up to TILE_ROWS query rows of one sequence, for one KV head, over a range of its keys. Rows
are (token, query head of the group) pairs, numbered token * group + head, so that all that share a key are multiplied
with it while it is in registers. Keys are visited in tiles of 64 tokens, with an online softmax in float32:

    keys of a sequence   |<------- chunk 0 ------->|<------- chunk 1 ------->| ...    CHUNK tokens each
                         |tile|tile|tile| ... |tile|tile|tile| ...                    KEY_TILE tokens each
                         |g|g|g|g| 16-token groups, each from whatever page holds it

A row's result depends on its own query, keys and position only, bit for bit: tiles and chunks lie at fixed positions,
every operation on a row is done in the same order whatever the row is computed together with, and what a row may not
see is an exact no-op. The running softmax starts afresh with each chunk and the chunks are merged in order, so that it
makes no difference whether one thread or several computed them. Hence prefill, chunked prefill and decode agree, as do
all numbers of threads, page sizes and placements of pages.

Memory outside a sequence is never trusted: keys of invisible tokens give a score that a select replaces by -inf, and
values of tokens outside [first visible, end) are skipped or blanked in their register, since 0 * NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.np.numpy_support import carray, from_dtype

from pagedkv.attention.cpu.blocks import FEW_ROWS, round_operand, store_operand
from pagedkv.attention.cpu.tiles import (
    KEY_TILE,
    STATE_HEADER,
    locate,
    score,
    softmax_rows,
    state_width,
    weigh,
)
from pagedkv.attention.cpu.vectors import (
    LOG2E,
    NEG_INF,
    advance,
    exp2_scalar,
    fma,
    load,
    pointer_i32,
    pointer_i64,
    pointer_to,
    pointer_type,
    splat,
    store,
    sum_lanes,
    take_ticket,
)

CHUNK = 512
"""Tokens after which the softmax starts afresh, to be merged: the grain at which keys can be split over threads."""

TILE_ROWS = 48
"""Most query rows of a task."""

ATTEND_ARGUMENTS = np.dtype(
    [
        ("phase", np.int64),  # 0: tasks are attended; 1: partial results of split tasks are merged
        ("counters", np.int64),  # address of int64: tickets for threads, for tasks
        ("tasks", np.int64),  # address of int64 [task_count, TASK_FIELDS]
        ("task_count", np.int64),
        ("query", np.int64),  # addresses of the tensors; strides in elements
        ("query_token_stride", np.int64),
        ("query_head_stride", np.int64),
        ("output", np.int64),
        ("key", np.int64),
        ("value", np.int64),
        ("table", np.int64),
        ("table_stride", np.int64),
        ("sinks", np.int64),  # address of float32 [query_heads]; 0 for none
        ("partial", np.int64),  # address of float32 [partial rows, partial_width]
        ("scratch", np.int64),  # address of float32 [threads, scratch_stride]
        ("scratch_stride", np.int64),
        ("kv_heads", np.int64),
        ("group", np.int64),
        ("key_dim", np.int64),
        ("value_dim", np.int64),
        ("page_size", np.int64),
        ("window", np.int64),
        ("scale", np.float32),
        ("softcap", np.float32),  # 0 for none
    ],
    align=True,
)
"""What the kernel is told: one record, whose address is its only argument."""

TASK_FIELDS = 9
"""int64 fields of a task, in this order:

first token in the batch, position of that token, table row, first query row, row end, first key, key end, partial row
(-1: the task does all keys and writes the output), chunks (of a merge).
"""

_ARGUMENTS = from_dtype(ATTEND_ARGUMENTS)
KERNEL_SIGNATURE = types.void(pointer_type(_ARGUMENTS))


def partial_width(value_dim: int) -> int:
    """float32 elements of a row of partial results: `state_width` for the caller of the kernel."""
    return int(state_width.py_func(value_dim))


def scratch_floats(key_dim: int, value_dim: int) -> int:
    """float32 elements of scratch that a thread needs."""
    return 32 + TILE_ROWS * (key_dim + KEY_TILE + 3 + 2 * partial_width(value_dim))


@njit(error_model="numpy")
def _load_queries(a: Any, query: Any, key: Any, rows: Any, first_token: Any, row: Any, count: Any, head: Any) -> Any:
    """Lay the task's query rows out as the left operand of the score product; rows up to the padding are zero."""
    dim = a.key_dim
    for r in range(-(-count // FEW_ROWS) * FEW_ROWS):
        token, member = first_token + (row + r) // a.group, (row + r) % a.group
        start = token * a.query_token_stride + (head * a.group + member) * a.query_head_stride
        for d in range(0, dim, 16):
            value = load(query, start + d) if r < count else splat(np.float32(0.0))
            store_operand(rows, r * dim, d, round_operand(value, key), key)


@njit(error_model="numpy")
def _clear(state: Any, count: Any, width: Any) -> Any:
    """Rows that have seen nothing yet."""
    for r in range(count):
        for i in range(0, width, 16):
            store(state, r * width + i, splat(NEG_INF if i == 0 else np.float32(0.0)))


@njit(error_model="numpy")
def _merge(total: Any, total_at: Any, part: Any, part_at: Any, count: Any, width: Any) -> Any:
    """Merge the rows of a later chunk into those of the earlier ones."""
    for r in range(count):
        here, there = total_at + r * width, part_at + r * width
        largest = max(total[here], part[there])
        shift = largest if largest > NEG_INF else np.float32(0.0)
        old, new = splat(exp2_scalar(total[here] - shift)), splat(exp2_scalar(part[there] - shift))
        total[here] = largest
        for i in range(16, width, 16):
            store(total, here + i, fma(load(total, here + i), old, load(part, there + i) * new))


@njit(error_model="numpy")
def _finish(a: Any, output: Any, state: Any, at: Any, first_token: Any, row: Any, count: Any, head: Any) -> Any:
    """Write rows out: accumulated values over the sum of weights, the head's sink counted in where there is one."""
    dim, width = a.value_dim, state_width(a.value_dim)
    sinks = pointer_to(a.sinks, False)
    for r in range(count):
        here = at + r * width
        token, query_head = first_token + (row + r) // a.group, head * a.group + (row + r) % a.group
        total = sum_lanes(load(state, here + 16))
        factor = np.float32(1.0)
        if a.sinks:
            sink = sinks[query_head] * LOG2E
            largest = max(state[here], sink)
            factor = exp2_scalar(state[here] - largest)
            total = total * factor + exp2_scalar(sink - largest)
        factor = splat(factor / total)
        start = (token * a.kv_heads * a.group + query_head) * dim
        for d in range(0, dim, 16):
            store(output, start + d, load(state, here + STATE_HEADER + d) * factor)


@njit(error_model="numpy")
def _attend_chunk(
    a: Any,
    key: Any,
    value: Any,
    task: Any,
    head: Any,
    first: Any,
    end: Any,
    last: Any,
    offsets: Any,
    work: Any,
    state: Any,
) -> Any:
    """Attend from the task's rows to its keys first <= token < end, which lie in one chunk; fills `state`.

    `last` is the end of all keys that the task will visit: fetching ahead does not stop at a chunk.
    """
    queries, products, factors, maxima, shifts = work
    table, row, count = pointer_i32(a.table), task[3], task[4] - task[3]
    padded = -(-count // FEW_ROWS) * FEW_ROWS
    _clear(state, padded, state_width(a.value_dim))
    for r in range(0, TILE_ROWS, 16):
        store(maxima, r, splat(NEG_INF))
        store(shifts, r, splat(NEG_INF))
    base, side = first // KEY_TILE * KEY_TILE, np.int64(0)
    locate(a, offsets, side, table, task[2], head, base, first, end)
    while base < end:
        locate(a, offsets, 8 - side, table, task[2], head, base + KEY_TILE, first, last)
        tile_first, tile_end = max(first - base, 0), min(end - base, KEY_TILE)
        score(key, queries, padded, a.key_dim, offsets, side, tile_first, tile_end, products)
        softmax_rows(a, value, work, state, count, task[1], row, base, end)
        weigh(value, products, padded, a.value_dim, offsets, side, tile_first, tile_end, factors, state)
        base += KEY_TILE
        side = 8 - side
    for r in range(count):
        state[r * (state_width(a.value_dim))] = maxima[r]


@njit(error_model="numpy")
def _attend_task(
    a: Any, query: Any, key: Any, value: Any, output: Any, task: Any, head: Any, scratch: Any, offsets: Any
) -> Any:
    """One task for one KV head."""
    first_token, position, row, row_end = task[0], task[1], task[3], task[4]
    count, width = row_end - row, state_width(a.value_dim)
    queries = scratch
    products = advance(queries, TILE_ROWS * a.key_dim)
    factors = advance(products, TILE_ROWS * KEY_TILE)
    maxima, shifts = advance(factors, TILE_ROWS), advance(factors, 2 * TILE_ROWS)
    total = advance(factors, 3 * TILE_ROWS)
    part = advance(total, TILE_ROWS * width)
    work = (queries, products, factors, maxima, shifts)
    _load_queries(a, query, key, queries, first_token, row, count, head)
    first = max(task[5], position + row // a.group + 1 - a.window)
    end = min(task[6], position + (row_end - 1) // a.group + 1)
    started, start = False, np.int64(0)
    record = task[7] + head * count
    for chunk in range(first // CHUNK * CHUNK, end, CHUNK):
        state = part if started else total
        _attend_chunk(a, key, value, task, head, max(first, chunk), min(end, chunk + CHUNK), end, offsets, work, state)
        if task[7] >= 0:
            partial = pointer_to(a.partial, False)
            for i in range(0, count * width, 16):
                store(partial, record * width + i, load(state, i))
            record += a.kv_heads * count
        elif started:
            _merge(total, start, part, start, count, width)
        started = task[7] < 0
    if task[7] < 0:
        _finish(a, output, total, start, first_token, row, count, head)


@njit(error_model="numpy")
def _merge_task(a: Any, output: Any, task: Any, head: Any) -> Any:
    """Merge the chunks of a split task, in order, and write its rows out."""
    partial, row, count = pointer_to(a.partial, False), task[3], task[4] - task[3]
    width = state_width(a.value_dim)
    total = (task[7] + head * count) * width
    for chunk in range(1, task[8]):
        _merge(partial, total, partial, total + chunk * a.kv_heads * count * width, count, width)
    _finish(a, output, partial, total, task[0], row, count, head)


def build_kernel(query_bf16: bool, key_bf16: bool, version: str) -> Any:
    """The compiled kernel for one dtype of queries and outputs and one of keys and values.

    A C function (see KERNEL_SIGNATURE) that any number of threads may run at once on the same record: each takes a
    ticket, which names its scratch, and then tickets for tasks until none is left. `version` stands for the source of
    the modules that this one inlines: Numba's on-disk cache looks at captured values, but not at other modules.
    """

    @cfunc(KERNEL_SIGNATURE, error_model="numpy", cache=True)
    def kernel(arguments: Any) -> None:
        source = version  # noqa: F841  captured, so that it is part of the cache key
        a = carray(arguments, 1)[0]
        query, output = pointer_to(a.query, query_bf16), pointer_to(a.output, query_bf16)
        key, value = pointer_to(a.key, key_bf16), pointer_to(a.value, key_bf16)
        counters = pointer_i64(a.counters)
        lane = take_ticket(counters)
        scratch = pointer_to(a.scratch + lane * a.scratch_stride * 4, False)
        offsets = pointer_i64(a.scratch + lane * a.scratch_stride * 4)
        queue = advance(counters, 1)
        ticket = take_ticket(queue)
        while ticket < a.task_count * a.kv_heads:
            task = pointer_i64(a.tasks + ticket // a.kv_heads * TASK_FIELDS * 8)
            head = ticket % a.kv_heads
            if a.phase == 0:
                _attend_task(a, query, key, value, output, task, head, advance(scratch, 32), offsets)
            else:
                _merge_task(a, output, task, head)
            ticket = take_ticket(queue)

    return kernel
