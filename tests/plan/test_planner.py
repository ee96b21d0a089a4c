"""What fits where: kind I of the public failures, and what a plan says when something does not fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_support import tiny_model, tiny_plan

from pagedkv.budget import bytes_per_token, kv_room, page_bytes
from pagedkv.cache import Admitted, GroupedManager, LayerGroup
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.plan import planner
from pagedkv.plan.catalog import find_model
from pagedkv.plan.hardware import Device
from pagedkv.plan.planner import Settings, longest_that_fits, pages_of_ranks, plan_for
from pagedkv.spec import LayerSpec, rank_heads

PAGE = 4 * 32 * 2  # bytes of a page of the tiny model: 4 tokens x 2 heads x 16 elements x 2 bytes


def test_latent_attention_is_on_every_rank() -> None:
    """Failure 70 (tenstorrent/tt-xla#5861): the latent was budgeted as if it were cut among the ranks."""
    spec = find_model("deepseek-v2-lite").spec
    assert [bytes_per_token(spec.on_rank(tp), "bfloat16") for tp in (1, 4)] == [31_104, 31_104]


def test_fewer_heads_than_ranks_are_replicated() -> None:
    """Failure 71 (sgl-project/sglang#19086): heads rebuilt as per-rank x TP."""
    assert [list(rank_heads(2, 4, rank)) for rank in range(4)] == [[0], [0], [1], [1]]
    layer = LayerSpec(8, 2, 16, 16)
    assert (layer.on_rank(4).kv_heads, layer.on_rank(4).query_heads) == (1, 2)
    assert (layer.on_rank(2).kv_heads, layer.on_rank(1)) == (1, layer)


@pytest.mark.parametrize(("heads", "tp"), [(10, 4), (2, 3), (4, 6), (8, 0)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} KV heads do not divide among {tp} ranks"):
        rank_heads(heads, tp, 0)


@pytest.mark.parametrize("length", [4, 8, 9, 64])
def test_windows_are_planned_as_the_allocator_holds_them(length: int) -> None:
    """Failure 72 (alvarobartt/hf-mem#60): window layers left out, counted whole, or as a window that is not filled."""
    step = 8
    plan = tiny_plan(200 * PAGE, tiny_model(None, 8), max_num_tokens=step)
    planned = [group.demand(length, 4, step) for group in plan.groups]
    names = ("full", "window")
    groups = [LayerGroup(n, 100, PAGE, g.window) for n, g in zip(names, plan.groups, strict=True)]
    manager = GroupedManager(groups, 4, max_rows=1, max_seq_len=64, step=step)
    answer = manager.admit(range(length))
    assert isinstance(answer, Admitted)
    row = [answer.sequence.row]
    most = dict.fromkeys(names, 0)
    for start in range(0, length, step):
        count = [min(step, length - start)]
        manager.place(row, count)
        most = {name: max(most[name], usage.used) for name, usage in manager.usage().items()}
        manager.commit(row, count)
    for name, pages in zip(names, planned, strict=True):
        assert most[name] <= pages <= most[name] + 1, (name, most, planned)


@pytest.mark.parametrize("pages", [-1, 0, 1, 16])
def test_a_room_too_small_is_refused_with_the_bytes(pages: int) -> None:
    """Failure 74 (InternLM/lmdeploy#4552): 17 pages are one request of 64 tokens and the null page."""
    with pytest.raises(OutOfMemoryBudgetError, match="bytes"):
        tiny_plan(pages * PAGE, max_seq_len=64)
    assert tiny_plan(17 * PAGE, max_seq_len=64).requests(64) == 1


def test_the_models_own_length_is_lowered_openly() -> None:
    plan = tiny_plan(16 * PAGE)
    assert plan.max_seq_len == 60
    assert plan.notes == ("max_seq_len is lowered from the model's 64 to 60: longer ones do not fit",)


def test_a_refusal_names_the_longest_that_fits() -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"one request of 64 tokens.*requests of up to 60 tokens fit"):
        tiny_plan(16 * PAGE, max_seq_len=64)


def test_what_others_use_is_taken_off() -> None:
    """Failure 75 (vllm-project/vllm#4382): a share of the total, though others hold some of it."""
    assert kv_room(100, 0.9, others=30, weights=40, activations=5) == 15


def test_the_fullest_rank_decides() -> None:
    """Failure 76 (huggingface/text-generation-inference#678): the first rank's answer was used for all."""
    assert pages_of_ranks([100, 90]) == pages_of_ranks([90, 100]) == 90
    with pytest.raises(ConfigError, match="no rank"):
        pages_of_ranks([])


def test_a_machine_whose_gpus_differ_is_planned_by_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 80 * 1024**3
    devices = [Device(name, total, used=used * 1024**3) for name, used in (("a", 30), ("b", 0), ("c", 10))]
    monkeypatch.setattr(planner, "detect", lambda: devices)
    plan = plan_for("llama-3-8b", None, Settings(tp=2), weight_bytes="16GiB")
    assert plan.device.name == "c"  # b and c are chosen, a is not needed
    with pytest.raises(ConfigError, match="tp is 4; this machine has 3 GPUs"):
        plan_for("llama-3-8b", None, Settings(tp=4))


def test_pages_tokens_and_requests() -> None:
    plan = tiny_plan(41 * PAGE)
    assert (plan.token_bytes, plan.pages, plan.tokens) == (64, 40, 160)
    assert [plan.requests(tokens) for tokens in (1, 4, 5, 64)] == [40, 40, 20, 2]
    assert plan.contiguous_requests() == 2  # 64 tokens are 16 pages


@given(
    room=st.integers(60, 400),
    windows=st.lists(st.sampled_from([None, 4, 8, 200]), min_size=1, max_size=4),
    average=st.integers(1, 64),
)
def test_pools_of_several_kinds_fit_into_the_room(room: int, windows: list[int | None], average: int) -> None:
    """And hold the longest request; what is left over is less than a page of the first group."""
    try:
        plan = tiny_plan(room * PAGE, tiny_model(*windows), avg_seq_len=average, max_seq_len=64)
    except OutOfMemoryBudgetError:
        assert room * PAGE < sum(17 * PAGE for _ in windows)
        return
    taken = sum((group.pages + 1) * group.page_bytes for group in plan.groups)
    assert plan.room - plan.groups[0].page_bytes < taken <= plan.room
    assert plan.requests(64) >= 1


@given(room=st.integers(1, 100), longest=st.integers(1, 64), windows=st.sampled_from([(None,), (None, 8), (8,)]))
def test_the_longest_that_fits_is_the_longest(room: int, longest: int, windows: tuple[int | None, ...]) -> None:
    plan = tiny_plan(1000 * PAGE, tiny_model(*windows))
    fits = longest_that_fits(room * PAGE, plan.groups, plan.settings, longest)

    def taken(tokens: int) -> int:
        return sum((group.demand(tokens, 4, 8) + 1) * group.page_bytes for group in plan.groups)

    assert fits == max((n for n in range(1, longest + 1) if taken(n) <= room * PAGE), default=0)


def test_a_window_longer_than_any_request_is_none() -> None:
    plan = tiny_plan(100 * PAGE, tiny_model(None, 64))
    assert [group.window for group in plan.groups] == [None]
    assert plan.groups[0].page_bytes == 2 * PAGE


def test_what_does_not_fit_says_what_is_missing() -> None:
    with pytest.raises(OutOfMemoryBudgetError, match=r"5000 bytes\) are missing"):
        tiny_plan(2 * PAGE - 5000, weights=10_000_000)


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-70b", "h100"), ("phi-4", "l4"), ("gemma-2-9b", "16GiB")])
def test_what_is_said_to_fit_does(model: str, gpu: str) -> None:
    """Phi-4 has 10 KV heads: 4 ranks would hold its weights, and cannot share them."""
    with pytest.raises(OutOfMemoryBudgetError) as error:
        plan_for(model, gpu, Settings())
    ways = re.findall(r"--(tp|dtype|gpu) ([\w-]+)", str(error.value))
    assert [name for name, _ in ways] == ["tp", "dtype", "gpu"]
    for name, value in ways:
        if name == "tp":
            plan_for(model, gpu, Settings(tp=int(value)))
        else:
            plan_for(model, value if name == "gpu" else gpu, Settings(), value if name == "dtype" else "auto")


def test_a_model_that_fits_nowhere_is_said_to() -> None:
    with pytest.raises(OutOfMemoryBudgetError, match="no GPU known here would do, nor fewer bits"):
        plan_for("llama-3-8b", "80GiB", Settings(), weight_bytes="900TiB")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "tp is 0; it must be at least 1"),
        ({"page_size": 0}, "page_size is 0"),
        ({"fraction": 1.5}, "share of the memory is 1.5"),
        ({"max_seq_len": 1}, "max_seq_len is 1; it must be at least 2"),
        ({"kv_dtype": "int3"}, "KV dtype 'int3' is not one of auto, fp8"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**settings)


def test_a_page_of_a_7b_model_is_8_mib_and_2_with_grouped_heads() -> None:
    """Course texts say "a page of a 7B model takes 2-4 MB"; that is grouped heads."""
    sizes = [page_bytes(find_model(name).spec, 16, "float16") for name in ("llama-2-7b", "llama-3-8b")]
    assert sizes == [8 * 1024**2, 2 * 1024**2]
