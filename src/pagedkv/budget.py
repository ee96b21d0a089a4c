"""The one arithmetic of the project: bytes per token and page, pages per request, requests per budget.

Planner, admission and allocator call these functions; nobody else computes "how many pages does this need".
All functions are pure. Sizes are bytes, lengths are tokens.
"""

from __future__ import annotations

import re
from decimal import Decimal

from pagedkv.errors import ConfigError, OutOfMemoryBudgetError
from pagedkv.spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes per element of the dtypes in which keys and values can be stored."""

_UNITS = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def pages_for_tokens(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens: ceil(tokens / page_size)."""
    return -(-tokens // page_size)


def kv_tokens(prompt: int, max_tokens: int) -> int:
    """Most tokens whose keys and values a request ever stores.

    The last sampled token is never fed back, so it is prompt + max_tokens - 1.
    """
    return prompt + max_tokens - 1


def window_pages(window: int, step: int, page_size: int) -> int:
    """Most pages of a layer with a window that a row holds at once, while at most `step` tokens are computed at once.

    The last `window` tokens and the step's tokens, wherever their first one stands in its page.
    """
    return pages_for_tokens(window + step - 1, page_size) + 1


def bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    try:
        return spec.elements_per_token * DTYPE_BYTES[kv_dtype]
    except KeyError:
        raise ConfigError(f"KV dtype {kv_dtype!r} is not one of {', '.join(DTYPE_BYTES)}") from None


def page_bytes(spec: ModelSpec, page_size: int, kv_dtype: str) -> int:
    """Bytes of one page over all layers."""
    return page_size * bytes_per_token(spec, kv_dtype)


def pages_in_budget(budget: int, spec: ModelSpec, page_size: int, kv_dtype: str, min_tokens: int = 1) -> int:
    """Usable pages in `budget` bytes, one page (the null page) being set aside.

    Raises:
        OutOfMemoryBudgetError: if fewer pages than `min_tokens` tokens need would result.
    """
    return pages_in_bytes(budget, page_bytes(spec, page_size, kv_dtype), page_size, min_tokens)


def pages_in_bytes(budget: int, size: int, page_size: int, min_tokens: int = 1) -> int:
    """`pages_in_budget` where the bytes of a page, `size`, are known.

    Raises:
        OutOfMemoryBudgetError: as there.
    """
    pages = budget // size - 1
    needed = pages_for_tokens(min_tokens, page_size)
    if pages < needed:
        raise OutOfMemoryBudgetError(
            f"a KV budget of {format_bytes(budget)} ({budget} bytes) holds {max(pages, 0)} pages of {page_size} "
            f"tokens; one request of {min_tokens} tokens needs {needed} pages and the null page, "
            f"{format_bytes((needed + 1) * size)} ({(needed + 1) * size} bytes)"
        )
    return pages


def kv_room(total: int, fraction: float, others: int, weights: int, activations: int) -> int:
    """Bytes for keys and values: a share of the device's memory, less everything else that lies in it.

    Args:
        total: bytes of the device. fraction: the share of them that may be used, by all together.
        others: bytes that other processes hold already. weights, activations: bytes of this one.

    Returns:
        Negative if the rest does not fit.
    """
    return int(total * fraction) - others - weights - activations


def requests_in_pages(pages: int, tokens_per_request: int, page_size: int) -> int:
    """Requests of `tokens_per_request` stored tokens that fit at once when nothing is shared."""
    return pages // pages_for_tokens(tokens_per_request, page_size)


def parse_bytes(text: str | int) -> int:
    """Bytes from a number or a text such as `268435456`, `256MiB`, `0.5 GiB` or `2G`.

    Raises:
        ConfigError: if the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 268435456, 256MiB or 2GiB")
    size = int(Decimal(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ConfigError(f"a size of {text!r} is not positive")
    return size


def format_bytes(size: int) -> str:
    """A size for people, in binary units: `256.0 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
