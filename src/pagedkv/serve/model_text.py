"""The text side of the model that is served: its tokenizer, how it calls tools, and which texts can never fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.engine.chat import chat_tokens
from pagedkv.errors import ConfigError, InvalidRequestError, NeverFitsError
from pagedkv.serve.tools import ToolFormat, tool_format


@dataclass(frozen=True, slots=True)
class ModelText:
    """What is asked of the tokenizer once, and needed by every request.

    Attributes:
        tokenizer: a transformers PreTrainedTokenizerBase.
        tools: how its chat template has tools called; None if it has no place for them.
        added_tokens: text -> id of the tokens outside its vocabulary proper.
        longest_token: characters.
    """

    tokenizer: Any
    tools: ToolFormat | None
    added_tokens: Mapping[str, int]
    longest_token: int

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> ModelText:
        """The tokenizer in a folder, with another chat template if one is given.

        Raises:
            ConfigError: the template cannot make a prompt of a conversation of one message.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        if chat_template is not None:
            tokenizer.chat_template = chat_template
            try:
                chat_tokens(tokenizer, [{"role": "user", "content": "Hello"}])
            except InvalidRequestError as error:
                raise ConfigError(f"the chat template cannot be used: {error}") from None
        has_template = tokenizer.chat_template is not None
        return cls(
            tokenizer,
            tool_format(tokenizer.get_chat_template(None, [{}])) if has_template else None,
            tokenizer.get_added_vocab(),
            max(map(len, tokenizer.get_vocab())),
        )

    def check_fits(self, texts: Iterable[str], max_seq_len: int) -> None:
        """Raise NeverFitsError for texts that would be too long however well they were tokenized, before they are."""
        length = sum(map(len, texts))
        if length > max_seq_len * self.longest_token:
            raise NeverFitsError(
                f"a prompt of {length} characters comes to more than {length // self.longest_token} tokens; "
                f"max_seq_len is {max_seq_len}"
            )
