"""Kernels run on torch's own threads, or on the calling one with a warning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc, types

from pagedkv.attention.cpu import threads as module
from pagedkv.attention.cpu.threads import Threads
from pagedkv.attention.cpu.vectors import take_ticket


@cfunc(types.void(types.CPointer(types.int64)))
def count_call(counter: Any) -> None:
    take_ticket(counter)


def calls(threads: Threads, number: int) -> int:
    counter = np.zeros(1, dtype=np.int64)
    threads.run(count_call.address, counter.ctypes.data, number)
    return int(counter[0])


def test_the_runtime_is_the_one_that_torch_sets() -> None:
    threads, before = Threads(), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert threads.count == 3
        assert calls(threads, 3) == 3
        assert calls(threads, 8) == 3, "more threads than torch has"
    finally:
        torch.set_num_threads(before)
    assert torch.get_num_threads() == before


def test_one_thread_is_the_calling_one() -> None:
    assert calls(Threads(), 1) == 1


def test_without_a_runtime_there_is_one_thread_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "threadpool_info", list)
    with pytest.warns(RuntimeWarning, match=r"attention runs on one thread: .*\(runtimes found: none\)"):
        threads = Threads()
    assert threads.count == 1
    assert calls(threads, 4) == 1


def test_a_runtime_that_does_not_follow_torch_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_torchs", lambda library: False)
    with pytest.warns(RuntimeWarning, match=r"runtimes found: .+"):
        assert Threads().count == 1
