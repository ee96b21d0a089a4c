"""Trace files of each known form, synthetic ones, and what a bad row gets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import ConfigError, TraceError
from pagedkv.plan.compare import open_trace
from pagedkv.plan.synthetic import Synthetic, make_trace, parse_synthetic, read_synthetic
from pagedkv.plan.traces import Trace, read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [7, 11]}
"""


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "arrival", "prompt", "output"),
    [
        (AZURE, [0, 4.314579], [374, 396], [44, 109]),
        (AZURE_2024, [0, 0.007405], [2162, 2399], [5, 6]),
        (BURST, [0, 40], [472, 1087], [18, 230]),
        (MOONCAKE, [0, 3], [1030, 600], [5, 2]),
    ],
)
def test_known_forms(tmp_path: Path, text: str, arrival: list[float], prompt: list[int], output: list[int]) -> None:
    trace = read_trace(written(tmp_path, text))
    np.testing.assert_allclose(trace.arrival, arrival, atol=1e-6)
    assert (trace.prompt.tolist(), trace.output.tolist()) == (prompt, output)
    assert [trace.prompt_tokens(i).size for i in range(2)] == prompt
    assert [len(trace.answer_tokens(i)) for i in range(2)] == output


def common(trace: Trace, one: int, other: int) -> int:
    """Tokens with which both prompts begin."""
    a, b = trace.prompt_tokens(one), trace.prompt_tokens(other)
    size = min(a.size, b.size)
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


def test_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert common(trace, 0, 1) == 512


def test_prompts_without_hashes_share_nothing(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    assert common(trace, 0, 1) == 0


def test_rows_are_sorted_by_time(tmp_path: Path) -> None:
    head, first, second = AZURE.splitlines()
    trace = read_trace(written(tmp_path, "\n".join((head, second, first))))
    assert trace.prompt.tolist() == [374, 396]


@pytest.mark.parametrize(
    ("text", "row", "message"),
    [
        (AZURE, "2023-11-16 18:15:51,ten,5", r"line 4: invalid literal.*'ten'"),
        (AZURE, "2023-11-16 18:15:51,10", "line 4: there is no 'GeneratedTokens'"),
        (AZURE, "2023-11-16 18:15:51,0,5", "line 4: the prompt has 0 tokens; it must be at least 1"),
        (AZURE, "yesterday,10,5", "line 4: Invalid isoformat string: 'yesterday'"),
        (BURST, "99,GPT-4,10,0,10,API log", "line 4: the answer has 0 tokens"),
        (BURST, "nan,GPT-4,10,1,10,API log", "line 4: the time is nan"),
        (MOONCAKE, '{"timestamp": 1', "line 3: Expecting"),
        (MOONCAKE, '{"timestamp": 1, "input_length": 600, "output_length": 5}', "line 3: there is no 'hash_ids'"),
        (
            MOONCAKE,
            '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1]}',
            "line 3: 1 hash_ids; 600 tokens are 2 blocks",
        ),
        (MOONCAKE, "[1]", "line 3: "),
    ],
)
def test_a_bad_row_is_named_by_line_and_can_be_passed_over(tmp_path: Path, text: str, row: str, message: str) -> None:
    path = written(tmp_path, text + row + "\n")
    with pytest.raises(TraceError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert "--skip-bad" in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins no known trace"),
        ("a,b,c\n1,2,3\n", "'a,b,c' begins no known trace"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "binary.csv")


def test_limit_and_rate(tmp_path: Path) -> None:
    path = str(written(tmp_path, AZURE))
    trace = open_trace(path, limit=1, skip_bad=False, rate_scale=2, seed=None)
    assert len(trace) == 1
    faster = open_trace(path, limit=None, skip_bad=False, rate_scale=2, seed=None)
    assert faster.arrival[1] == pytest.approx(4.314579 / 2)
    for wrong in ({"limit": 0}, {"rate_scale": 0.0}):
        with pytest.raises(ConfigError, match="it must be"):
            open_trace(path, **{"limit": None, "skip_bad": False, "rate_scale": 1.0, "seed": None, **wrong})


@settings(max_examples=50)
@given(
    requests=st.integers(1, 40),
    turns=st.integers(1, 4),
    groups=st.integers(0, 3),
    arrival=st.sampled_from(["poisson", "uniform", "gamma", "at-once"]),
    seed=st.integers(0, 5),
)
def test_synthetic_traces_hold_together(requests: int, turns: int, groups: int, arrival: str, seed: int) -> None:
    spec = Synthetic(
        requests, arrival, prompt="uniform:1:20", output="exponential:5", groups=groups, prefix=9 * bool(groups),
        turns=turns, seed=seed,
    )  # fmt: skip
    trace, again = make_trace(spec), make_trace(spec)
    assert len(trace) == requests
    assert (np.diff(trace.arrival) >= 0).all()
    assert (trace.prompt >= 1).all()
    assert (trace.output >= 1).all()
    for index in range(requests):
        tokens = trace.prompt_tokens(index)
        assert tokens.size == trace.prompt[index]
        assert (tokens == again.prompt_tokens(index)).all()


def test_a_later_turn_begins_with_all_that_was_said() -> None:
    trace = make_trace(Synthetic(6, turns=3, groups=1, prefix=10, think=1, prompt="fixed:5", output="fixed:4"))
    by_length: dict[int, list[int]] = {}
    for index in range(6):
        by_length.setdefault(int(trace.prompt[index]), []).append(index)
    assert sorted(by_length) == [15, 24, 33]
    firsts = {tuple(trace.prompt_tokens(i).tolist() + trace.answer_tokens(i)) for i in by_length[15]}
    seconds = {tuple(trace.prompt_tokens(i)[:19].tolist()) for i in by_length[24]}
    assert firsts == seconds


def test_gamma_arrivals_come_in_bursts() -> None:
    traces = [make_trace(Synthetic(4000, arrival, rate=10, cv=3)) for arrival in ("poisson", "gamma")]
    gaps = [np.diff(trace.arrival) for trace in traces]
    assert [gap.mean() for gap in gaps] == pytest.approx([0.1, 0.1], rel=0.15)
    assert [gap.std() / gap.mean() for gap in gaps] == pytest.approx([1, 3], rel=0.15)


def test_a_line_and_a_file_say_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, "requests: 7\nprompt: fixed:3\nrate: 2\n", "spec.yaml")
    assert read_synthetic(path) == parse_synthetic("synthetic:requests=7,prompt=fixed:3, rate=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("request=5", "'request' is not known; did you mean requests"),
        ("requests=five", "requests is 'five'; it must be a number"),
        ("requests", "'requests' of the synthetic trace is not of the form key=value"),
        ("requests=0", "requests is 0; it must be at least 1"),
        ("rate=0", "rate is 0.0; it must be above 0"),
        ("arrival=never", "arrival is 'never'; it must be one of poisson"),
        ("groups=3", "groups is 3 and prefix 0; shared prefixes need both"),
        ("prompt=normal:5:1", "prompt is 'normal:5:1'; it must be fixed:N"),
        ("output=uniform:9:3", "output is 'uniform:9:3'; it must be"),
        ("output=fixed:0", "output is 'fixed:0'"),
        ("output=fixed", "output is 'fixed'"),
    ],
)
def test_a_wrong_spec_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_synthetic("synthetic:" + text)


@pytest.mark.parametrize(("name", "requests", "mean"), [("conv", 19_366, 1155), ("code", 8_819, 2048)])
def test_the_published_azure_traces(name: str, requests: int, mean: int) -> None:
    path = DATA / f"azure_llm_2023_{name}.csv"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    trace = read_trace(path)
    assert (len(trace), round(trace.prompt.mean())) == (requests, mean)


def test_the_published_mooncake_trace() -> None:
    path = DATA / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    trace = read_trace(path)
    assert (len(trace), round(trace.prompt.mean()), round(trace.output.mean())) == (12_031, 12_035, 343)
