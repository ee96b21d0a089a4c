"""Stand-ins for the tokens of media: ids for placeholders, so that prompts with different images never look alike.

A prompt's image occupies a span of placeholder tokens that all have one id. Pages are shared by their tokens, so the
ids given to the allocator say which content, and which place in it, a placeholder stands for. They are handed out by a
table, not by a hash: equal ids mean equal content, whatever the content's own hash is worth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidRequestError

FIRST_STAND_IN = 1 << 30
"""Stand-ins are at least this: above the ids of every vocabulary."""

_PAST_LAST = 1 << 31


class ContentIds:
    """Which ids stand for which content. One table serves one manager, for as long as its cache is kept."""

    def __init__(self) -> None:
        self._spans: dict[tuple[Hashable, int], int] = {}
        self._next = FIRST_STAND_IN

    def ids(self, content: Hashable, places: int) -> NDArray[np.int32]:
        """Token ids int32 [places] for the placeholders of this content, the same at every call.

        Args:
            content: what identifies it, compared as dictionary keys are; for an array, `content_of(array)`.
            places: placeholders that it occupies.

        Raises:
            InvalidRequestError: no places, content that cannot be hashed, or 2**30 stand-ins are in use: reset the
                manager and start a new table.
        """
        if places < 1:
            raise InvalidRequestError(f"content in {places} places; it must be at least 1")
        try:
            first = self._spans.setdefault((content, places), self._next)
        except TypeError:
            raise InvalidRequestError(f"content of type {type(content).__name__} cannot be hashed") from None
        if first == self._next:
            if first + places > _PAST_LAST:
                del self._spans[content, places]
                raise InvalidRequestError(
                    f"{places} more stand-ins exceed {_PAST_LAST - FIRST_STAND_IN}; reset the manager and start anew"
                )
            self._next += places
        return np.arange(first, first + places, dtype=np.int32)


def content_of(array: NDArray[np.generic], mode: str = "") -> tuple[bytes, tuple[int, ...], str, str]:
    """What identifies an array's content: SHA-256 of its bytes, its shape and dtype, and the mode it is read in."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    return digest, array.shape, array.dtype.str, mode
