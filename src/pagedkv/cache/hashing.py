"""ChainHash: one 64-bit key per page for a whole prompt at once.

The key of page j stands for the namespace and all tokens up to the end of page j. It only says where to look: the
index believes a hit after it has compared tokens and parent, so a collision costs a miss and nothing else.

A prompt's keys are one cumulative sum (mod 2**64) over mixed (token, position) words, finished by one more mix; the
multipliers are those of SplitMix64 (Steele, Lea, Flood 2014) and the additive constants are drawn per process.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

Keys = NDArray[np.uint64]


class ChainHash:
    """Keys of page chains.

    Args:
        seed: 64-bit seed; None draws one, so that keys cannot be predicted from outside the process.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = np.uint64(secrets.randbits(64) if seed is None else seed)
        self._salt = np.zeros(0, np.uint64)

    def page_sums(self, tokens: NDArray[np.int32], columns: NDArray[np.int64]) -> Keys:
        """What each page adds to the sum of its chain: uint64 [n] for tokens int32 [n, page_size].

        `columns` int64 [n] says which page of its sequence each one is, so that equal pages at different places differ.
        """
        words = tokens.astype(np.uint64)
        words += np.uint64(1)
        words *= _GOLDEN
        words ^= self._salts(columns, tokens.shape[1])
        words *= _MIX1
        words ^= words >> _S27
        words *= _MIX2
        words ^= words >> _S31
        return words @ np.ones(tokens.shape[1], np.uint64)  # a sum, in half the time of `sum`

    def root_sum(self, root: int) -> np.uint64:
        """The sum that a namespace's chains start from."""
        return np.uint64(((root & 0xFFFFFFFF) * int(_MIX2) + int(self.seed)) & 0xFFFFFFFFFFFFFFFF)

    def finish(self, sums: Keys) -> Keys:
        """Keys from chain sums."""
        keys = sums ^ (sums >> _S30)
        keys *= _MIX1
        return keys ^ (keys >> _S27)

    def _salts(self, columns: NDArray[np.int64], page_size: int) -> Keys:
        """One word per (page, offset), from a table that grows with the longest sequence seen."""
        last = int(columns.max(initial=0))
        if (last + 1) * page_size > self._salt.size:
            size = max(2 * self._salt.size, (last + 1) * page_size)
            positions = np.arange(size, dtype=np.uint64) * _MIX2 + self.seed
            self._salt = positions ^ (positions >> _S30)
        table = self._salt[: self._salt.size // page_size * page_size].reshape(-1, page_size)
        first = last + 1 - columns.size
        if columns.size and columns[0] == first and columns[-1] == last and (np.diff(columns) == 1).all():
            return table[first : last + 1]  # one prompt, page after page: no copy
        return table.take(columns, axis=0)
