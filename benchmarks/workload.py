"""What the allocator and its peer are given to do, and how it is timed: the same text for both, without dependencies.

A script of cases is run in a process of its own, `python -m benchmarks.NAME CASE ...`, and prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PAGE = 16
VOCABULARY = 128_000
POOL = 100_000
CHURN_SECONDS = 2.0
FULL = 0.95

Case = Callable[[], float]


def decode_lengths(rows: int) -> list[int]:
    """Prompt lengths such that a sixteenth of the rows opens a page at each step."""
    return [512 + number % PAGE for number in range(rows)]


def tokens(count: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def warm_prompts(length: int, count: int) -> tuple[list[int], list[list[int]]]:
    """A prompt, and prompts that share its first 90 % in whole pages."""
    first = tokens(length, 2)
    shared = first[: length * 9 // 10 // PAGE * PAGE]
    return first, [shared + tokens(length - len(shared), 3 + number) for number in range(count)]


def churn_lengths(count: int) -> list[int]:
    """Prompt lengths of the churn: 128 pages in the mean."""
    rng = random.Random(4)
    return [rng.randint(16, 4096) for _ in range(count)]


def mean_of_windows(step: Callable[[], None], steps: int = 96) -> float:
    """Seconds of one step: the best mean over as many steps as a page has tokens, so that none's work is left out."""
    for _ in range(2 * PAGE):
        step()
    means = []
    for _ in range(steps // PAGE):
        start = time.perf_counter()
        for _ in range(PAGE):
            step()
        means.append((time.perf_counter() - start) / PAGE)
    return min(means)


def median(timed: Callable[[], float], repeats: int) -> float:
    """Seconds: `timed` says how long the part of it took that counts."""
    for _ in range(3):
        timed()
    return statistics.median(timed() for _ in range(repeats))


def churn(lengths: list[int], admit: Callable[[int], None], release: Callable[[int], None]) -> float:
    """Admissions and releases per second at 95 % of the pool. `admit(i)` and `release(i)` are for prompt i."""
    rng, idle, live, used = random.Random(5), list(range(len(lengths))), list[int](), 0
    pages = [-(-length // PAGE) for length in lengths]
    rng.shuffle(idle)
    busy, ops, measuring = 0.0, 0, False
    end = time.perf_counter() + 60.0
    while time.perf_counter() < end:
        at = rng.randrange(len(idle))
        idle[at], idle[-1] = idle[-1], idle[at]
        new = idle.pop()
        while used + pages[new] > POOL * FULL:
            if not measuring:
                measuring, end = True, time.perf_counter() + CHURN_SECONDS
            old = live.pop(rng.randrange(len(live)))
            start = time.perf_counter()
            release(old)
            busy, ops = busy + time.perf_counter() - start, ops + 1
            used -= pages[old]
            idle.append(old)
        start = time.perf_counter()
        admit(new)
        if measuring:
            busy, ops = busy + time.perf_counter() - start, ops + 1
        used += pages[new]
        live.append(new)
    return ops / busy


def resident_bytes() -> int:
    """Memory of this process that is in use, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def main(cases: Mapping[str, Case], names: list[str]) -> None:
    """Run the named cases, and print {name: figure}."""
    json.dump({name: cases[name]() for name in names}, sys.stdout)
    print()
