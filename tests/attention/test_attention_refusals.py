"""Bad input is refused at the boundary, with the numbers in the message."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import BACKEND, Case

from pagedkv.attention.interface import AttentionBackend, AttentionOptions
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from pagedkv.spec import LayerSpec

CASE = Case(LayerSpec(2, 1, 32, 32), ((2, 20), (1, 5)), spare=0)
BOTH = pytest.mark.parametrize("backend", [BACKEND, ReferenceBackend()], ids=["cpu", "reference"])


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start": np.array([0, 2, 2], np.int32)}, "from 2 to 2 at sequence 1"),
        ({"query_start": np.array([1, 2, 3], np.int32)}, "it is 1 at 0"),
        ({"query_start": np.array([0, 2, 4], np.int32)}, "3 slots for 4 query tokens"),
        ({"kv_length": np.array([1, 5], np.int32)}, "sequence 0 has kv_length 1, .* 2 query tokens"),
        ({"kv_length": np.array([20, 0], np.int32)}, "sequence 1 has kv_length 0"),
        ({"rows": np.array([1, 3], np.int32)}, "sequence 1 is in row 3 of a table of 3 rows"),
        ({"rows": np.array([-1, 2], np.int32)}, "sequence 0 is in row -1"),
        ({"rows": np.array([1], np.int32)}, r"rows \(1,\)"),
        ({"table": np.zeros(4, np.int32)}, "1 dimensions"),
    ],
)
def test_a_batch_that_contradicts_itself(backend: AttentionBackend, change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        backend.plan(replace(CASE.batch(), **change))


@BOTH
@pytest.mark.parametrize(("slot", "page_size"), [(-2, 16), (3, 16), (64, 16), (1 << 40, 16)])
def test_slots_outside_the_usable_pages(backend: AttentionBackend, slot: int, page_size: int) -> None:
    batch = CASE.batch()
    batch.slots[1] = slot
    pages = CASE.filled(backend)
    with pytest.raises(InvalidRequestError, match=rf"slot {slot} of token 1 .* pages 1 to 3"):
        backend.write(pages, torch.zeros(3, 1, 32), torch.zeros(3, 1, 32), backend.plan(batch))
    assert not pages.key[0].any()


@BOTH
@pytest.mark.parametrize("page", [0, -1, 4])
def test_page_ids_outside_the_usable_pages(backend: AttentionBackend, page: int) -> None:
    batch = CASE.batch()
    batch.table[1, 1] = page
    with pytest.raises(InvalidRequestError, match=rf"page {page} in row 1, column 1 .* pages 1 to 3"):
        backend.attend(CASE.filled(backend), CASE.query(), backend.plan(batch), CASE.options())


@BOTH
def test_a_length_beyond_the_table(backend: AttentionBackend) -> None:
    """Failure 58 (flashinfer-ai/flashinfer#725): a last page filled beyond its size."""
    batch = replace(CASE.batch(), kv_length=np.array([33, 5], np.int32))
    with pytest.raises(InvalidRequestError, match=r"sequence 0 with kv_length 33 needs 3 pages .* has 2 columns"):
        backend.attend(CASE.filled(backend), CASE.query(), backend.plan(batch), CASE.options())


def test_columns_past_the_last_page_are_not_looked_at() -> None:
    batch = CASE.batch()
    expected = BACKEND.attend(CASE.filled(BACKEND), CASE.query(), BACKEND.plan(batch), CASE.options())
    batch.table[2, 1] = 999
    assert torch.equal(
        BACKEND.attend(CASE.filled(BACKEND), CASE.query(), BACKEND.plan(batch), CASE.options()), expected
    )


@pytest.mark.parametrize("dims", [(24, 64), (64, 24), (16, 64), (272, 64), (64, 512)])
def test_head_dims_the_kernel_does_not_take(dims: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"(key|value)_dim is \d+; .* multiples of 16 from 32 to 256"):
        BACKEND.allocate(LayerSpec(2, 1, *dims), 3, 16, torch.bfloat16)


@pytest.mark.parametrize("page_size", [0, 8, 24, -16])
def test_page_sizes_the_kernel_does_not_take(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page size is {page_size}; .* multiples of 16"):
        BACKEND.allocate(LayerSpec(2, 1, 32, 32), 3, page_size, torch.bfloat16)


def test_dtypes_the_kernel_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"KV dtype is float16; .* bfloat16 or float32"):
        BACKEND.allocate(LayerSpec(2, 1, 32, 32), 3, 16, torch.float16)
    with pytest.raises(ConfigError, match=r"query dtype is torch\.float16"):
        BACKEND.attend(CASE.filled(BACKEND), CASE.query().half(), BACKEND.plan(CASE.batch()), CASE.options())


def test_shapes_that_do_not_fit_the_layer() -> None:
    pages, plan = CASE.filled(BACKEND), BACKEND.plan(CASE.batch())
    with pytest.raises(InvalidRequestError, match=r"query has shape \(2, 2, 32\); \(3, 2, 32\) is needed"):
        BACKEND.attend(pages, CASE.query()[:2], plan, CASE.options())
    with pytest.raises(InvalidRequestError, match=r"value has shape \(3, 1, 16\)"):
        BACKEND.write(pages, torch.zeros(3, 1, 32), torch.zeros(3, 1, 16), plan)
    with pytest.raises(InvalidRequestError, match=r"sinks has shape \(3,\); \(2,\) is needed"):
        BACKEND.attend(pages, CASE.query(), plan, CASE.options(sinks=torch.zeros(3)))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    with pytest.raises(InvalidRequestError, match="scale"):
        BACKEND.attend(CASE.filled(BACKEND), CASE.query(), BACKEND.plan(CASE.batch()), AttentionOptions(scale))
