"""`pagedkv simulate`, as it is typed, and the files it writes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from test_plan_command import run

SMALL = "simulate synthetic:requests=60,rate=50,groups=2,prefix=64,prompt=uniform:8:100,output=uniform:1:20"


def test_figures_for_people() -> None:
    code, out, _ = run(f"{SMALL} --gpu h100 --kv-memory 200MiB")
    assert code == 0
    assert re.findall(r"^(paged 16|contiguous longest|contiguous growing) ", out, re.M) == [
        "paged 16",
        "contiguous longest",
        "contiguous growing",
    ]


def test_the_same_seed_gives_the_same_figures() -> None:
    one, two, other = (run(f"{SMALL} --json --seed {seed}")[1] for seed in (1, 1, 2))
    assert one == two != other


def test_a_sweep_is_every_combination_that_differs() -> None:
    code, out, _ = run(
        f"{SMALL} --json --page-size 1 --page-size 64 --prefix-caching both --kv-memory 100MiB --kv-memory 200MiB "
        "--allocator paged --allocator contiguous"
    )
    assert code == 0
    rows = json.loads(out)
    assert len(rows) == len({row["name"] for row in rows}) == 2 * (2 * 2 + 1)
    waste = {row["name"]: row["figures"]["waste"] for row in rows}
    assert waste["paged 1, 200.0 MiB"] == 0 < waste["paged 64, 200.0 MiB"] < waste["contiguous longest, 200.0 MiB"]
    hits = {row["name"]: row["figures"]["hit_rate"] for row in rows}
    assert hits["paged 64, 200.0 MiB"] > 0.3 > 0 == hits["paged 64, no reuse, 200.0 MiB"]


def test_settings_of_a_file_count(tmp_path: Path) -> None:
    """Whether prefixes are shared, the page size, the budget; flags go before them."""
    path = tmp_path / "settings.yaml"
    path.write_text("kv_cache_config: {enable_block_reuse: false, tokens_per_block: 32, max_memory: 100MiB}\n")
    (row,) = json.loads(run(f"{SMALL} --json --allocator paged --config {path}")[1])
    assert row["name"] == "paged 32, no reuse"
    assert row["setup"]["budget_bytes"] == 100 * 1024**2
    (row,) = json.loads(run(f"{SMALL} --json --allocator paged --prefix-caching on --config {path}")[1])
    assert row["name"] == "paged 32"


def test_files(tmp_path: Path) -> None:
    report, folder = tmp_path / "report.html", tmp_path / "csv"
    code, _, err = run(f"{SMALL} --page-size 1 --page-size 16 --report {report} --csv {folder}")
    assert (code, str(report) in err) == (0, True)
    page = report.read_text()
    assert page.count('class="plotly-graph-div"') == 7  # three over time, two distributions, a sweep, the trace
    assert "src=" not in re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)
    assert "cdn.plot.ly" not in re.findall(r'<script[^>]*src="([^"]*)"', page)
    figures = list(csv.DictReader((folder / "figures.csv").open()))
    assert [row["name"] for row in figures] == ["paged 1", "paged 16", "contiguous longest", "contiguous growing"]
    requests = list(csv.DictReader((folder / "requests-1.csv").open()))
    assert len(requests) == 60
    assert all(float(row["arrival"]) <= float(row["first"]) <= float(row["last"]) for row in requests)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--allocator pagd", "allocator 'pagd' is not one of paged, contiguous, growing"),
        ("--page-size 0", "page_size is 0; it must be at least 1"),
        ("--prefix-caching maybe", "--prefix-caching is 'maybe'; it must be on, off or both"),
        ("--policy NEVER", "capacity_scheduler_policy is 'NEVER'"),
        ("--kv-memory 1KiB", "holds 0 pages of 16 tokens"),
        ("--kv-memory 16MiB", "tokens needs 12 pages and the null page"),
        ("--gpu 80GiB", "how fast 80GiB is, is not known"),
        ("--profile nothing.json", "nothing.json cannot be read as a profile"),
        ("--max-batch-size 0", "max_batch_size is 0; it must be at least 1"),
        ("--rate-scale 0", "it must be above 0"),
        ("--report /nowhere/report.html", "/nowhere/report.html cannot be written"),
        ("--csv /dev/null/csv", "cannot be written"),
    ],
)
def test_wrong_options_end_in_one_sentence(options: str, message: str) -> None:
    code, _, err = run(f"{SMALL} {options}")
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_a_trace_that_is_not_there() -> None:
    code, _, err = run("simulate nothing.csv")
    assert code == 1
    assert "nothing.csv cannot be read as a trace" in err


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:46,x,5\n")
    code, _, err = run(f"simulate {path}")
    assert code == 1
    assert "azure.csv, line 3" in err
    code, _, err = run(f"simulate {path} --skip-bad")
    assert code == 0
    assert "1 bad rows were passed over" in err
