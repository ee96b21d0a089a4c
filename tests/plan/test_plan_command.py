"""`pagedkv plan`, as it is typed."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from pagedkv.cli import app


def run(command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `pagedkv ...`."""
    result = CliRunner().invoke(app, shlex.split(command))
    return result.exit_code, result.stdout, result.stderr


def test_a_plan_for_people() -> None:
    code, out, _ = run("plan llama-2-7b --gpu a100-40gb")
    assert code == 0
    assert "8.0 MiB" in out  # a page of 16 tokens
    assert "vllm serve meta-llama/Llama-2-7b-hf" in out


def test_a_plan_for_programs() -> None:
    code, out, _ = run("plan llama-3-8b --gpu h100 --json --max-seq-len 8192")
    plan = json.loads(out)
    assert code == 0
    assert plan["bytes_per_page"] == 2 * 1024**2
    assert plan["pages"] == plan["kv_bytes"] // plan["bytes_per_page"] - 1
    assert plan["requests"]["8192"] == plan["pages"] // 512
    assert yaml.safe_load(plan["tensorrt_llm"])["max_batch_size"] == plan["advice"]["max_batch_size"]["value"]
    assert f"--kv-cache-memory-bytes {plan['kv_bytes']}" in plan["vllm"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan llama-3-9b", "did you mean llama-3-8b"),
        ("plan llama-3-8b --gpu h300", "did you mean H"),
        ("plan llama-3.1-70b --gpu h100", "bytes) are missing; --tp 2 or --dtype fp8 or --gpu B200 would fit"),
        ("plan llama-3-8b --gpu 24GiB --max-seq-len 99999999", "requests of up to"),
        ("plan phi-4 --tp 4", "10 KV heads do not divide among 4 ranks"),
        ("plan llama-3-8b --gpu-memory-fraction 2", "it must be above 0 and at most 1"),
        ("plan llama-3-8b --kv-dtype int3", "KV dtype 'int3' is not one of"),
    ],
)
def test_what_cannot_be_planned_ends_in_one_sentence(command: str, message: str) -> None:
    code, _, err = run(command)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
