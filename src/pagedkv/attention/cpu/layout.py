"""The physical order of page tensors on the CPU, and how tokens get into it.

A group is 16 tokens; a page holds page_size / 16 of them. The two innermost dimensions are a pair block (see
blocks.py), 16 lanes of two elements, stored as 16 x 2 for bfloat16 and as 2 x 16 for float32:

    key    [page, kv_head, page_size / 16, key_dim / 2, pair]       lanes are tokens, the two are neighbours of key_dim
    value  [page, kv_head, page_size / 2, value_dim / 16, pair]     lanes are elements, the two are neighbouring tokens

Either way a group of one head is contiguous: 16 * dim elements. Knows nothing about who owns a page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import cfunc, njit, types
from numba.np.numpy_support import carray, from_dtype

from pagedkv.attention.cpu.vectors import pointer_i64, pointer_to, pointer_type, take_ticket
from pagedkv.attention.interface import LayerPages
from pagedkv.errors import ConfigError, UnsupportedModelError
from pagedkv.spec import LayerSpec

DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes in which keys and values can be stored, and in which queries can arrive."""

MIN_DIM, MAX_DIM = 32, 256
"""Least and greatest head dim; it must be a multiple of 16."""

WRITE_BLOCK = 16
"""Tokens that a thread writes for one ticket."""

WRITE_ARGUMENTS = np.dtype(
    [
        ("counter", np.int64),  # address of int64: tickets for blocks of tokens
        ("tokens", np.int64),
        ("slots", np.int64),  # address of int64 [tokens]
        ("source", np.int64),  # addresses of the tensors; strides in elements
        ("token_stride", np.int64),
        ("head_stride", np.int64),
        ("target", np.int64),
        ("kv_heads", np.int64),
        ("dim", np.int64),
        ("page_size", np.int64),
        ("is_value", np.int64),
    ],
    align=True,
)
"""What the write kernel is told: one tensor of one layer."""

WRITE_SIGNATURE = types.void(pointer_type(from_dtype(WRITE_ARGUMENTS)))


def check_supported(layer: LayerSpec, page_size: int, dtype: torch.dtype) -> None:
    """Raise unless the kernel can run this layer.

    Raises:
        UnsupportedModelError: for a head dim that is not a multiple of 16 from 32 to 256.
        ConfigError: for a page size that is not a positive multiple of 16, or a dtype that is not in DTYPES.
    """
    for name, dim in (("key_dim", layer.key_dim), ("value_dim", layer.value_dim)):
        if dim % 16 or not MIN_DIM <= dim <= MAX_DIM:
            raise UnsupportedModelError(
                f"{name} is {dim}; the CPU kernel takes multiples of 16 from {MIN_DIM} to {MAX_DIM}"
            )
    if page_size < 16 or page_size % 16:
        raise ConfigError(f"page size is {page_size}; the CPU kernel takes positive multiples of 16")
    if dtype not in DTYPES:
        names = " or ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ConfigError(f"KV dtype is {str(dtype).removeprefix('torch.')}; the CPU kernel stores {names}")


def allocate_pages(layer: LayerSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> LayerPages:
    """Zeroed page tensors in the physical order."""
    check_supported(layer, page_size, dtype)
    pair = (16, 2) if dtype == torch.bfloat16 else (2, 16)
    shape = (num_pages, layer.kv_heads)
    key = torch.zeros(*shape, page_size // 16, layer.key_dim // 2, *pair, dtype=dtype)
    value = torch.zeros(*shape, page_size // 2, layer.value_dim // 16, *pair, dtype=dtype)
    return LayerPages(layer, key, value)


def page_size_of(pages: LayerPages) -> int:
    """Tokens of a page."""
    return int(pages.key.shape[2]) * 16


def to_logical(pages: LayerPages) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of key and value in the order [page, token, kv_head, dim]."""
    num_pages, page_size, layer = pages.key.shape[0], page_size_of(pages), pages.spec
    key_order, value_order = _orders(pages.key.dtype)
    key = pages.key.permute(key_order).reshape(num_pages, page_size, layer.kv_heads, layer.key_dim)
    value = pages.value.permute(value_order).reshape(num_pages, page_size, layer.kv_heads, layer.value_dim)
    return key.clone(), value.clone()


def from_logical(pages: LayerPages, key: torch.Tensor, value: torch.Tensor) -> None:
    """Fill the page tensors from key and value in the order [page, token, kv_head, dim]."""
    for tensor, source, order in zip((pages.key, pages.value), (key, value), _orders(pages.key.dtype), strict=True):
        view = tensor.permute(order)
        view.copy_(source.reshape(view.shape))


def _orders(dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Permutations of key and value from the physical to the logical order, dims still split."""
    if dtype == torch.bfloat16:
        return (0, 2, 4, 1, 3, 5), (0, 2, 5, 1, 3, 4)
    return (0, 2, 5, 1, 3, 4), (0, 2, 4, 1, 3, 5)


@njit(error_model="numpy")
def _write_keys(a: Any, source: Any, read: Any, target: Any, page: Any, head: Any, offset: Any, bf16: Any) -> Any:
    """One token's key of one head: its elements go to one lane of the group's vectors."""
    place = ((page * a.kv_heads + head) * a.page_size + offset // 16 * 16) * a.dim
    lane = offset % 16 * (2 if bf16 else 1)
    near = 1 if bf16 else 16
    for d in range(0, a.dim, 2):
        target[place + 16 * d + lane] = source[read + d]
        target[place + 16 * d + lane + near] = source[read + d + 1]


@njit(error_model="numpy")
def _write_values(a: Any, source: Any, read: Any, target: Any, page: Any, head: Any, offset: Any, bf16: Any) -> Any:
    """One token's value of one head: its elements go to one half of the token pair's vectors."""
    place = ((page * a.kv_heads + head) * a.page_size + offset // 2 * 2) * a.dim
    place += offset % 2 * (1 if bf16 else 16)
    step = 2 if bf16 else 1
    for d in range(0, a.dim, 16):
        for lane in range(16):
            target[place + 2 * d + step * lane] = source[read + d + lane]


def build_write_kernel(bf16: bool, version: str) -> Any:
    """The compiled write for one dtype; `version` as in kernel.build_kernel."""

    @cfunc(WRITE_SIGNATURE, error_model="numpy", cache=True)
    def write(arguments: Any) -> None:
        captured = version  # noqa: F841  so that it is part of the cache key
        a = carray(arguments, 1)[0]
        source, target, slots = pointer_to(a.source, bf16), pointer_to(a.target, bf16), pointer_i64(a.slots)
        counter = pointer_i64(a.counter)
        first = take_ticket(counter) * WRITE_BLOCK
        while first < a.tokens:
            for token in range(first, min(first + WRITE_BLOCK, a.tokens)):
                if slots[token] < 0:
                    continue
                page, offset = slots[token] // a.page_size, slots[token] % a.page_size
                for head in range(a.kv_heads):
                    read = token * a.token_stride + head * a.head_stride
                    if a.is_value:
                        _write_values(a, source, read, target, page, head, offset, bf16)
                    else:
                        _write_keys(a, source, read, target, page, head, offset, bf16)
            first = take_ticket(counter) * WRITE_BLOCK

    return write
