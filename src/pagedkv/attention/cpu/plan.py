"""Plans a step: cuts the batch into tasks, splits what would keep one thread busy alone, heaviest first.

Knows nothing about bytes: a plan is arrays of integers, worked out once for each shape of layer and used by all layers
of that shape. Tasks may be cut in any way without changing a result (see kernel.py), so the cut is free to follow the
number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.batch import check_batch, check_pages, check_slots
from pagedkv.attention.cpu.blocks import FEW_ROWS, MANY_ROWS
from pagedkv.attention.cpu.kernel import CHUNK, TASK_FIELDS, TILE_ROWS
from pagedkv.attention.interface import AttentionBatch

TASKS_PER_THREAD = 4
"""A task is split when it is more than this fraction of a thread's share of the work."""

TASK_OVERHEAD = 256
"""Cost of a task beside its keys x rows, in the same unit."""

NO_WINDOW = 1 << 30
"""A window that no sequence fills."""


@dataclass(frozen=True, slots=True)
class TaskList:
    """Tasks of one shape of layer; the kernel runs each once for every KV head.

    Attributes:
        tasks: int64 [n, TASK_FIELDS], heaviest first.
        merges: int64 [m, TASK_FIELDS], one for each tile of rows that was split over keys.
        partial_rows: rows of partial results that split tasks leave.
        products: query-key pairs of one KV head, roughly: the work.
    """

    tasks: NDArray[np.int64]
    merges: NDArray[np.int64]
    partial_rows: int
    products: int


@dataclass(frozen=True)
class CpuPlan:
    """A checked batch and, per shape of layer, its tasks."""

    batch: AttentionBatch
    threads: int
    _tasks: dict[tuple[int, int, int | None], TaskList] = field(default_factory=dict)
    _checked: set[tuple[str, int, int, int | None]] = field(default_factory=set)

    @property
    def tokens(self) -> int:
        """Query tokens of the batch."""
        return len(self.batch.slots)

    def check_slots(self, num_pages: int, page_size: int) -> None:
        """`batch.check_slots`, once for each size of page tensors."""
        key = ("slots", num_pages, page_size, None)
        if key not in self._checked:
            check_slots(self.batch, num_pages, page_size)
            self._checked.add(key)

    def check_pages(self, num_pages: int, page_size: int, window: int | None) -> None:
        """`batch.check_pages`, once for each size of page tensors and window."""
        key = ("pages", num_pages, page_size, window)
        if key not in self._checked:
            check_pages(self.batch, num_pages, page_size, window)
            self._checked.add(key)

    def tasks(self, kv_heads: int, group: int, window: int | None) -> TaskList:
        """The tasks for layers of this shape."""
        key = (kv_heads, group, window)
        if key not in self._tasks:
            self._tasks[key] = make_tasks(self.batch, kv_heads, group, window, self.threads)
        return self._tasks[key]


def make_plan(batch: AttentionBatch, threads: int) -> CpuPlan:
    """A plan for the batch on up to `threads` threads.

    Raises:
        InvalidRequestError: if the batch contradicts itself.
    """
    check_batch(batch)
    return CpuPlan(batch, threads)


def make_tasks(batch: AttentionBatch, kv_heads: int, group: int, window: int | None, threads: int) -> TaskList:
    """Cut the batch into tasks of at most TILE_ROWS query rows and, where tasks are few, into ranges of keys."""
    start = batch.query_start.astype(np.int64)
    counts = np.diff(start)
    rows = counts * group
    even = -(-rows // -(-rows // TILE_ROWS))  # as many rows for each tile of a sequence
    height = -(-even // MANY_ROWS) * MANY_ROWS
    tiles = -(-rows // height)
    sequence = np.repeat(np.arange(len(counts)), tiles)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)

    tasks = np.zeros((len(sequence), TASK_FIELDS), dtype=np.int64)
    tasks[:, 0] = start[sequence]
    tasks[:, 1] = position = (batch.kv_length - counts)[sequence]
    tasks[:, 2] = batch.rows[sequence]
    tasks[:, 3] = row = number * height[sequence]
    tasks[:, 4] = row_end = np.minimum(row + height[sequence], rows[sequence])
    tasks[:, 5] = np.maximum(position + row // group + 1 - (NO_WINDOW if window is None else window), 0)
    tasks[:, 6] = position + (row_end - 1) // group + 1
    tasks[:, 7] = -1

    padded = -(-(row_end - row) // FEW_ROWS) * FEW_ROWS
    cost = (tasks[:, 6] - tasks[:, 5]) * padded + TASK_OVERHEAD
    return _split(tasks, cost, kv_heads, threads)


def _split(tasks: NDArray[np.int64], cost: NDArray[np.int64], kv_heads: int, threads: int) -> TaskList:
    """Split tasks that are more than their share over their chunks; order all by cost."""
    share = max(int(cost.sum()) * kv_heads // (threads * TASKS_PER_THREAD), 1)
    first, end = tasks[:, 5] // CHUNK, -(-tasks[:, 6] // CHUNK)
    pieces = np.minimum(-(-cost // share), end - first) if threads > 1 else np.ones_like(cost)
    merges, parts, part_costs, partial_rows = [], [], [], 0
    for at in np.flatnonzero(pieces > 1):
        task, chunks = tasks[at], int(end[at] - first[at])
        merge = task.copy()
        merge[7], merge[8] = partial_rows, chunks
        merges.append(merge)
        rows = int(task[4] - task[3]) * kv_heads
        bounds = np.linspace(0, chunks, int(pieces[at]) + 1).astype(np.int64)
        for begin, stop in pairwise(bounds):
            part = task.copy()
            part[5] = max(task[5], (first[at] + begin) * CHUNK)
            part[6] = min(task[6], (first[at] + stop) * CHUNK)
            part[7] = partial_rows + begin * rows
            parts.append(part)
            part_costs.append(int(cost[at]) * int(stop - begin) // chunks)
        partial_rows += chunks * rows
    whole = pieces <= 1
    rows_of = np.concatenate([tasks[whole], np.array(parts, dtype=np.int64).reshape(-1, TASK_FIELDS)])
    costs = np.concatenate([cost[whole], np.array(part_costs, dtype=np.int64)])
    order = np.argsort(-costs, kind="stable")
    return TaskList(
        np.ascontiguousarray(rows_of[order]),
        np.array(merges, dtype=np.int64).reshape(-1, TASK_FIELDS),
        partial_rows,
        int(cost.sum()),
    )
