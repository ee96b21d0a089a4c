"""The attention function that transformers calls in place of its own, so that an unchanged model runs on pages.

It writes the layer's new keys and values into their pages, then attends over everything the page table names. It knows
neither requests nor models: which pages, and how a layer attends, come from the step that is set around the forward
(some models drop keyword arguments on the way to their attention, so the step travels in a ContextVar).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.attention.interface import AttentionBackend, AttentionOptions, LayerPages
from pagedkv.errors import PagedKVError

if TYPE_CHECKING:
    import torch

# transformers reads meaning into names: none of flash, sdpa, flex_attention or '/' may occur in it. No mask function is
# registered under it, which is what makes transformers build no mask at all.
ATTENTION_NAME = "pagedkv"


class OutsideStepError(PagedKVError, RuntimeError):
    """A model that attends over pages was called without a step that says which pages."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward needs to know about pages.

    Attributes:
        backend: writes and attends.
        plan: the backend's plan of this step.
        layers: by the model's own layer index: the layer's pages and how it attends.
    """

    backend: AttentionBackend
    plan: Any
    layers: Mapping[int, tuple[LayerPages, AttentionOptions]]


CURRENT_STEP: ContextVar[Step | None] = ContextVar("pagedkv_step", default=None)


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """One layer over pages, with transformers' calling convention.

    RoPE is applied already and key/value heads are not repeated. Scale, window, softcap and sinks were read when the
    model was loaded (support.py) and come with the step, so that all calls of a layer agree.

    Args:
        query: [1, query_heads, T, key_dim].
        key: [1, kv_heads, T, key_dim].
        value: [1, kv_heads, T, value_dim].

    Returns:
        [1, T, query_heads, value_dim] contiguous, in the query's dtype, and None for the attention weights.

    Raises:
        OutsideStepError: no step is set.
    """
    step = CURRENT_STEP.get()
    if step is None:
        raise OutsideStepError(
            f"layer {module.layer_idx} of {type(module).__name__} attends over pages, but no step is set: "
            "call LoadedModel.forward instead of the model itself"
        )
    pages, options = step.layers[module.layer_idx]
    backend, plan = step.backend, step.plan
    # [1, heads, T, dim] -> [T, heads, dim]: what the projections wrote, so these are views in most models
    rows = query[0].transpose(0, 1).contiguous()
    backend.write(pages, key[0].transpose(0, 1).contiguous(), value[0].transpose(0, 1).contiguous(), plan)
    return backend.attend(pages, rows, plan, options).unsqueeze(0), None
