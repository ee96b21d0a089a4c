"""Runs a compiled C function on the OpenMP threads that torch itself uses.

Two OpenMP runtimes in one process spin against each other. Numba's own OpenMP layer binds to whatever libgomp its wheel
names, which need not be the one that torch brought (for numba 0.68 and torch 2.13 from PyPI it is not), so it is not
used: the very library that torch computes with is found and its entry point `GOMP_parallel` called, which libgomp,
libomp and Intel's runtime all export. Where there is none, kernels run on the calling thread alone, with a warning.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable

import torch
from threadpoolctl import threadpool_info

_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""The C type of a kernel: it takes the address of its arguments."""


class Threads:
    """The threads that kernels run on.

    Attributes:
        description: how kernels are run, for reports.
    """

    def __init__(self) -> None:
        self._parallel, self.description = _find_parallel()
        if self._parallel is None:
            warnings.warn(f"attention runs on one thread: {self.description}", RuntimeWarning, stacklevel=3)

    @property
    def count(self) -> int:
        """Most threads a kernel is run on: torch's own number."""
        return 1 if self._parallel is None else int(torch.get_num_threads())

    def run(self, function: int, argument: int, threads: int) -> None:
        """Call the C function at address `function` with the address `argument`, on up to `threads` threads at once."""
        if self._parallel is None or threads <= 1:
            _KERNEL(function)(argument)
        else:
            self._parallel(function, argument, min(threads, self.count), 0)


def _find_parallel() -> tuple[Callable[..., None] | None, str]:
    """GOMP_parallel of the OpenMP runtime that follows torch's thread count, and where it was found."""
    paths = [info["filepath"] for info in threadpool_info() if info["user_api"] == "openmp"]
    for path in paths:
        library = ctypes.CDLL(path)
        if not hasattr(library, "GOMP_parallel") or not _is_torchs(library):
            continue
        parallel = library.GOMP_parallel
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel, path
    found = ", ".join(paths) if paths else "none"
    return None, f"no OpenMP runtime that torch uses offers GOMP_parallel (runtimes found: {found})"


def _is_torchs(library: ctypes.CDLL) -> bool:
    """Whether this runtime is the one that torch sets: its thread limit changes when torch's does."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        return bool(library.omp_get_max_threads() == before + 1)
    finally:
        torch.set_num_threads(before)
