"""Thousands of streaming chats at once against `pagedkv serve`, on the default model and a small pool.

Locust, in an environment of its own, opens them all; a share of the clients hangs up; once the engine's process is
killed. Afterwards no page may be in use and the auditor must be content. LOAD_CHATS says how many chats (2,000).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers import ROOT, Peer
from benchmarks.report import Row

LOCUST = Peer("locust", ("locust==2.47.0",))
CHATS = int(os.environ.get("LOAD_CHATS", "2000"))
TOKENS = 8
PORT = 8765
STALL_SECONDS = 30.0
"""A stream that has begun is never silent for longer."""

GROWTH = 1.05
"""By so much memory may grow from the second time to the third."""

MEMORY = "64MiB"


def run() -> list[Row]:
    """All at once, and again; the same with 30 % of the clients hanging up; the same with the engine killed once."""
    rows = again()
    for words, hang_up, kill in (
        (", 30 % hang up", 0.3, False),
        (", the engine killed once", 0.0, True),
    ):
        with server() as process:
            rows += scenario(f"{CHATS:,} chats{words}", hang_up, kill, process)
    return rows


def again() -> list[Row]:
    """The same load three times over: memory that the second leaves behind, the third must do with."""
    with server() as process:
        rows = scenario(f"{CHATS:,} chats", 0.0, False, process)
        resident = []
        for _ in range(2):
            scenario("again", 0.0, False, process)
            resident.append(_memory(process))
    growth = resident[1] / resident[0]
    return [*rows, _bounded("resident memory after the third time, of that after the second", growth, GROWTH, "ratio")]


def scenario(words: str, hang_up: float, kill: bool, process: subprocess.Popen[bytes]) -> list[Row]:
    """Run one load and count what became of it; raises if a chat was lost or a page leaked."""
    killer = threading.Timer(15.0, lambda: os.kill(_worker(process.pid), signal.SIGKILL))
    if kill:
        killer.start()
    start = time.monotonic()
    found = chats(hang_up)
    seconds = time.monotonic() - start
    ended = found["complete"] + found["refused"] + found["left"]
    if not kill and (found["broken"] or ended != CHATS):
        raise AssertionError(f"{words}: {ended} of {CHATS} ended well; {found['broken'][:3]}")
    if ended + len(found["broken"]) != CHATS:
        raise AssertionError(f"{words}: {CHATS - ended - len(found['broken'])} chats have no end")
    used = _used_pages()
    if used:
        raise AssertionError(f"{words}: {used} pages are in use after all chats have ended")
    return [
        _row(f"{words}: complete", found["complete"], "chats"),
        _row(f"{words}: refused with 429", found["refused"], "chats"),
        _row(f"{words}: told of an error", len(found["broken"]), "chats"),
        _row(f"{words}: in all", seconds, "s"),
        _bounded(f"{words}: longest silence of a stream", float(found["stall"]), STALL_SECONDS, "s"),
        _row(f"{words}: resident afterwards", _memory(process) / 2**20, "MiB"),
    ]


def chats(hang_up: float) -> dict[str, Any]:
    """What became of the chats that locust opened."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "chats.json"
        environment = {
            **os.environ,
            "CHATS_HANG_UP": str(hang_up),
            "CHATS_RESULT": str(result),
            "CHATS_TOKENS": str(TOKENS),
        }
        command = [
            str(LOCUST.python()),
            "-m",
            "locust",
            "-f",
            "benchmarks/locust_chats.py",
            "--headless",
            "--only-summary",
        ]
        options = ["-u", str(CHATS), "-r", str(max(CHATS // 4, 1)), "--host", f"http://127.0.0.1:{PORT}"]
        process = subprocess.Popen([*command, *options], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        _wait_for_silence(process)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _wait_for_silence(process: subprocess.Popen[bytes]) -> None:
    """Until all users have been started and nothing has been going on for a while."""
    quiet, end = 0, time.monotonic() + 1800
    while quiet < 5:
        time.sleep(1.0)
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError("locust ended early, or the load took more than half an hour")
        quiet = 0 if _active_connections() else quiet + 1


def _active_connections() -> int:
    """Established connections to the server, from /proc/net/tcp."""
    wanted = f":{PORT:04X}"
    lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    return sum(line.split()[2].endswith(wanted) and line.split()[3] == "01" for line in lines)


@contextmanager
def server(memory: str = MEMORY) -> Iterator[subprocess.Popen[bytes]]:
    """`pagedkv serve` with so much memory for keys and values, until the block ends."""
    options = ["--port", str(PORT), "--kv-memory", memory, "--max-seq-len", "1024", "--max-queue-size", str(CHATS)]
    command = [str(Path(sys.executable).parent / "pagedkv"), "serve", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not _healthy():
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError("the server did not start")
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _healthy() -> bool:
    try:
        return bool(_get("/health"))
    except (urllib.error.URLError, ConnectionError):
        return False


def _used_pages() -> int:
    """Pages in use once the server is idle again; it has a few seconds to notice who has left."""
    end = time.monotonic() + 30
    while True:
        try:
            used = _get("/v1/pool/snapshot")["page_state"].count(2)
        except urllib.error.HTTPError:
            used = -1  # the engine is being restarted
        if not used or time.monotonic() > end:
            return int(used)
        time.sleep(0.5)


def _get(path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=30) as answer:
        return json.loads(answer.read())


def _worker(parent: int) -> int:
    """Process id of the engine."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="ascii").split()
    return int(children[-1])


def _memory(process: subprocess.Popen[bytes]) -> int:
    """Bytes that the server and its engine have in use."""
    return sum(_resident(pid) for pid in (process.pid, _worker(process.pid)))


def _resident(pid: int) -> int:
    """Bytes of memory that a process has in use."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096


def _bounded(work: str, figure: float, bound: float, unit: str) -> Row:
    return Row(work, figure, bound, "bound", unit, None, None, figure <= bound)


def _row(work: str, figure: float, unit: str) -> Row:
    return Row(work, float(figure), None, "", unit, None, None, None)
