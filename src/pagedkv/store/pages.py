"""The page tensors of a whole model: one key and one value tensor per layer, all with the same page ids.

Owns the bytes and copies them; knows nothing about who holds a page. The physical order belongs to the backend.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.interface import AttentionBackend, LayerPages
from pagedkv.budget import format_bytes, page_bytes
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.spec import ModelSpec


class PageStore:
    """Pages 1 ... num_pages of every layer of a model, and page 0, the null page, which stays zero.

    Attributes:
        backend: who reads and writes the pages.
        layers: the page tensors, one entry per layer of the spec, in its order.
        num_pages: usable pages; each tensor has one more.
        page_size: tokens of a page.
        dtype: of keys and values.
    """

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> None:
        """Allocate zeroed pages.

        Raises:
            ConfigError: if num_pages is less than 1, or the backend does not take this page size or dtype.
            MemoryError: the machine has not so much memory.
            UnsupportedModelError: if the backend cannot run a layer of the spec.
        """
        if num_pages < 1:
            raise ConfigError(f"a store of {num_pages} pages; at least 1 is needed")
        page = page_bytes(spec, page_size, str(dtype).removeprefix("torch."))
        _check_memory(f"{num_pages} pages", (num_pages + 1) * page)
        self.backend = backend
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.layers: tuple[LayerPages, ...] = tuple(
            backend.allocate(layer, num_pages + 1, page_size, dtype) for layer in spec.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all page tensors, the null page included."""
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers)

    def resize(self, num_pages: int, copies: NDArray[np.int32]) -> None:
        """Have another number of pages: copy (source, target) pages first, then keep pages 1 ... num_pages.

        One layer's tensors are made anew at a time. If memory runs out, the store holds what it held.

        Raises:
            ConfigError: num_pages is less than 1. InvalidRequestError: as `copy_pages`.
            MemoryError: the machine has not so much memory; nothing has changed.
        """
        if num_pages < 1:
            raise ConfigError(f"a store of {num_pages} pages; at least 1 is needed")
        more = num_pages - self.num_pages
        _check_memory(f"{num_pages} pages instead of {self.num_pages}", more * (self.nbytes // (self.num_pages + 1)))
        self.copy_pages(copies[:, 0], copies[:, 1])
        kept = min(num_pages, self.num_pages) + 1
        self.num_pages = min(num_pages, self.num_pages)  # what is true whichever layer fails
        layers = list(self.layers)
        for at, old in enumerate(layers):
            new = self.backend.allocate(old.spec, num_pages + 1, self.page_size, self.dtype)
            new.key[:kept], new.value[:kept] = old.key[:kept], old.value[:kept]
            layers[at] = new
            self.layers = tuple(layers)
        self.num_pages = num_pages

    def copy_pages(self, source: NDArray[np.int32], target: NDArray[np.int32]) -> None:
        """Copy pages in all layers: target[i] becomes a copy of what source[i] held before the call.

        Raises:
            InvalidRequestError: if the arrays differ in length, an id is not a usable page, or a target is named twice.
        """
        if len(source) != len(target):
            raise InvalidRequestError(f"{len(source)} pages cannot be copied to {len(target)}")
        if not len(source):
            return
        for name, ids in (("source", source), ("target", target)):
            if ids.min() < 1 or ids.max() > self.num_pages:
                wrong = int(ids.min()) if ids.min() < 1 else int(ids.max())
                raise InvalidRequestError(f"{name} page {wrong} is not one of the pages 1 to {self.num_pages}")
        if len(np.unique(target)) != len(target):
            raise InvalidRequestError(f"a page is named twice among the {len(target)} targets {target.tolist()}")
        for layer in self.layers:
            self.backend.copy_pages(layer, source, target)


def _check_memory(what: str, nbytes: int) -> None:
    """Raise MemoryError for what would not fit: the system hands out more than it has, and ends who uses it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return  # it does not say
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), nbytes)
    if nbytes > free:
        raise MemoryError(f"{what} take {format_bytes(nbytes)} of memory; {format_bytes(free)} are free")
