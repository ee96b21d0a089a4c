"""Builds ragged cases for attention tests: token data, a page table in a chosen order, and both backends' pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.cpu.backend import CpuBackend
from pagedkv.attention.cpu.layout import from_logical, to_logical
from pagedkv.attention.interface import AttentionBackend, AttentionBatch, AttentionOptions, LayerPages
from pagedkv.attention.reference import ReferenceBackend
from pagedkv.spec import LayerSpec

BF16_TOLERANCE = 2.0**-8
"""Of the largest value, for fp32 queries that bf16 holds exactly: rounding the weights to bf16 changes each by at most
2**-9, so the weighted mean of the values moves by at most 2**-9 in numerator and denominator each."""

FP32_TOLERANCE = 4e-6
"""Of the largest value: sums of some hundred terms, each rounded to 24 bits, and exp2 within 2e-7."""

BACKEND = CpuBackend()


@dataclass(frozen=True)
class Case:
    """Sequences of one layer: `lengths` are (query tokens, kv_length) pairs.

    `order` places the pages: "identity", "reversed" or "random". `spare` pages stay unused.
    """

    layer: LayerSpec
    lengths: tuple[tuple[int, int], ...]
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    order: str = "random"
    spare: int = 2
    seed: int = 0

    @property
    def num_pages(self) -> int:
        """Pages of the tensors, the null page included."""
        return 1 + self.spare + sum(-(-kv // self.page_size) for _, kv in self.lengths)

    def table(self) -> NDArray[np.int32]:
        """The block table; row b + 1 is sequence b's, row 0 is nobody's."""
        ids = np.arange(1, self.num_pages, dtype=np.int32)
        if self.order == "reversed":
            ids = ids[::-1]
        elif self.order == "random":
            ids = np.random.default_rng(self.seed).permutation(ids)
        columns = max(-(-kv // self.page_size) for _, kv in self.lengths)
        table = np.zeros((len(self.lengths) + 1, columns), dtype=np.int32)
        taken = 0
        for sequence, (_, kv) in enumerate(self.lengths):
            count = -(-kv // self.page_size)
            table[sequence + 1, :count] = ids[taken : taken + count]
            taken += count
        return table

    def batch(self) -> AttentionBatch:
        """The step that attends from the last `query tokens` of each sequence."""
        table, size = self.table(), self.page_size
        slots = [
            int(table[sequence + 1, token // size]) * size + token % size
            for sequence, (queries, kv) in enumerate(self.lengths)
            for token in range(kv - queries, kv)
        ]
        counts = [queries for queries, _ in self.lengths]
        return AttentionBatch(
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            kv_length=np.array([kv for _, kv in self.lengths], dtype=np.int32),
            rows=np.arange(1, len(self.lengths) + 1, dtype=np.int32),
            table=table,
            slots=np.array(slots, dtype=np.int64),
        )

    def whole(self) -> Case:
        """The same sequences with all their tokens as queries."""
        return replace(self, lengths=tuple((kv, kv) for _, kv in self.lengths))

    def token_data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key and value [tokens, heads, dim] of all tokens of all sequences, float32 that bf16 holds exactly."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = sum(kv for _, kv in self.lengths)
        return tuple(
            torch.randn(tokens, heads, dim, generator=generator).bfloat16().float()
            for heads, dim in (
                (self.layer.query_heads, self.layer.key_dim),
                (self.layer.kv_heads, self.layer.key_dim),
                (self.layer.kv_heads, self.layer.value_dim),
            )
        )

    def query(self) -> torch.Tensor:
        """Queries of the batch."""
        query, place, chosen = self.token_data()[0], 0, []
        for queries, kv in self.lengths:
            chosen.append(query[place + kv - queries : place + kv])
            place += kv
        return torch.cat(chosen)

    def filled(self, backend: AttentionBackend) -> LayerPages:
        """Page tensors with all tokens of all sequences written."""
        pages = backend.allocate(self.layer, self.num_pages, self.page_size, self.dtype)
        _, key, value = self.token_data()
        backend.write(pages, key.to(self.dtype), value.to(self.dtype), backend.plan(self.whole().batch()))
        return pages

    def options(self, **chosen: object) -> AttentionOptions:
        """Options with the usual scale."""
        return AttentionOptions(scale=self.layer.key_dim**-0.5, **chosen)

    def attend(self, pages: LayerPages | None = None, **chosen: object) -> torch.Tensor:
        """The CPU backend's output for float32 queries."""
        pages = self.filled(BACKEND) if pages is None else pages
        return BACKEND.attend(pages, self.query(), BACKEND.plan(self.batch()), self.options(**chosen))

    def expected(self, **chosen: object) -> torch.Tensor:
        """The oracle's output in float64."""
        oracle = ReferenceBackend(torch.float64)
        pages = self.filled(oracle)
        return oracle.attend(pages, self.query().double(), oracle.plan(self.batch()), self.options(**chosen))

    def tolerance(self) -> float:
        """Largest error allowed, in absolute terms."""
        largest = float(self.token_data()[2].abs().max())
        return largest * (BF16_TOLERANCE if self.dtype == torch.bfloat16 else FP32_TOLERANCE)


def poison_unused(case: Case, pages: LayerPages, poison: float) -> None:
    """Overwrite every token slot that holds no token of the case's sequences, the null page excepted."""
    key, value = to_logical(pages)
    used = torch.zeros(case.num_pages * case.page_size, dtype=torch.bool)
    used[: case.page_size] = True
    used[torch.from_numpy(case.whole().batch().slots)] = True
    for tensor in (key, value):
        tensor.flatten(0, 1)[~used] = poison
    from_logical(pages, key, value)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit (0.0 and -0.0 count as equal)."""
    return left.dtype == right.dtype and torch.equal(left, right)
