"""Peers in environments of their own: made once under build/peers, and run on one core.

Knows nothing about what is measured. A peer that cannot be had (no network, no such processor) is no failure of the
benchmark: `PeerUnavailableError` says why in one line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "peers"
INSTALL_SECONDS = 1800.0

Run = Callable[..., "subprocess.CompletedProcess[str]"]


class PeerUnavailableError(RuntimeError):
    """The peer cannot be installed or run here; the text is one line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What is installed, and what is taken out again since it breaks the import.

    Attributes:
        name: of its environment.
        packages: exact pins. unwanted: names.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    def python(self, folder: Path = FOLDER, run: Run = subprocess.run) -> Path:
        """The interpreter of its environment, which is made if it is not there or was made with other pins.

        Raises:
            PeerUnavailableError: a package cannot be installed.
        """
        home = folder / self.name
        python, marker = home / "bin" / "python", home / ".installed"
        wanted = "\n".join((*self.packages, *(f"-{name}" for name in self.unwanted)))
        if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
            return python
        print(f"installing {', '.join(self.packages)} into {home} ...", file=sys.stderr)
        shutil.rmtree(home, ignore_errors=True)
        _checked(run, [sys.executable, "-m", "venv", str(home)])
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        _checked(run, [*pip, "install", *self.packages])
        if self.unwanted:
            _checked(run, [*pip, "uninstall", "--yes", *self.unwanted])
        marker.write_text(wanted, encoding="utf-8")
        return python


def figures(python: Path, module: str, cases: Sequence[str], *, seconds: float, run: Run = subprocess.run) -> object:
    """What `python -m module CASE ...` prints as JSON in its last line, run in this repository on one core.

    Raises:
        PeerUnavailableError: it failed, took longer than `seconds`, or printed something else.
    """
    done = _checked(run, [*_pinned(), str(python), "-m", module, *cases], seconds=seconds)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise PeerUnavailableError(f"{module} printed no figures but {done.stdout[-200:]!r}") from None


def _pinned() -> list[str]:
    """A prefix that keeps a command on the last core that this process may use; none where that cannot be done."""
    if shutil.which("taskset") is None or not hasattr(os, "sched_getaffinity"):
        print("taskset is not installed: the benchmark is not pinned to a core", file=sys.stderr)
        return []
    return ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0)))]


def _checked(run: Run, command: list[str], seconds: float = INSTALL_SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        done = run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"{command[0]}: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise PeerUnavailableError(f"{' '.join(command[:6])} ... exited with {done.returncode}: {lines[-1]}")
    return done
