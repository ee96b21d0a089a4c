"""What a command or a process loads: nothing heavy that it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(module: str, *names: str) -> list[str]:
    """Which of these packages a fresh process has after importing the module."""
    program = f"import sys, {module}\nprint(*sorted(set({names!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("module", ["pagedkv.serve.run", "pagedkv.serve.top", "pagedkv.monitor.explain"])
def test_what_only_shows_or_serves_loads_no_engine(module: str) -> None:
    assert loaded(module, "torch", "transformers", "numba") == []


def test_an_engine_loads_transformers_only_with_a_model() -> None:
    assert loaded("pagedkv.engine.engine", "transformers") == []
