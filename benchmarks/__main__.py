"""`python -m benchmarks [NAME ...]`: run the benchmarks of this folder, all of them or those named.

A benchmark is a module here that defines `run() -> list[Row]`. Each is imported only when its turn comes, and one that
fails, or needs what is not installed, says why and leaves the others their turn. The exit code is 1 if any failed.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from pagedkv.openmp import limit_spinning

FOLDER = Path(__file__).resolve().parent


def discover(folder: Path = FOLDER) -> list[str]:
    """Names of the modules in the folder that define `run` at their top level, without importing any."""
    return [path.stem for path in sorted(folder.glob("*.py")) if _defines_run(path)]


def _defines_run(path: Path) -> bool:
    if path.stem.startswith("_"):
        return False
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError:
        return True  # its turn tells the fault
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


def run_one(name: str, folder: Path, package: str) -> str | None:
    """Run one benchmark and write its rows; what went wrong, or None."""
    try:
        rows = importlib.import_module(f"{package}.{name}").run()
        report.write(name, rows, folder)
    except ImportError as missing:
        return f"not available: {missing}"
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def main(
    names: Sequence[str],
    folder: Path = FOLDER,
    output: Path = report.OUTPUT,
    package: str = "benchmarks",
) -> int:
    """Run the benchmarks named, or all; the process's exit code (2 for a name that there is not)."""
    known = discover(folder)
    if unknown := [name for name in names if name not in known]:
        print(f"no benchmark {', '.join(unknown)}; there is {', '.join(known) or 'none'}", file=sys.stderr)
        return 2
    failures = 0
    for name in names or known:
        if reason := run_one(name, output, package):
            print(f"{name}: did not run: {reason}", file=sys.stderr)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    limit_spinning(os.environ)
    sys.exit(main(sys.argv[1:]))
