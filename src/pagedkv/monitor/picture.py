"""Picture: what a spectator who has seen all frames knows; a full frame of it starts another spectator."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.monitor.frames import Frame


class Picture:
    """The state that frames add up to.

    Attributes:
        state: uint8 [num_pages + 1], PageState of each page; page 0 is the null page. account, parent: int32.
        since: float32 [num_pages + 1], when something happened to the page last, in seconds like a frame's t.
        tables: row -> int32 page ids. requests: key -> entry, as in a frame. accounts: account -> name.
    """

    def __init__(self) -> None:
        self.t = 0.0
        self.step = self.num_pages = self.page_size = 0
        self._begin(0)

    def _begin(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.state = np.zeros(num_pages + 1, np.uint8)
        self.account = np.zeros(num_pages + 1, np.int32)
        self.parent = np.zeros(num_pages + 1, np.int32)
        self.since = np.zeros(num_pages + 1, np.float32)
        self.tables: dict[int, NDArray[np.int32]] = {}
        self.requests: dict[int, Frame] = {}
        self.accounts: dict[int, str] = {}

    def apply(self, frame: Frame) -> None:
        """Take one frame more."""
        if frame["full"]:
            self._begin(frame["num_pages"])
        self.t, self.step, self.page_size = frame["t"], frame["step"], frame["page_size"]
        pages = np.frombuffer(frame["pages"], np.int32)
        self.state[pages] = np.frombuffer(frame["state"], np.uint8)
        self.account[pages] = np.frombuffer(frame["account"], np.int32)
        self.parent[pages] = np.frombuffer(frame["parent"], np.int32)
        self.since[pages] = np.frombuffer(frame["since"], np.float32) if frame["full"] else self.t
        self.accounts.update({int(account): name for account, name in frame["accounts"].items()})
        for row, first, count, ids in frame["tables"]:
            before = self.tables.get(row, np.zeros(0, np.int32))[:first]
            self.tables[row] = np.concatenate((before, np.frombuffer(ids, np.int32)))[:count]
            if not count:
                del self.tables[row]
        for key in frame["gone"]:
            self.requests.pop(key, None)
        self.requests.update({entry["key"]: entry for entry in frame["requests"]})

    def full_frame(self) -> Frame:
        """All of it as one frame."""
        pages = np.arange(1, self.num_pages + 1, dtype=np.int32)
        return {
            "t": self.t,
            "step": self.step,
            "full": True,
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "pages": pages.tobytes(),
            "state": self.state[1:].tobytes(),
            "account": self.account[1:].tobytes(),
            "parent": self.parent[1:].tobytes(),
            "since": self.since[1:].tobytes(),
            "accounts": self.accounts,
            "tables": [(row, 0, ids.size, ids.tobytes()) for row, ids in self.tables.items()],
            "requests": list(self.requests.values()),
            "gone": [],
        }

    def page(self, page: int) -> dict[str, Any]:
        """What is known about one page: its state, sharers, parent, and how long ago something happened to it."""
        by_row = {entry["row"]: entry["id"] for entry in self.requests.values() if entry["row"] >= 0}
        sharers = [by_row[row] for row, ids in self.tables.items() if page in ids and row in by_row]
        return {
            "page": page,
            "state": int(self.state[page]),
            "sharers": sharers,
            "parent": int(self.parent[page]),
            "account": self.accounts.get(int(self.account[page]), ""),
            "since": float(self.since[page]),
        }
