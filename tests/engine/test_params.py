"""SamplingParams: names and defaults that vLLM's users know, and every limit named in the error."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from pagedkv.engine.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from pagedkv.errors import InvalidRequestError


def test_defaults_filter_and_penalise_nothing() -> None:
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.stop, params.stop_token_ids) == (1.0, 16, (), ())
    assert (params.greedy, params.has_filter, params.has_penalty) == (False, False, False)


def test_one_stop_string_is_kept_as_a_tuple() -> None:
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")


def test_stop_token_ids_are_kept_as_a_tuple_and_a_set() -> None:
    params = SamplingParams(stop_token_ids=[7, np.int64(3), 7])
    assert params.stop_token_ids == (7, 3)
    assert params.stop_ids == frozenset({3, 7})


def test_numbers_of_other_types_become_plain_ones() -> None:
    params = SamplingParams(temperature=Fraction(1, 2), top_p=np.float32(0.5), top_k=np.int32(4), seed=np.int64(1))
    assert [type(v) for v in (params.temperature, params.top_p, params.top_k, params.seed)] == [float, float, int, int]


def test_params_are_frozen_comparable_and_hashable() -> None:
    params = SamplingParams(stop=["x"], stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert {params, SamplingParams(stop=["x"], stop_token_ids=[1])} == {params}
    assert dataclasses.replace(params, top_k=3).stop == ("x",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0}, (True, False, False)),
        ({"temperature": 1e-8}, (False, False, False)),
        ({"top_k": -1}, (False, False, False)),
        ({"top_k": 1}, (False, True, False)),
        ({"top_p": 0.9}, (False, True, False)),
        ({"min_p": 0.1}, (False, True, False)),
        ({"presence_penalty": -0.1}, (False, False, True)),
        ({"frequency_penalty": 0.1}, (False, False, True)),
        ({"repetition_penalty": 1.1}, (False, False, True)),
    ],
)
def test_what_an_option_switches_on(options: dict[str, float], expected: tuple[bool, bool, bool]) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    assert (params.greedy, params.has_filter, params.has_penalty) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": 2**31 - 1},
        {"stop": ["x" * MAX_STOP_LENGTH] * MAX_STOP_STRINGS},
        {"stop_token_ids": range(MAX_STOP_TOKEN_IDS)},
        {"stop": None, "stop_token_ids": None},
        {"stop": [], "stop_token_ids": []},
    ],
)
def test_the_limits_themselves_are_allowed(options: dict[str, object]) -> None:
    SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("max_tokens", 0, "0"),
        ("max_tokens", -1, "-1"),
        ("max_tokens", 2**31, "2147483647"),
        ("max_tokens", 1.5, "1.5"),
        ("max_tokens", True, "True"),
        ("max_tokens", None, "None"),
        ("temperature", -0.1, "-0.1"),
        ("temperature", float("nan"), "nan"),
        ("temperature", float("inf"), "inf"),
        ("temperature", 10**400, "inf"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "True"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "1.01"),
        ("top_p", float("nan"), "nan"),
        ("top_k", -2, "-2"),
        ("top_k", True, "True"),
        ("min_p", -0.01, "-0.01"),
        ("min_p", 1.01, "[0, 1]"),
        ("repetition_penalty", 0.0, "(0, inf)"),
        ("repetition_penalty", float("inf"), "inf"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -2.1, "-2.1"),
        ("seed", 2**63, str(2**63)),
        ("seed", -(2**63) - 1, str(2**63 + 1)),
        ("seed", 1.0, "1.0"),
        ("seed", False, "False"),
        ("stop", "", "got 0"),
        ("stop", ["a", ""], "got 0"),
        ("stop", "x" * (MAX_STOP_LENGTH + 1), str(MAX_STOP_LENGTH)),
        ("stop", ["x"] * (MAX_STOP_STRINGS + 1), str(MAX_STOP_STRINGS)),
        ("stop", [1], "1"),
        ("stop", b"x", "b'x'"),
        ("stop", 3, "3"),
        ("stop_token_ids", [-1], "-1"),
        ("stop_token_ids", [2**31], "2147483648"),
        ("stop_token_ids", [1.0], "1.0"),
        ("stop_token_ids", [True], "True"),
        ("stop_token_ids", 5, "5"),
        ("stop_token_ids", range(10**9), str(MAX_STOP_TOKEN_IDS)),
        ("ignore_eos", 1, "1"),
        ("include_stop_str_in_output", "yes", "yes"),
        ("skip_special_tokens", None, "None"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object, shown: str) -> None:
    """Failures 111-113 (CVE-2024-8939; vllm-project/vllm#6521, #16529): bounded before anything is expanded."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name.split("_")[0] in str(caught.value)
    assert shown in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_number_too_long_to_print_is_refused_all_the_same() -> None:
    with pytest.raises(InvalidRequestError, match=r"max_tokens .* bits"):
        SamplingParams(max_tokens=10**5000)


def test_params_need_neither_torch_nor_numpy() -> None:
    code = "import sys, pagedkv.engine.params; sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
