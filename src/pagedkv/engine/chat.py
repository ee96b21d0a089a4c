"""Conversations to token ids, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = "Mapping[str, str]"
"""One turn: {"role": "system" | "user" | "assistant", "content": text}."""


def chat_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation in the model's chat format, ready for the answer.

    Args:
        tokenizer: a transformers PreTrainedTokenizerBase with a chat template.
        messages: the turns so far.
    """
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])
