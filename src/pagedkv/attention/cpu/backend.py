"""The CPU backend: page tensors in the order of layout.py, a plan per step, and the kernels run on torch's threads.

Translates tensors into addresses and strides; the arithmetic is in kernel.py. Not for use by two threads at once:
scratch memory is kept between calls.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.cpu.blocks import BF16_DOT
from pagedkv.attention.cpu.kernel import ATTEND_ARGUMENTS, build_kernel, partial_width, scratch_floats
from pagedkv.attention.cpu.layout import (
    DTYPES,
    WRITE_ARGUMENTS,
    WRITE_BLOCK,
    allocate_pages,
    build_write_kernel,
    page_size_of,
)
from pagedkv.attention.cpu.plan import NO_WINDOW, CpuPlan, TaskList, make_plan
from pagedkv.attention.cpu.threads import Threads
from pagedkv.attention.interface import AttentionBatch, AttentionOptions, LayerPages
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.spec import LayerSpec

PRODUCTS_PER_THREAD = 1 << 20
"""Multiplications for which it pays to wake another thread: some 20 microseconds' worth."""

WRITES_PER_THREAD = 1 << 16
"""Elements to write for which it pays to wake another thread."""


class CpuBackend:
    """Implements `AttentionBackend` for CPUs.

    Keys and values are stored as bfloat16 or float32. With float32, all arithmetic is float32. With bfloat16, queries
    and softmax weights are rounded to bfloat16 before they are multiplied, and sums are float32.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._threads = Threads()
        self._version = _source_version()
        self._kernels: dict[tuple[bool, bool], Any] = {}
        self._writers: dict[bool, Any] = {}
        self._scratch = torch.empty(0)
        self._partial = torch.empty(0)
        self._counters = np.zeros(2, dtype=np.int64)

    @property
    def description(self) -> str:
        """How bfloat16 products are formed, and which threads are used."""
        products = "AVX512-BF16 dot product" if BF16_DOT else "bfloat16 widened to float32 FMA"
        return f"{products}; {self._threads.count} threads of {self._threads.description}"

    def allocate(self, layer: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> LayerPages:
        """Zeroed page tensors for one layer; `num_pages` includes the null page.

        Raises:
            UnsupportedModelError: for a head dim that is not a multiple of 16 from 32 to 256.
            ConfigError: for a page size that is not a multiple of 16, or a dtype other than bfloat16 and float32.
        """
        return allocate_pages(layer, num_pages, page_size, dtype)

    def plan(self, batch: AttentionBatch) -> CpuPlan:
        """Check the batch and make ready to cut it into tasks.

        Raises:
            InvalidRequestError: if the batch contradicts itself, with the numbers. Page ids and slots are checked
                against the page tensors on their first use.
        """
        return make_plan(batch, self._threads.count)

    def write(self, pages: LayerPages, key: torch.Tensor, value: torch.Tensor, plan: CpuPlan) -> None:
        """Store key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] at the batch's slots.

        Raises:
            InvalidRequestError: if a shape is wrong, or a slot is neither -1 nor in a usable page.
        """
        layer, page_size = pages.spec, page_size_of(pages)
        _check_shape("key", key, (plan.tokens, layer.kv_heads, layer.key_dim))
        _check_shape("value", value, (plan.tokens, layer.kv_heads, layer.value_dim))
        plan.check_slots(pages.key.shape[0], page_size)
        slots = np.ascontiguousarray(plan.batch.slots, dtype=np.int64)
        for source, target, is_value in ((key, pages.key, 0), (value, pages.value, 1)):
            source = _readable(source.to(target.dtype))
            self._counters[:] = 0
            arguments = np.array(
                (
                    self._counters.ctypes.data,
                    plan.tokens,
                    slots.ctypes.data,
                    source.data_ptr(),
                    source.stride(0),
                    source.stride(1),
                    target.data_ptr(),
                    layer.kv_heads,
                    source.shape[2],
                    page_size,
                    is_value,
                ),
                dtype=WRITE_ARGUMENTS,
            )
            threads = min(plan.threads, -(-plan.tokens // WRITE_BLOCK), -(-source.numel() // WRITES_PER_THREAD))
            self._threads.run(self._writer(target.dtype).address, arguments.ctypes.data, threads)

    def attend(self, pages: LayerPages, query: torch.Tensor, plan: CpuPlan, options: AttentionOptions) -> torch.Tensor:
        """Output [T, query_heads, value_dim] (contiguous, in the query's dtype) for query [T, query_heads, key_dim].

        Raises:
            ConfigError: if the query is neither bfloat16 nor float32.
            InvalidRequestError: if its shape is wrong, the table names a page outside the page tensors, or the scale is
                not positive.
        """
        layer, page_size = pages.spec, page_size_of(pages)
        _check_shape("query", query, (plan.tokens, layer.query_heads, layer.key_dim))
        if query.dtype not in DTYPES:
            raise ConfigError(f"query dtype is {query.dtype}; the CPU kernel takes torch.bfloat16 or torch.float32")
        if not options.scale > 0.0:
            raise InvalidRequestError(f"the scale of the scores is {options.scale}; it must be positive")
        plan.check_pages(pages.key.shape[0], page_size, options.window)
        tasks = plan.tasks(layer.kv_heads, layer.query_heads // layer.kv_heads, options.window)
        query = _readable(query)
        output = torch.empty(plan.tokens, layer.query_heads, layer.value_dim, dtype=query.dtype)
        sinks = None if options.sinks is None else options.sinks.detach().to(torch.float32).contiguous()
        if sinks is not None:
            _check_shape("sinks", sinks, (layer.query_heads,))
        table = _addressable(plan.batch.table)
        self._reserve(plan, layer, tasks)
        arguments = np.zeros((), dtype=ATTEND_ARGUMENTS)
        for name, number in (
            ("counters", self._counters.ctypes.data),
            ("query", query.data_ptr()),
            ("query_token_stride", query.stride(0)),
            ("query_head_stride", query.stride(1)),
            ("output", output.data_ptr()),
            ("key", pages.key.data_ptr()),
            ("value", pages.value.data_ptr()),
            ("table", table.ctypes.data),
            ("table_stride", table.strides[0] // 4),
            ("sinks", 0 if sinks is None else sinks.data_ptr()),
            ("partial", self._partial.data_ptr()),
            ("scratch", self._scratch.data_ptr()),
            ("scratch_stride", self._scratch.shape[1]),
            ("kv_heads", layer.kv_heads),
            ("group", layer.query_heads // layer.kv_heads),
            ("key_dim", layer.key_dim),
            ("value_dim", layer.value_dim),
            ("page_size", page_size),
            ("window", NO_WINDOW if options.window is None else min(options.window, NO_WINDOW)),
            ("scale", options.scale),
            ("softcap", options.softcap or 0.0),
        ):
            arguments[name] = number
        kernel = self._kernel(query.dtype, pages.key.dtype)
        products = tasks.products * layer.kv_heads * (layer.key_dim + layer.value_dim)
        threads = min(plan.threads, -(-products // PRODUCTS_PER_THREAD))
        for phase, work in enumerate((tasks.tasks, tasks.merges)):
            if len(work):
                arguments["phase"], arguments["tasks"], arguments["task_count"] = phase, work.ctypes.data, len(work)
                self._counters[:] = 0
                self._threads.run(kernel.address, arguments.ctypes.data, min(threads, len(work) * layer.kv_heads))
        return output

    def copy_pages(self, pages: LayerPages, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy whole pages: target[i] becomes a copy of what source[i] held before the call."""
        chosen, places = torch.from_numpy(source.astype(np.int64)), torch.from_numpy(target.astype(np.int64))
        for tensor in (pages.key, pages.value):
            tensor.index_copy_(0, places, tensor.index_select(0, chosen))

    def _reserve(self, plan: CpuPlan, layer: LayerSpec, tasks: TaskList) -> None:
        """Make scratch and partial results large enough."""
        size = -(-scratch_floats(layer.key_dim, layer.value_dim) // 1024) * 1024 + 64
        if self._scratch.dim() < 2 or self._scratch.shape[0] < plan.threads or self._scratch.shape[1] < size:
            self._scratch = torch.empty(plan.threads, size)
        needed = tasks.partial_rows * partial_width(layer.value_dim)
        if self._partial.numel() < needed:
            self._partial = torch.empty(needed)

    def _kernel(self, query: torch.dtype, key: torch.dtype) -> Any:
        kinds = (query == torch.bfloat16, key == torch.bfloat16)
        if kinds not in self._kernels:
            self._kernels[kinds] = build_kernel(*kinds, self._version)
        return self._kernels[kinds]

    def _writer(self, dtype: torch.dtype) -> Any:
        bf16 = dtype == torch.bfloat16
        if bf16 not in self._writers:
            self._writers[bf16] = build_write_kernel(bf16, self._version)
        return self._writers[bf16]


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidRequestError(f"{name} has shape {tuple(tensor.shape)}; {shape} is needed")


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if elements of a head lie side by side, else a copy."""
    tensor = tensor.detach()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _addressable(table: NDArray[np.int32]) -> NDArray[np.int32]:
    """The table itself if it is int32 with columns side by side, else a copy."""
    if table.dtype == np.int32 and table.strides[1] == 4:
        return table
    return np.ascontiguousarray(table, dtype=np.int32)


def _source_version() -> str:
    """A digest of this package's sources: an entry of Numba's on-disk cache is good for these alone."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
