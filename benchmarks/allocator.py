"""The allocator alone: what a decode step, an admission, an eviction and a release cost, on one core.

The floor that each is compared with is the least any manager must do: touch one number per row or page with NumPy.
The limit of the first row is absolute, as a manager that takes longer would show in the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.report import Row, compare, interleaved
from pagedkv.cache import Admitted, KVCacheManager

PAGE = 16
DECODE_LIMIT_MS = 0.4


def run() -> list[Row]:
    """A decode step, idle rows beside it, a long warm admission, and a round of evictions and releases."""
    return [decode_step(), idle_rows(), warm_admission(), churn()]


def decode_step() -> Row:
    """One token more for each of 4,096 rows, 1/16 of which open a page and index one."""
    manager, rows = _decoding(4096)
    seconds = interleaved({"ours": _step(manager, rows)}, 128)["ours"].best
    return compare(
        "decode step, 4096 rows, best of 128", seconds * 1e3, DECODE_LIMIT_MS, "limit", "ms", better="lower", target=1.0
    )


def idle_rows() -> Row:
    """The same 256 rows decode while 3,840 others sit idle, against the 256 alone."""
    crowded, all_rows = _decoding(4096)
    alone, rows = _decoding(256)
    timing = interleaved({"ours": _step(crowded, all_rows[:256]), "alone": _step(alone, rows)}, 96)
    return compare(
        "decode step, 256 rows beside 3840 idle ones",
        timing["ours"].median * 1e3,
        timing["alone"].median * 1e3,
        "256 rows alone",
        "ms",
        better="lower",
        target=0.5,
    )


def warm_admission() -> Row:
    """Admit and release 32,768 tokens of which 90 % are cached, against hashing them alone."""
    rng = np.random.default_rng(0)
    manager = KVCacheManager(3 * 2048, PAGE, max_rows=4, max_seq_len=40_000)
    prompt = rng.integers(0, 128_000, 32_768).astype(np.int32)
    _release_computed(manager, prompt)
    prompts = []
    for _ in range(24):
        fresh = prompt.copy()
        fresh[29_488:] = rng.integers(0, 128_000, 32_768 - 29_488)
        prompts.append(fresh)
    turn = iter(prompts * 4)

    def admit() -> None:
        outcome = manager.admit(next(turn))
        assert isinstance(outcome, Admitted)
        assert outcome.cached_tokens >= 29_488 // PAGE * PAGE
        manager.release([outcome.sequence])

    def hash_only() -> None:
        manager.index.hasher.page_sums(prompt.reshape(-1, PAGE), np.arange(2048))

    timing = interleaved({"ours": admit, "hash": hash_only}, 48)
    return compare(
        "admit + release 32,768 tokens, 90 % cached",
        timing["ours"].median * 1e3,
        timing["hash"].median * 1e3,
        "hashing the prompt alone",
        "ms",
        better="lower",
    )


def churn() -> Row:
    """Admit, commit and release 2,048 pages that evict as many, in pages per second."""
    rng = np.random.default_rng(1)
    manager = KVCacheManager(2048 + 64, PAGE, max_rows=4, max_seq_len=40_000)
    prompts = iter([rng.integers(0, 128_000, 2048 * PAGE).astype(np.int32) for _ in range(40)])
    target = np.zeros(2048 * PAGE, np.int32)
    source = target + 1

    def copy_tokens() -> None:
        target[:] = source

    timing = interleaved({"ours": lambda: _release_computed(manager, next(prompts)), "copy": copy_tokens}, 30)
    return compare(
        "admit + commit + release 2,048 pages, evicting as many",
        2048 / timing["ours"].median,
        2048 / timing["copy"].median,
        "copying the tokens alone",
        "pages/s",
        better="higher",
    )


def _decoding(count: int) -> tuple[KVCacheManager, np.ndarray]:
    """`count` rows of 512 to 527 tokens, all computed."""
    rng = np.random.default_rng(2)
    manager = KVCacheManager(count * 48, PAGE, max_rows=count, max_seq_len=1024)
    rows = []
    for number in range(count):
        outcome = manager.admit(rng.integers(0, 128_000, 512 + number % PAGE).astype(np.int32))
        assert isinstance(outcome, Admitted)
        rows.append(outcome.sequence.row)
        manager.commit(rows[-1:], 512 + number % PAGE)
    return manager, np.array(rows)


def _step(manager: KVCacheManager, rows: np.ndarray) -> Callable[[], None]:
    """What an engine asks of the manager in one decode step."""
    tokens = np.full(rows.size, 7, np.int32)

    def step() -> None:
        manager.extend(rows, tokens)
        manager.commit(rows, 1)

    return step


def _release_computed(manager: KVCacheManager, prompt: np.ndarray) -> None:
    """Admit a prompt, compute it, and release it."""
    outcome = manager.admit(prompt)
    assert isinstance(outcome, Admitted)
    manager.commit([outcome.sequence.row], prompt.size - outcome.cached_tokens)
    manager.release([outcome.sequence])
