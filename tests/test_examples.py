"""Every example runs as a user would run it, and prints what it promises. One function per example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

FOREIGN_IMPORTS = """
import sys
before = set(sys.modules)
{program}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("foreign:", sorted(loaded - set(sys.stdlib_module_names) - {{"numpy", "pagedkv", "__mp_main__"}}))
"""


def run(*arguments: str) -> str:
    """Run Python with these arguments; returns what it printed."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_capacity_ends_in_a_plot(tmp_path: Path) -> None:
    page = tmp_path / "capacity.html"
    printed = run(str(EXAMPLES / "plan_capacity.py"), str(page))
    assert re.search(r"(\d+) requests of 800 tokens, (\d+) reserving 4096", printed)
    running = [float(number) for number in re.findall(r": ([\d.]+) at once", printed)]
    assert len(running) == 3
    assert running[0] == max(running)
    assert "plotly-graph-div" in page.read_text()


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


@pytest.mark.model
def test_generate_answers_every_prompt() -> None:
    printed = run(str(EXAMPLES / "generate.py"))
    assert "'The capital of France is' -> ' Paris" in printed
    assert printed.count(" -> ") == 3


@pytest.mark.model
def test_drive_engine_by_hand() -> None:
    printed = run(str(EXAMPLES / "drive_engine.py"))
    assert re.search(r"story, given up after \d+ tokens", printed)
    assert "fjord: '" in printed
    assert "glacier: '" in printed
    assert "pages: 0 used" in printed


def readme_blocks() -> list[str]:
    """The README's Python."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_shows_how_to_embed_the_allocator() -> None:
    run("-c", readme_blocks()[0])


@pytest.mark.model
def test_the_readme_shows_how_to_generate() -> None:
    assert "Paris" in run("-c", readme_blocks()[1])


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, "[["),
        (1, "NamespaceUsage(used=5, cached=0, promised=0, floor=8, ceiling=32)"),
        (2, "64\n"),
        (3, "[1 2]\nTrue\n"),
    ],
)
def test_the_allocators_description_shows_what_happens(number: int, printed: str) -> None:
    text = (ROOT / "docs" / "allocator.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 4
    assert printed in run("-c", programs[number])
