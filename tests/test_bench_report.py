"""benchmarks/: the row, the turns, the table, and the command that runs them all."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed: they live beside the package

from benchmarks import __main__ as command  # noqa: E402
from benchmarks.report import Row, compare, interleaved, plain_table, ratio, write  # noqa: E402

ROWS = [
    Row("decode [4096 rows]", 0.18, 14.2, "vllm 0.32", "ms", 78.9, 10.0, True),
    Row("prefill", 12345.6, None, "", "tokens/s", None, None, None),
    Row("copy", 2.0, 1.0, "memcpy", "ms", 0.5, 0.8, False),
]


def test_the_row_has_exactly_these_fields() -> None:
    names = ["work", "ours", "peer", "peer_name", "unit", "ratio", "target", "holds"]
    assert [field.name for field in fields(Row)] == names


def test_the_file_is_a_list_of_rows(tmp_path: Path) -> None:
    path = write("sample", ROWS, tmp_path / "new" / "bench")
    assert path == tmp_path / "new" / "bench" / "sample.json"
    assert [Row(**entry) for entry in json.loads(path.read_text())] == ROWS


def test_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write("sample", [Row("a", float("nan"), None, "", "ms", None, None, None)], tmp_path)


@pytest.mark.parametrize(("better", "expected"), [("lower", 4.0), ("higher", 0.25)])
def test_a_ratio_above_one_means_ours_is_better(better: Any, expected: float) -> None:
    assert ratio(ours=2.0, peer=8.0, better=better) == expected


def test_a_ratio_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ours is 0\.0"):
        ratio(0.0, 1.0, better="lower")


@pytest.mark.parametrize(("target", "holds"), [(None, None), (2.0, True), (2.1, False)])
def test_a_target_holds_when_the_ratio_reaches_it(target: float | None, holds: bool | None) -> None:
    row = compare("work", 1.0, 2.0, "peer", "ms", better="lower", target=target)
    assert (row.ratio, row.holds) == (2.0, holds)


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_shows_holds_as_yes_no_or_dash(
    rich: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setenv("COLUMNS", "200")
    if not rich:
        monkeypatch.setattr(builtins, "__import__", without_rich)
    write("sample", ROWS, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    shown = {row.work: line.replace("│", " ").split()[-1] for row in ROWS for line in lines if row.work in line}
    assert shown == {"decode [4096 rows]": "yes", "prefill": "-", "copy": "no"}


def test_the_plain_table_is_aligned() -> None:
    cells = [("a", "1", "-", "ms", "-", "-", "-"), ("much longer", "22", "-", "ms", "-", "-", "-")]
    lines = plain_table("title", cells).splitlines()
    assert {line.index("ms") for line in lines[2:]} == {lines[1].index("unit")}


def test_contenders_run_in_turns_after_one_untimed_call_each() -> None:
    calls: list[str] = []
    timings = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, repeats=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert list(timings) == ["a", "b", "c"]


def test_timings_are_the_best_and_the_median() -> None:
    ticks = iter([0, 5, 5, 6, 6, 9])  # calls of 5, 1 and 3 seconds
    timing = interleaved({"a": lambda: None}, repeats=3, clock=lambda: float(next(ticks)))["a"]
    assert (timing.best, timing.median) == (1.0, 3.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `benches` with one good, one failing, one unavailable benchmark and a helper without `run`."""
    package = tmp_path / "benches"
    package.mkdir()
    row = "from benchmarks.report import Row\ndef run():\n    return [Row('w', 1.0, None, '', 's', None, None, None)]\n"
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text(row)
    (package / "failing.py").write_text("def run():\n    raise RuntimeError('out of luck')\n")
    (package / "absent.py").write_text("import no_such_peer\ndef run():\n    return []\n")
    (package / "helper.py").write_text("raise SystemExit('a helper is never imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "benches"]:
        del sys.modules[name]


def test_modules_with_run_are_discovered(folder: Path) -> None:
    assert command.discover(folder) == ["absent", "failing", "good"]


def test_one_failure_leaves_the_others_their_turn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder.parent / "out"
    (folder / "broken.py").write_text("def run(:\n")
    assert command.main([], folder, output, "benches") == 1
    assert [path.name for path in output.iterdir()] == ["good.json"]
    errors = capsys.readouterr().err
    assert "absent: did not run: not available: No module named 'no_such_peer'" in errors
    assert "failing: did not run: RuntimeError: out of luck" in errors
    assert "broken: did not run: SyntaxError" in errors


def test_only_the_named_benchmarks_run(folder: Path) -> None:
    assert command.main(["good"], folder, folder.parent / "out", "benches") == 0


def test_an_unknown_name_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["nothing"], folder, folder.parent / "out", "benches") == 2
    assert "no benchmark nothing; there is absent, failing, good" in capsys.readouterr().err


def test_the_command_works_from_the_repository_root() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "no-such"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no benchmark no-such" in done.stderr
