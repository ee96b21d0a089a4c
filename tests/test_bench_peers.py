"""benchmarks/peers.py and the allocator's benchmark: environments made once, figures read, peers that cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are not installed: they live beside the package

from benchmarks import allocator, allocator_cases, workload  # noqa: E402
from benchmarks.peers import Peer, PeerUnavailableError, figures  # noqa: E402

PEER = Peer("peer", ("some-package==1.0",), ("broken-extra",))


class Fake:
    """Stands for subprocess.run: notes the commands, and fails where one contains `failing`."""

    def __init__(self, failing: str = "", stdout: str = "", error: Exception | None = None) -> None:
        self.commands: list[list[str]] = []
        self.failing, self.stdout, self.error = failing, stdout, error

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.error is not None:
            raise self.error
        failed = bool(self.failing) and self.failing in command
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
        return subprocess.CompletedProcess(
            command, int(failed), self.stdout, "first line\nthe reason\n" if failed else ""
        )


def test_an_environment_is_made_once_and_again_for_other_pins(tmp_path: Path) -> None:
    run = Fake()
    python = PEER.python(tmp_path, run)
    assert python == tmp_path / "peer" / "bin" / "python"
    assert [command[-1] for command in run.commands] == [str(tmp_path / "peer"), "some-package==1.0", "broken-extra"]
    PEER.python(tmp_path, run)
    assert len(run.commands) == 3
    Peer("peer", ("some-package==2.0",)).python(tmp_path, run)
    assert len(run.commands) == 5


def test_a_package_that_cannot_be_installed_makes_no_environment(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailableError, match="exited with 1: the reason"):
        PEER.python(tmp_path, Fake(failing="install"))
    run = Fake()
    PEER.python(tmp_path, run)
    assert len(run.commands) == 3, "it is made anew"


def test_the_last_line_holds_the_figures() -> None:
    run = Fake(stdout='a warning\n{"free": 2.5}\n')
    assert figures(Path("python"), "module", ["free"], seconds=1, run=run) == {"free": 2.5}
    assert run.commands[0][-4:] == ["python", "-m", "module", "free"]


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (Fake(stdout="no json"), "printed no figures but 'no json'"),
        (Fake(stdout=""), "printed no figures"),
        (Fake(failing="module"), "exited with 1: the reason"),
        (Fake(error=subprocess.TimeoutExpired("python", 1)), "timed out after 1 seconds"),
        (Fake(error=FileNotFoundError("no such file")), "no such file"),
    ],
)
def test_a_script_that_fails_says_why_in_one_line(fake: Fake, message: str) -> None:
    with pytest.raises(PeerUnavailableError, match=message) as raised:
        figures(Path("python"), "module", ["free"], seconds=1, run=fake)
    assert "\n" not in str(raised.value)


def test_without_the_peer_the_allocator_is_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable(*_: object) -> Path:
        raise PeerUnavailableError("no network")

    monkeypatch.setattr(Peer, "python", unavailable)
    monkeypatch.setattr(allocator, "figures", lambda *_, **__: {"decode 1024": 1e-4, "decode 16384": 4e-4})
    rows = allocator.run()
    assert "no comparison with vllm: no network" in capsys.readouterr().err
    assert [row.work for row in rows] == ["decode step, 16,384 rows", "decode step, 256 rows beside 3,840 idle ones"]
    assert rows[0].ratio == pytest.approx(1.25)


def test_the_best_round_of_each_side_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([{"free": 3.0, "churn": 10.0}, {"free": 9.0, "churn": 2.0}] * 2)
    given: dict[str, float] = {}

    def fake(_: Path, module: str, cases: list[str], **__: Any) -> dict[str, float]:
        nonlocal given
        if "memory" not in cases:
            given = next(rounds)
        scale = 2.0 if module.endswith("vllm_cases") else 1.0
        return {"memory": 1.0} if cases == ["memory"] else {case: figure * scale for case, figure in given.items()}

    monkeypatch.setattr(Peer, "python", lambda *_: Path("python"))
    monkeypatch.setattr(allocator, "figures", fake)
    ours, theirs = allocator.measure(rounds=2)
    assert (ours["free"], ours["churn"]) == (3.0, 10.0)
    assert (theirs["free"], theirs["churn"]) == (18.0, 4.0)


def test_our_cases_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CHURN_SECONDS", 0.01)
    monkeypatch.setattr(workload, "POOL", 2000)
    monkeypatch.setattr(allocator_cases, "POOL", 2000)
    assert allocator_cases.decode(4) > 0
    assert allocator_cases.warm_admission(160, repeats=2) > 0
    assert allocator_cases.allocate(8) > 0
    assert allocator_cases.free(8) > 0
    assert allocator_cases.churn() > 0


def test_a_step_is_timed_over_whole_pages() -> None:
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1

    assert workload.mean_of_windows(step, steps=33) >= 0
    assert calls == 2 * workload.PAGE + 2 * workload.PAGE
