"""How long OpenMP threads spin before they sleep. Must be settled before torch loads its OpenMP runtime."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

SPIN_COUNT = "10000"


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Let idle threads of GNU OpenMP spin for half a millisecond rather than for many.

    By default they spin 300,000 turns at the end of every parallel region. Where another busy process has taken one of
    the cores, each region then waits for a thread that cannot run because its peer is spinning: a decode step of 5
    requests took 2 s with two engines on 2 cores, and 0.2 s with this. Alone on the machine it makes no difference.
    Whoever has set GOMP_SPINCOUNT or OMP_WAIT_POLICY, or has loaded torch already, keeps what they have.
    """
    if "torch" not in sys.modules and not environ.get("OMP_WAIT_POLICY"):
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
