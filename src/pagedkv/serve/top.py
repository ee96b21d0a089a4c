"""`pagedkv top`: a running server's pages, requests and figures in a terminal."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedkv.budget import format_bytes
from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.frames import Frame, PageState
from pagedkv.monitor.picture import Picture
from pagedkv.monitor.poolmap import CACHED, FREE, SHARED, USED, draw, legend

REDRAW_SECONDS = 0.25
RETRY_SECONDS = 1.0
_GLYPHS = {
    PageState.FREE: FREE,
    PageState.CACHED: CACHED,
    PageState.USED: USED,
    PageState.SHARED: SHARED,
    PageState.PINNED: SHARED,
}
_BYTES = ("pages", "state", "account", "parent", "since")


class Spectator:
    """Follows a server's stream in a thread of its own.

    Args:
        url: of the server.
        key: admin key, if it wants one.

    Attributes:
        picture: what the frames add up to.
        figures: the last two of them, whose differences are rates.
        problem: why nothing comes, while nothing does.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.picture = Picture()
        self.figures: deque[dict[str, Any]] = deque(maxlen=2)
        self.problem: str | None = "connecting"
        self.refused = False
        self.lock = threading.Lock()
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def start(self) -> None:
        """Begin to follow."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while not self.refused:
            try:
                self.follow()
            except urllib.error.HTTPError as error:
                self.refused = error.code in (401, 403, 404)
                self.problem = _message(error)
            except (OSError, ValueError) as error:
                self.problem = f"{self.url} does not answer: {getattr(error, 'reason', error)}"
            time.sleep(RETRY_SECONDS)

    def follow(self) -> None:
        """Read the stream until it ends."""
        request = urllib.request.Request(f"{self.url}/v1/pool/stream", headers=self._headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            for kind, value in _events(answer):
                with self.lock:
                    self.take(kind, value)

    def take(self, kind: str, value: dict[str, Any]) -> None:
        """Take one event."""
        if kind == "frame":
            self.picture.apply(decoded_frame(value))
        elif kind == "figures":
            if self.figures and value["t"] < self.figures[-1]["t"]:
                self.figures.clear()  # another engine
            self.figures.append(value)
        elif kind == "hello":
            self.figures.extend(value["figures"])
        self.problem = "the engine is being restarted" if kind == "down" else None


def _events(lines: Iterator[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events of the form that watching.py writes."""
    kind = ""
    for line in lines:
        if line.startswith(b"event: "):
            kind = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield kind, json.loads(line[6:])


def decoded_frame(value: dict[str, Any]) -> Frame:
    """A frame of JSON, whose bytes are base64."""
    frame = {key: base64.b64decode(part) if key in _BYTES else part for key, part in value.items()}
    frame["tables"] = [(row, first, count, base64.b64decode(ids)) for row, first, count, ids in value["tables"]]
    return frame


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code}"


def run(console: Console, url: str, key: str | None, once: bool) -> None:
    """Show a server until Ctrl-C; or once, as soon as something is known.

    Raises:
        InvalidRequestError: the server refuses, or (once) does not answer.
    """
    spectator = Spectator(url, key)
    spectator.start()
    if once or not console.is_terminal:
        _wait(spectator)
        with spectator.lock:
            console.print(screen(spectator, console.width, 40))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not spectator.refused:
            with spectator.lock:
                live.update(screen(spectator, console.width, console.height), refresh=True)
            time.sleep(REDRAW_SECONDS)
    raise InvalidRequestError(spectator.problem or "the server refuses")


def _wait(spectator: Spectator, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not (spectator.picture.num_pages and spectator.figures):
        if spectator.refused or time.monotonic() > end:
            raise InvalidRequestError(spectator.problem or f"{spectator.url} has not said anything in {seconds:g} s")
        time.sleep(0.05)


def screen(spectator: Spectator, width: int, height: int) -> Group:
    """All of it, in so many characters."""
    picture = spectator.picture
    lines = max(3, min(14, height // 3))
    inner = max(20, width - 4)
    parts: list[Any] = [Text(f"{spectator.url}  {spectator.problem or 'live'}", style="bold")]
    if spectator.figures:
        parts.append(_figures(spectator.figures))
    if picture.num_pages:
        states = _glyphs(picture.state[1:])
        title = f"{picture.num_pages:,} pages of {picture.page_size} tokens, step {picture.step:,}"
        parts.append(Panel(Group(draw(states, inner, lines), legend(states)), title=title, title_align="left"))
        parts.append(_requests(picture, max(1, height - lines - 12)))
    return Group(*parts)


def _glyphs(states: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.array([_GLYPHS[state] for state in PageState], np.uint8)[states]


def _figures(figures: deque[dict[str, Any]]) -> Table:
    now, before = figures[-1], figures[0]
    seconds = max(now["t"] - before["t"], 1e-9)

    def rate(name: str) -> str:
        return f"{(now[name] - before[name]) / seconds:.0f}/s" if len(figures) > 1 else "-"

    prompts = now["prompt_tokens"]
    table = Table.grid(padding=(0, 3))
    table.add_row(
        f"used {now['used'] / now['total']:.0%}",
        f"cached {now['cached'] / now['total']:.0%}",
        f"free {now['free'] / now['total']:.0%}",
        f"of {format_bytes(now['total'] * now['page_bytes'])}",
        f"shared pages save {format_bytes((now['owned'] - now['used']) * now['page_bytes'])}",
    )
    table.add_row(
        f"running {now['running']}",
        f"waiting {now['waiting']}",
        f"tokens {rate('generated_tokens')}",
        f"pages {rate('allocations')}, evicted {rate('evictions')}",
        f"prompt found in the cache {now['cached_tokens'] / prompts:.0%}" if prompts else "no prompt so far",
    )
    return table


def _requests(picture: Picture, most: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("request", "state", "prompt", "answer", "pages", "cached", "waits for"):
        table.add_column(name, justify="right" if name in ("prompt", "answer", "pages", "cached") else "left")
    entries = list(picture.requests.values())
    for entry in entries[:most]:
        waits = f"{entry['waits_on']}" + (f" ({entry['needed']}, {entry['free']} there)" if entry["needed"] else "")
        table.add_row(
            entry["id"].partition("-")[2][:12] or entry["id"],
            entry["state"],
            str(entry["prompt"]),
            str(entry["tokens"] - entry["prompt"]),
            str(entry["pages"]),
            f"{entry['cached'] / entry['prompt']:.0%}",
            waits,
        )
    if len(entries) > most:
        table.add_row(f"and {len(entries) - most} more")
    return table
