"""Every example runs as a user would run it, and prints what it promises. One function per example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"

FOREIGN_IMPORTS = """
import sys
before = set(sys.modules)
{program}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("foreign:", sorted(loaded - set(sys.stdlib_module_names) - {{"numpy", "pagedkv", "__mp_main__"}}))
"""


def run(*arguments: str) -> str:
    """Run Python with these arguments; returns what it printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_embed_allocator_tells_its_story() -> None:
    printed = run(str(EXAMPLES / "embed_allocator.py"))
    for sentence in (
        "bob begins like alice: 8 of his 9 tokens are cached, 1 is computed",
        "carol must wait: 3 pages are needed, 1 to be had now",
        "dave can never be served: 8 pages are needed, the pool has 6",
        "0 used + 3 cached + 3 free = 6 pages",
        "the system prompt is still warm: 8 of 8 tokens",
    ):
        assert sentence in printed


def test_embed_allocator_needs_numpy_only() -> None:
    program = f"import runpy; runpy.run_path({str(EXAMPLES / 'embed_allocator.py')!r}, run_name='__main__')"
    assert run("-c", FOREIGN_IMPORTS.format(program=program)).splitlines()[-1] == "foreign: []"


def test_importing_the_allocator_loads_neither_torch_nor_pydantic() -> None:
    assert run("-c", FOREIGN_IMPORTS.format(program="import pagedkv.cache")).splitlines()[-1] == "foreign: []"
