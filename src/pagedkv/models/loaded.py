"""A transformers model that is ready to run on pages: weights, tokenizer, spec, and one `forward` over a flat batch.

Knows nothing about where the model came from (load.py) or what makes a model fit for pages (support.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.attention.interface import AttentionOptions
from pagedkv.models.hf import CURRENT_STEP, Step
from pagedkv.models.support import prepare
from pagedkv.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pagedkv.store.pages import PageStore

# Marks that end a turn of a chat. A model whose chat template writes one stops at it, even where its configuration
# names only the end of a document.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on pages.

    Attributes:
        name: what the user called it; the name to serve it under.
        spec: heads, dims and window of each layer, as the model itself showed them.
        tokenizer: with a chat template.
        eos_token_ids: tokens that end a generation.
        dtype: of the weights and of the attention inputs.
        weight_bytes: bytes of all parameters and buffers; tied weights count once.
        options: by the model's own layer index: the layer's place in `spec.layers` and how it attends.
        model: the transformers model, in eval mode, with our attention set.
    """

    name: str
    spec: ModelSpec
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    weight_bytes: int
    options: Mapping[int, tuple[int, AttentionOptions]]
    model: PreTrainedModel
    _keeps_logits: bool

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        store: PageStore,
        plan: Any,
    ) -> torch.Tensor:
        """Run one flat batch; its keys and values are in the store's pages afterwards.

        Args:
            tokens: int64 [T], the sequences of the step one after the other.
            positions: int64 [T], each token's position in its own sequence.
            logit_rows: int64 [L], which of the T rows need logits; may be empty.
            store: one set of page tensors per layer of `spec`.
            plan: what `store.backend.plan` made of this step's AttentionBatch.

        Returns:
            float32 [L, vocabulary].
        """
        layers = {index: (store.layers[place], options) for index, (place, options) in self.options.items()}
        before = CURRENT_STEP.set(Step(store.backend, plan, layers))
        try:
            keep = {"logits_to_keep": logit_rows} if self._keeps_logits else {}
            logits: torch.Tensor = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=None,
                use_cache=False,
                return_dict=True,
                **keep,
            ).logits[0]
        finally:
            CURRENT_STEP.reset(before)
        if not self._keeps_logits:
            logits = logits[logit_rows]
        return logits.float()


def adopt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> LoadedModel:
    """Take a transformers model that is in memory already. It is switched to eval mode and to our attention.

    Raises:
        UnsupportedModelError: the model cannot run on pages; the message says why.
    """
    module: torch.nn.Module = model
    module.eval().requires_grad_(False)
    spec, options = prepare(model, name)
    return LoadedModel(
        name=name,
        spec=spec,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        dtype=model.dtype,
        weight_bytes=_weight_bytes(model),
        options=options,
        model=model,
        _keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a generation: the generation config's, the tokenizer's, and the chat template's."""
    found: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for mark in _END_OF_TURN:
        if mark in template and (token := tokenizer.convert_tokens_to_ids(mark)) in special:
            found.add(token)
    return frozenset(found)


def _weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the distinct storages behind all parameters and buffers."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
