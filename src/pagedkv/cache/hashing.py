"""ChainHash: one 64-bit key per page for a whole prompt at once.

The key of page j stands for the namespace and all tokens up to the end of page j. It only says where to look: the
index believes a hit after it has compared tokens and parent, so a collision costs a miss and nothing else.

A page's word is a multilinear hash of its tokens (Carter, Wegman 1979; mod 2**64, odd weights drawn per process),
salted with the page's place in its sequence and mixed with the multipliers of SplitMix64 (Steele, Lea, Flood 2014). The
keys of a prompt are one cumulative sum over these words, finished by one more mix.
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
        self._weight = self._random(64) | np.uint64(1)
        self._salt = self._random(64)

    def page_sums(self, tokens: NDArray[np.int32], columns: NDArray[np.int64]) -> Keys:
        """What each page adds to the sum of its chain: uint64 [n] for tokens int32 [n, page_size].

        `columns` int64 [n] says which page of its sequence each one is, so that equal pages at different places differ.
        """
        page_size, last = tokens.shape[1], int(columns.max(initial=0))
        if page_size > self._weight.size:
            self._weight = self._random(2 * page_size) | np.uint64(1)
        if last >= self._salt.size:
            self._salt = self._random(2 * last)
        words = tokens.astype(np.uint64) @ self._weight[:page_size]
        words ^= self._salt.take(columns)
        words *= _MIX1
        words ^= words >> _S27
        words *= _MIX2
        words ^= words >> _S31
        return words

    def root_sum(self, root: int) -> np.uint64:
        """The sum that a namespace's chains start from."""
        return np.uint64(((root & 0xFFFFFFFF) * int(_MIX2) + int(self.seed)) & 0xFFFFFFFFFFFFFFFF)

    def finish(self, sums: Keys) -> Keys:
        """Keys from chain sums."""
        keys = sums ^ (sums >> _S30)
        keys *= _MIX1
        return keys ^ (keys >> _S27)

    def _random(self, count: int) -> Keys:
        """The first `count` words of the SplitMix64 sequence of the seed; a longer one begins alike."""
        words = (np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN) + self.seed
        words = (words ^ (words >> _S30)) * _MIX1
        words = (words ^ (words >> _S27)) * _MIX2
        return words ^ (words >> _S31)
