"""`pagedkv serve` as an operator runs it: its table, a signal, and wrong flags."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from pagedkv.serve.app import ServeOptions
from pagedkv.serve.messages import Ready
from pagedkv.serve.run import start_table

PROGRAM = """
import sys
from rich.console import Console
from pagedkv.serve import client, run
from pagedkv.serve.app import ServeOptions
client.EngineClient.__init__.__kwdefaults__["factory"] = "serve_support:fake_engine"
run.run(Console(), {"step_seconds": 0.02}, ServeOptions(), "127.0.0.1", int(sys.argv[1]))
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_signal_drains_the_server(port: int) -> None:
    """Ready turns 503, new requests are refused, the running one ends, and the exit code is 0."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            end = time.monotonic() + 60
            while True:
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    assert time.monotonic() < end
                    time.sleep(0.05)
            texts: list[str] = []
            body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
            running = threading.Thread(
                target=lambda: texts.append(
                    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).text
                )
            )
            running.start()
            time.sleep(0.4)
            os.kill(process.pid, signal.SIGTERM)
            time.sleep(0.2)
            assert http.get("/v1/health/ready").status_code == 503
            assert http.post("/v1/completions", json=body).status_code == 503
        running.join(20)
        assert '"completion_tokens":60' in texts[0]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_the_table_says_what_fits_and_who_set_what() -> None:
    settings = [("max_seq_len", "2048", "flag"), ("max_batch_size", "256", "default")]
    ready = Ready("tiny", 2048, 100, 181, 16, 368_640, 1024, settings)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(start_table(ready, ServeOptions(api_keys=["secret"])))
    text = console.export_text()
    for part in ("tiny, weights 1.0 KiB", "2,896 tokens", "5 of 512, 1 of 2,048", "2048  (flag)"):
        assert part in text
    assert "secret" not in text
    assert "max_batch_size" not in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-batch-size", "0"], "max_batch_size is 0; it must be at least 1"),
        (["--page-size", "17"], "it must be a multiple of 16"),
        (["/no/such/model"], "there is no file or folder /no/such/model"),
        (["--config", "/no/such/file.yaml"], "/no/such/file.yaml"),
    ],
)
def test_a_wrong_flag_ends_with_a_sentence(flags: list[str], message: str) -> None:
    command = Path(sys.executable).parent / "pagedkv"
    done = subprocess.run([str(command), "serve", *flags], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
