"""Whether a transformers model can run on pages, found out by running one token through it and watching.

The probe reads what each layer really does: its heads and dims, its scale, window, softcap and sinks. Configs are no
substitute: some models differ per layer, and some name a window that no layer uses. A model that does anything
the pages cannot hold or the kernels cannot compute is refused, with the reason. Knows nothing about pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.attention.interface import AttentionOptions
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.hf import ATTENTION_NAME, register_attention
from pagedkv.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# RoPE variants that change every token's rotation once a sequence of the batch grows past a length: the keys in the
# cache would no longer fit, and a long neighbour would change a short sequence's output. Below that length they are
# plain.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_DEFAULT_MAX_SEQ_LEN = 2048
# Layer types of transformers' configs that keep keys and values of single tokens.
_ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function during the probe."""

    index: int
    layer: LayerSpec
    options: AttentionOptions


@dataclass(slots=True)
class _Probe:
    """Records what a model's layers hand to their attention, and refuses what pages cannot do.

    transformers is given a mask function too, so that each layer's mask rule can be read: some models limit a layer by
    its mask alone and never tell the attention function.
    """

    name: str
    calls: list[_Call] = field(default_factory=list)
    masks: dict[int, int | str | None] = field(default_factory=dict)  # storage address -> window, or why none
    kept: list[torch.Tensor] = field(default_factory=list)  # keeps the addresses from being used again

    def mask(self, *args: Any, **given: Any) -> torch.Tensor:
        """A mask whose only use is to be recognised when it arrives at a layer."""
        device = given.get("device", "cpu")
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self.kept.append(mask)
        rule, size = given.get("mask_function"), given.get("local_size")
        self.masks[mask.untyped_storage().data_ptr()] = (
            "it lives under a mask without a rule to check (too old a transformers?)"
            if rule is None
            else _window(rule, size)
        )
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record one call; the output is a zero of the right shape."""
        kind = type(module).__name__
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise self.refusal(f"its attention class {kind} has no layer_idx to find the layer's pages by")
        if any(call.index == index for call in self.calls):
            raise self.refusal(f"layer {index} ({kind}) attends twice per forward")
        extra = [name for name in ("position_bias", "attention_bias", "block_indices", "indices") if _given(rest, name)]
        if extra:
            raise self.refusal(f"layer {index} ({kind}) hands {extra[0]} to its attention, which pages do not support")
        window = self._window(index, kind, attention_mask, sliding_window, is_causal, module)
        sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
        heads = query.shape[1]
        self.calls.append(
            _Call(
                index=index,
                layer=LayerSpec(heads, key.shape[1], key.shape[3], value.shape[3], window),
                options=AttentionOptions(
                    scale=float(scaling if scaling is not None else query.shape[3] ** -0.5),
                    window=window,
                    softcap=float(softcap) if softcap else None,
                    sinks=sinks.detach().reshape(heads) if isinstance(sinks, torch.Tensor) else None,
                ),
            )
        )
        return query.new_zeros(query.shape[0], query.shape[2], heads, value.shape[3]), None

    def refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} cannot run on pages: {reason}")

    def _window(
        self, index: int, kind: str, mask: Any, sliding_window: Any, is_causal: bool | None, module: torch.nn.Module
    ) -> int | None:
        """The layer's window. A mask's rule decides where there is one, as in transformers' own eager attention."""
        if mask is None:
            if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
                raise self.refusal(f"layer {index} ({kind}) attends to later tokens (is_causal=False)")
            return int(sliding_window) if sliding_window else None
        address = mask.untyped_storage().data_ptr() if isinstance(mask, torch.Tensor) else None
        if address not in self.masks:
            raise self.refusal(f"a mask of its own making reaches layer {index} ({kind})")
        window = self.masks[address]
        if isinstance(window, str):  # only now: models also make masks that none of their layers uses
            raise self.refusal(f"in layer {index} ({kind}) {window}")
        return window


def _window(rule: Callable[..., Any], size: Any) -> int | str | None:
    """Read a mask rule (sequence, head, query, key -> visible?) by asking it about positions around its edges.

    Returns:
        The window; None for plain causal; or, for any other rule, what a token sees.
    """
    window = int(size) if size else None
    edge = window or 8
    queries = torch.tensor(sorted({0, 1, edge - 1, edge, edge + 1, 2 * edge + 1}))[:, None]
    keys = torch.arange(2 * edge + 3)[None, :]
    zero = torch.zeros((), dtype=torch.long)
    seen = torch.as_tensor(rule(zero, zero, queries, keys)).expand(len(queries), keys.shape[1])
    causal = keys <= queries
    if torch.equal(seen, causal):
        return None
    if window is not None and torch.equal(seen, causal & (keys > queries - window)):
        return window
    if window is not None and torch.equal(seen, causal & (keys // window == queries // window)):
        return f"tokens see chunks of {window} tokens (chunked attention)"
    if bool((seen & ~causal).any()):
        return "tokens see later ones"
    return "tokens see neither all before them nor a window"


def check_config(config: PreTrainedConfig, name: str) -> None:
    """Refuse what the config alone tells, before any weight is read.

    Raises:
        UnsupportedModelError: with the reason.
    """
    text = config.get_text_config()
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} cannot run on pages: it is an encoder-decoder ({config.model_type})")
    kinds = getattr(text, "layer_types", None) or []
    for kind in kinds:
        if kind == "chunked_attention":
            raise UnsupportedModelError(f"{name} cannot run on pages: it has layers with chunked attention")
        if kind not in _ATTENTION_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{name} cannot run on pages: it has {kind} layers, whose state is not a key and a value per token"
            )


def prepare(model: PreTrainedModel, name: str) -> tuple[ModelSpec, dict[int, tuple[int, AttentionOptions]]]:
    """Probe the model and set it to attend over pages.

    Returns:
        The exact spec, and for each of the model's own layer indices the place in `spec.layers` and how it attends.

    Raises:
        UnsupportedModelError: the model cannot run on pages; the message says which property of it is the reason.
    """
    check_config(model.config, name)
    probe = _Probe(name)
    kind = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise probe.refusal(f"{kind} does not let its attention be replaced (_supports_attention_backend is False)")
    if getattr(model, "_is_stateful", False):
        raise probe.refusal(f"{kind} keeps a recurrent state besides keys and values")
    vocab_size = _run(model, probe)
    register_attention()
    _set_attention(model, ATTENTION_NAME, probe)
    calls = sorted(probe.calls, key=lambda call: call.index)
    _check_every_layer_attends(model, calls, probe)
    spec = ModelSpec(
        name=name,
        layers=tuple(call.layer for call in calls),
        max_seq_len=_max_seq_len(model.config.get_text_config()),
        vocab_size=vocab_size,
    )
    return spec, {call.index: (place, call.options) for place, call in enumerate(calls)}


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: _Probe) -> int:
    """Send one token through the model; returns the width of its logits."""
    from transformers import AttentionInterface, AttentionMaskInterface

    attention = f"pagedkv_probe_{id(probe)}"  # its own name, so that two threads may load at once
    AttentionInterface.register(attention, probe.attend)
    AttentionMaskInterface.register(attention, probe.mask)
    one = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        _set_attention(model, attention, probe)
        logits = model(input_ids=one, position_ids=one, attention_mask=None, use_cache=False, return_dict=True).logits
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a model's own code raises is the reason to name
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise probe.refusal(f"a forward over a flat batch without a cache fails ({reason})") from error
    finally:
        # the table is transformers' own and lives as long as the process: leave no probe in it
        AttentionInterface._global_mapping.pop(attention, None)
        AttentionMaskInterface._global_mapping.pop(attention, None)
    return int(logits.shape[-1])


def _set_attention(model: PreTrainedModel, attention: str, probe: _Probe) -> None:
    """Set the attention, and look whether it was taken: unsupported classes only log a warning."""
    model.set_attn_implementation(attention)
    taken = model.config.get_text_config()._attn_implementation
    if taken != attention:
        raise probe.refusal(f"{type(model).__name__} keeps its own attention ({taken}) when another is set")


def _check_every_layer_attends(model: PreTrainedModel, calls: list[_Call], probe: _Probe) -> None:
    """Every layer must have called the attention function exactly once."""
    depth = int(model.config.get_text_config().num_hidden_layers)
    silent = sorted(set(range(depth)) - {call.index for call in calls})
    if not calls:
        raise probe.refusal(f"none of its {depth} layers calls the replaceable attention")
    if silent:
        raise probe.refusal(
            f"{len(silent)} of its {depth} layers, {silent[0]} the first, do not call the replaceable attention: "
            "they keep another state, or share another layer's"
        )


def _max_seq_len(config: PreTrainedConfig) -> int:
    """The longest sequence the model was made for, shortened where its RoPE would change under the cache."""
    longest = int(getattr(config, "max_position_embeddings", None) or _DEFAULT_MAX_SEQ_LEN)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = (
        [rope] if "rope_type" in rope or "type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    )
    for kind in kinds:
        if (kind.get("rope_type") or kind.get("type")) in _LENGTH_DEPENDENT_ROPE:
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def _given(arguments: dict[str, Any], name: str) -> bool:
    return arguments.get(name) is not None
