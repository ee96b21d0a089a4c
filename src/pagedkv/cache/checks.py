"""Checks of what callers hand to a manager. Each failure names the value and the limit; nothing has changed by then."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import ConfigError, InvalidRequestError


def check_sizes(num_pages: int, page_size: int, max_rows: int, max_seq_len: int) -> None:
    """Raise ConfigError unless all sizes of a manager are positive."""
    sizes = {"num_pages": num_pages, "page_size": page_size, "max_rows": max_rows, "max_seq_len": max_seq_len}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")


def checked_size(num_pages: int | None, num_bytes: int | None, page_bytes: int | None) -> int:
    """Pages of a pool given in pages or in bytes, the null page set aside; raises ConfigError if it cannot be meant."""
    if num_bytes is None:
        if num_pages is None or page_bytes is not None:
            raise ConfigError("a size is num_pages, or num_bytes and page_bytes")
        return num_pages
    if num_pages is not None or page_bytes is None or page_bytes < 1:
        raise ConfigError(f"num_bytes={num_bytes} needs page_bytes of at least 1, and no num_pages; got {page_bytes}")
    pages = num_bytes // page_bytes - 1
    if pages < 1:
        raise ConfigError(f"{num_bytes} bytes hold {max(pages, 0)} pages of {page_bytes} bytes beside the null page")
    return pages


def checked_prompt(tokens: ArrayLike, reserve: int, headroom: int, max_seq_len: int) -> NDArray[np.int32]:
    """A prompt as int32 [n]; raises InvalidRequestError if it or the reservation cannot be meant."""
    prompt = checked_ids(tokens)
    if prompt.ndim != 1 or not prompt.size:
        raise InvalidRequestError(f"a prompt is a flat array of at least one token id; got shape {prompt.shape}")
    check_whole(reserve=reserve, headroom=headroom)
    if prompt.size + reserve > max_seq_len:
        more = f" and {reserve} reserved" if reserve else ""
        raise InvalidRequestError(f"{prompt.size} prompt tokens{more} exceed max_seq_len {max_seq_len}")
    return prompt


def check_whole(**numbers: int) -> None:
    """Raise InvalidRequestError unless every number is a whole one and not negative."""
    for name, value in numbers.items():
        if not isinstance(value, (int, np.integer)):
            raise InvalidRequestError(f"{name} is {value!r}; it must be a whole number")
        if value < 0:
            raise InvalidRequestError(f"{name} is {value}; it must not be negative")


def checked_ids(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as int32; raises InvalidRequestError if they are not whole numbers from 0 to 2**31 - 1."""
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise InvalidRequestError("token ids must be a flat array; got lists of different lengths") from None
    if ids.dtype == np.int32 and (not ids.size or ids.min() >= 0):
        return ids
    if ids.size and ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"token ids must be integers; got dtype {ids.dtype}")
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise InvalidRequestError(f"token ids must lie in 0 to 2**31 - 1; got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)


def checked_counts(counts: ArrayLike, rows: int, what: str = "count") -> NDArray[np.int64]:
    """Counts as int64 [rows]; raises InvalidRequestError if not whole, negative, huge or of another length."""
    given = np.asarray(counts)
    if given.size and given.dtype.kind not in "iu":
        raise InvalidRequestError(f"{what}s must be integers; got dtype {given.dtype}")
    if given.ndim > 1 or (given.ndim == 1 and given.size != rows):
        raise InvalidRequestError(f"{what}s of shape {given.shape} for {rows} rows")
    if given.size and given.min() < 0:
        raise InvalidRequestError(f"a {what} of {given.min()} tokens is negative")
    if given.size and given.max() > np.iinfo(np.int32).max:  # so that no sum of counts and lengths can overflow
        raise InvalidRequestError(f"a {what} of {given.max()} tokens is more than 2**31 - 1")
    return np.broadcast_to(given.astype(np.int64), (rows,))


def check_token_count(ids: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
    """Raise InvalidRequestError unless there is one id per counted token."""
    if ids.ndim != 1 or ids.size != counts.sum():
        raise InvalidRequestError(f"{ids.size} token ids of shape {ids.shape} for counts that sum to {counts.sum()}")


def check_lengths(rows: NDArray[np.int64], lengths: NDArray[np.integer], max_seq_len: int) -> None:
    """Raise InvalidRequestError if a row would become longer than max_seq_len."""
    if lengths.size and lengths.max() > max_seq_len:
        worst = int(lengths.argmax())
        raise InvalidRequestError(f"row {rows[worst]} would have {lengths[worst]} tokens; max_seq_len is {max_seq_len}")
