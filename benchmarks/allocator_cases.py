"""Our allocator at work: `python -m benchmarks.allocator_cases CASE ...`. See workload.py."""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks import workload
from benchmarks.workload import PAGE, POOL
from pagedkv.cache import Admitted, KVCacheManager, Sequence

Tokens = NDArray[np.int32]


def decode(rows: int) -> float:
    """Seconds of one decode step of so many rows."""
    manager, at = decoding(rows)
    return workload.mean_of_windows(step(manager, at))


def decoding(count: int) -> tuple[KVCacheManager, NDArray[np.int64]]:
    """Rows of 512 to 527 tokens, all computed."""
    rng = np.random.default_rng(2)
    manager = KVCacheManager(count * 48, PAGE, max_rows=count, max_seq_len=1024)
    rows = []
    for length in workload.decode_lengths(count):
        rows.append(_admit(manager, rng.integers(0, workload.VOCABULARY, length).astype(np.int32)).row)
        manager.commit(rows[-1:], length)
    return manager, np.array(rows)


def step(manager: KVCacheManager, rows: NDArray[np.int64]) -> partial[None]:
    """What an engine asks of the manager in one decode step."""
    return partial(_step, manager, rows, np.full(rows.size, 7, np.int32))


def _step(manager: KVCacheManager, rows: NDArray[np.int64], ids: Tokens) -> None:
    manager.extend(rows, ids)
    manager.commit(rows, 1)


def warm_admission(length: int, repeats: int = 40) -> float:
    """Seconds to admit a prompt of which 90 % are cached."""
    first, prompts = workload.warm_prompts(length, 8)
    manager = KVCacheManager(3 * length // PAGE + 100, PAGE, max_rows=4, max_seq_len=length + PAGE)
    _serve(manager, np.array(first, np.int32))
    turns = iter([np.array(prompt, np.int32) for prompt in prompts] * repeats)

    def timed() -> float:
        prompt = next(turns)
        start = time.perf_counter()
        answer = manager.admit(prompt)
        spent = time.perf_counter() - start
        assert isinstance(answer, Admitted)
        assert answer.cached_tokens >= length * 9 // 10 // PAGE * PAGE
        manager.release([answer.sequence])
        return spent

    return workload.median(timed, repeats)


def allocate(pages: int = 2048) -> float:
    """Seconds to admit a prompt of so many pages, for which as many cached ones are evicted."""
    return _allocate_and_free(pages)[0]


def free(pages: int = 2048) -> float:
    """Seconds to release a computed prompt of so many pages."""
    return _allocate_and_free(pages)[1]


def _allocate_and_free(pages: int) -> tuple[float, float]:
    manager = KVCacheManager(pages + 64, PAGE, max_rows=4, max_seq_len=pages * PAGE + PAGE)
    prompts = iter([np.array(workload.tokens(pages * PAGE, seed), np.int32) for seed in range(24)])
    freed: list[float] = []

    def timed() -> float:
        prompt = next(prompts)
        start = time.perf_counter()
        sequence = _admit(manager, prompt)
        spent = time.perf_counter() - start
        manager.commit([sequence.row], prompt.size)
        start = time.perf_counter()
        manager.release([sequence])
        freed.append(time.perf_counter() - start)
        return spent

    allocated = workload.median(timed, 20)
    return allocated, float(np.median(freed[3:]))


def churn() -> float:
    """Admissions (computed at once) and releases per second in a nearly full pool."""
    lengths = workload.churn_lengths(3000)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, workload.VOCABULARY, length).astype(np.int32) for length in lengths]
    manager = KVCacheManager(POOL, PAGE, max_rows=len(lengths), max_seq_len=4096)
    live: dict[int, Sequence] = {}

    def admit(number: int) -> None:
        answer = manager.admit(prompts[number])
        assert isinstance(answer, Admitted)
        live[number] = answer.sequence
        manager.commit([answer.sequence.row], prompts[number].size - answer.cached_tokens)

    return workload.churn(lengths, admit, lambda number: manager.release([live.pop(number)]))


def hand_out_table() -> float:
    """Seconds to get the block table of 1,024 rows of 2,048 pages that a kernel reads."""
    manager = KVCacheManager(1024, PAGE, max_rows=1024, max_seq_len=2048 * PAGE)
    start = time.perf_counter()
    for _ in range(1000):
        table = manager.table.table
    assert table.shape == (1024, 2048)
    return (time.perf_counter() - start) / 1000


def bytes_per_page() -> float:
    """Bytes of memory per page when all pages are cached."""
    prompts = [np.random.default_rng(seed).integers(0, workload.VOCABULARY, 2000 * PAGE) for seed in range(50)]
    warm = KVCacheManager(4096, PAGE, max_rows=4, max_seq_len=2000 * PAGE + PAGE)
    _serve(warm, prompts[0].astype(np.int32))
    before = workload.resident_bytes()
    manager = KVCacheManager(POOL, PAGE, max_rows=4, max_seq_len=2000 * PAGE + PAGE)
    for prompt in prompts:
        _serve(manager, prompt.astype(np.int32))
    assert manager.usage().cached == POOL
    return (workload.resident_bytes() - before) / POOL


def _admit(manager: KVCacheManager, prompt: Tokens) -> Sequence:
    answer = manager.admit(prompt)
    assert isinstance(answer, Admitted)
    return answer.sequence


def _serve(manager: KVCacheManager, prompt: Tokens) -> None:
    sequence = _admit(manager, prompt)
    manager.commit([sequence.row], prompt.size)
    manager.release([sequence])


CASES: dict[str, workload.Case] = {
    **{f"decode {rows}": partial(decode, rows) for rows in (256, 1024, 4096, 16_384)},
    **{f"warm {length}": partial(warm_admission, length) for length in (2048, 32_768)},
    "allocate": allocate,
    "free": free,
    "churn": churn,
    "table": hand_out_table,
    "memory": bytes_per_page,
}

if __name__ == "__main__":
    workload.main(CASES, sys.argv[1:])
