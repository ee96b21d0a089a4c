"""The attention kernel: decode against the memory's own speed, prefill against torch's SDPA on contiguous tensors.

Decode attention reads every key and value once, so its figure is GB/s of them, beside what a plain vectorised read of a
large array reaches on the same threads in the same run. Prefill reads scattered pages where SDPA has contiguous keys
and values. Pages lie in random order. The target for decode, half the read speed, is stated for machines with
AVX512-BF16; each row says which way bfloat16 products were formed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.report import Row, compare, interleaved
from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.attention.cpu.blocks import BF16_DOT
from pagedkv.attention.cpu.threads import Threads
from pagedkv.attention.cpu.vectors import load, pointer_to, splat, store, take_ticket
from pagedkv.attention.interface import AttentionBatch, AttentionOptions
from pagedkv.spec import LayerSpec

PAGE_SIZE = 16
READ_BYTES = 256 << 20
"""Bytes of the array whose reading is the floor: many times a last-level cache's share."""

READ_BLOCK = 1 << 16
"""float32 elements that a thread reads for one ticket."""

DECODE_TARGET = 0.5
PREFILL_TARGET = 1.0


@cfunc(types.void(types.CPointer(types.int64)), error_model="numpy")
def _read(job: Any) -> None:
    """Add up an array: job is [ticket, blocks, address, address of what each ticket found]."""
    array, found = pointer_to(job[2], False), pointer_to(job[3], False)
    block = take_ticket(job)
    while block < job[1]:
        start = block * READ_BLOCK
        a, b, c, d = (splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)))
        for i in range(start, start + READ_BLOCK, 64):
            a, b = a + load(array, i), b + load(array, i + 16)
            c, d = c + load(array, i + 32), d + load(array, i + 48)
        store(found, block * 16, (a + b) + (c + d))
        block = take_ticket(job)


class Reader:
    """Reads a large array with all threads."""

    def __init__(self) -> None:
        self._threads = Threads()
        self._array = torch.ones(READ_BYTES // 4)
        blocks = self._array.numel() // READ_BLOCK
        self._found = torch.empty(blocks, 16)
        self._job = np.array([0, blocks, self._array.data_ptr(), self._found.data_ptr()], dtype=np.int64)

    def __call__(self) -> None:
        self._job[0] = 0
        self._threads.run(_read.address, self._job.ctypes.data, self._threads.count)


def attention_step(
    backend: CpuBackend, layer: LayerSpec, sequences: int, queries: int, length: int
) -> Callable[[], torch.Tensor]:
    """A call of the kernel for `sequences` sequences of `length` tokens, the last `queries` of each asking."""
    generator = np.random.default_rng(0)
    columns = -(-length // PAGE_SIZE)
    count = sequences * columns
    pages = backend.allocate(layer, count + 1, PAGE_SIZE, torch.bfloat16)
    pages.key.normal_()
    pages.value.normal_()
    batch = AttentionBatch(
        query_start=np.arange(sequences + 1, dtype=np.int32) * queries,
        kv_length=np.full(sequences, length, dtype=np.int32),
        rows=np.arange(sequences, dtype=np.int32),
        table=(generator.permutation(count) + 1).reshape(sequences, columns).astype(np.int32),
        slots=np.full(sequences * queries, -1, dtype=np.int64),
    )
    plan = backend.plan(batch)
    query = torch.randn(sequences * queries, layer.query_heads, layer.key_dim).bfloat16()
    options = AttentionOptions(scale=layer.key_dim**-0.5)
    return lambda: backend.attend(pages, query, plan, options)


def sdpa_steps(layer: LayerSpec, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's SDPA over contiguous tensors, heads repeated beforehand or grouped by SDPA itself."""
    query = torch.randn(1, layer.query_heads, length, layer.key_dim).bfloat16()
    key, value = (torch.randn(1, layer.kv_heads, length, layer.key_dim).bfloat16() for _ in range(2))
    group = layer.query_heads // layer.kv_heads
    key_r, value_r = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return {
        "repeated": lambda: scaled_dot_product_attention(query, key_r, value_r, is_causal=True),
        "grouped": lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True),
    }


def decode_row(backend: CpuBackend, reader: Reader, layer: LayerSpec, sequences: int, length: int) -> Row:
    """GB/s of keys and values that one decode step reads, against a plain read."""
    spent = interleaved({"ours": attention_step(backend, layer, sequences, 1, length), "read": reader}, repeats=15)
    read = sequences * length * layer.elements_per_token * 2
    return compare(
        f"decode attention {sequences} x {length}, {_shape(layer)}",
        read / spent["ours"].best / 1e9,
        READ_BYTES / spent["read"].best / 1e9,
        "plain read, same threads",
        "GB/s",
        better="higher",
        target=DECODE_TARGET,
    )


def prefill_row(backend: CpuBackend, layer: LayerSpec, length: int) -> Row:
    """Milliseconds for a prompt of `length` tokens, against the faster of SDPA's two ways."""
    spent = interleaved(
        {"ours": attention_step(backend, layer, 1, length, length), **sdpa_steps(layer, length)}, repeats=9
    )
    return compare(
        f"prefill attention {length}, {_shape(layer)}",
        spent["ours"].best * 1e3,
        min(spent["repeated"].best, spent["grouped"].best) * 1e3,
        f"torch {torch.__version__.partition('+')[0]} SDPA, contiguous",
        "ms",
        better="lower",
        target=PREFILL_TARGET,
    )


def _shape(layer: LayerSpec) -> str:
    products = "AVX512-BF16" if BF16_DOT else "bf16 by FMA"
    return f"{layer.query_heads} heads on {layer.kv_heads} of {layer.key_dim}, {products}"


def run() -> list[Row]:
    """All rows."""
    backend, reader = CpuBackend(), Reader()
    small, large = LayerSpec(9, 3, 64, 64), LayerSpec(32, 8, 128, 128)
    return [
        decode_row(backend, reader, small, 64, 1024),
        decode_row(backend, reader, large, 16, 4096),
        prefill_row(backend, small, 2048),
        prefill_row(backend, large, 2048),
    ]
