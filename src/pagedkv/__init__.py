"""pagedkv: a paged KV cache for LLM inference.

`pagedkv.cache` is the allocator and needs NumPy only. `LLM`, `Engine` and `SamplingParams` need the extra `engine` and
are imported when first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedkv.openmp import limit_spinning

if TYPE_CHECKING:
    from pagedkv.engine.engine import Engine
    from pagedkv.engine.llm import LLM
    from pagedkv.engine.params import SamplingParams

__all__ = ["LLM", "Engine", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "pagedkv.engine.llm",
    "Engine": "pagedkv.engine.engine",
    "SamplingParams": "pagedkv.engine.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    limit_spinning(os.environ)
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("pagedkv"):
            raise
        raise ImportError(
            f"pagedkv.{name} needs {missing.name!r}; install it with: pip install 'pagedkv[engine]'"
        ) from missing
