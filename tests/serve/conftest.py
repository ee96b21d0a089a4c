"""A server for all tests of a module, whose process finds the fake engine by its file's name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_support import Served, serving


@pytest.fixture(scope="session", autouse=True)
def _import_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def served(_import_path: None) -> Iterator[Served]:
    with serving() as server:
        yield server
