"""Conversations to token ids, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pagedkv.errors import InvalidRequestError

Message: TypeAlias = "Mapping[str, Any]"
"""One turn: {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what else the template reads."""


def chat_tokens(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Token ids of a conversation in the model's chat format, ready for the answer.

    Args:
        tokenizer: a transformers PreTrainedTokenizerBase with a chat template.
        messages: the turns so far.
        tools: functions that the model may call, in OpenAI's form.

    Raises:
        InvalidRequestError: the model has no chat template, or its template refuses these turns.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model has no chat template; ask for a completion of a text instead")
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except TemplateError as error:
        raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from None
    return list(encoded["input_ids"])
