"""The page tensors of a whole model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.attention.reference import ReferenceBackend
from pagedkv.budget import page_bytes
from pagedkv.errors import ConfigError, InvalidRequestError
from pagedkv.spec import LayerSpec, ModelSpec
from pagedkv.store.pages import PageStore

SPEC = ModelSpec("two layers", (LayerSpec(4, 2, 8, 8), LayerSpec(4, 1, 8, 4, window=8)), 64, 100)


def store(num_pages: int = 4) -> PageStore:
    return PageStore(SPEC, ReferenceBackend(), num_pages, 4, torch.bfloat16)


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_one_more_page_than_usable_all_zero() -> None:
    pages = store()
    assert [layer.key.shape for layer in pages.layers] == [(5, 4, 2, 8), (5, 4, 1, 8)]
    assert [layer.value.shape for layer in pages.layers] == [(5, 4, 2, 8), (5, 4, 1, 4)]
    assert not any(layer.key.any() or layer.value.any() for layer in pages.layers)


def test_bytes_are_those_of_the_budget() -> None:
    assert store().nbytes == 5 * page_bytes(SPEC, 4, "bfloat16")


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    """The system would hand it out, and end the process once it is written to."""
    many = 2**50 // page_bytes(SPEC, 4, "bfloat16")  # a pebibyte
    with pytest.raises(MemoryError, match=f"{many} pages take .* of memory; .* are free"):
        store(many)
    pages = store()
    with pytest.raises(MemoryError, match=f"{many} pages instead of 4 take"):
        pages.resize(many, np.zeros((0, 2), np.int32))
    assert (pages.num_pages, pages.layers[0].key.shape[0]) == (4, 5)


def test_a_copy_reaches_every_layer() -> None:
    pages = store()
    for layer in pages.layers:
        layer.key.normal_()
        layer.value.normal_()
    pages.copy_pages(ids(1, 3), ids(2, 1))
    for layer in pages.layers:
        assert torch.equal(layer.key[1], layer.key[3])
        assert torch.equal(layer.value[1], layer.value[3])
        assert not torch.equal(layer.key[2], layer.key[1]), "page 1 was overwritten before it was read"


def test_copying_nothing_is_allowed() -> None:
    store().copy_pages(ids(), ids())


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (ids(1), ids(2, 3), "1 pages cannot be copied to 2"),
        (ids(0), ids(2), "source page 0 is not one of the pages 1 to 4"),
        (ids(1), ids(0), "target page 0"),
        (ids(1), ids(5), "target page 5"),
        (ids(1, 2), ids(3, 3), "named twice"),
    ],
)
def test_copies_that_are_refused(source: np.ndarray, target: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        store().copy_pages(source, target)


def test_a_store_without_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 pages"):
        store(num_pages=0)
