"""Grammars: answers that follow a JSON schema or a grammar, token by token. What may come next is llguidance's to say.

Knows a tokenizer and texts of grammars; nothing about logits or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidRequestError

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One space after a comma and a colon, and none elsewhere: a small model may else write spaces until it is cut off."""


class GrammarState:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, size: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, -(-size // 32)), np.int32)
        self._allowed = np.zeros(vocab_size, np.bool_)
        self._size = min(size, vocab_size)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, bool [vocabulary]; valid until the next call. After the end, only the end mark.

        Raises:
            InvalidRequestError: the grammar has become too costly to follow.
        """
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._words, 0)
        self._check()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        self._allowed[: self._size] = bits[: self._size]
        return self._allowed

    def record(self, token: int) -> None:
        """The token was chosen."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._check()

    def fork(self) -> GrammarState:
        """A copy for another branch."""
        return GrammarState(self._matcher.deep_copy(), self._words.shape[1] * 32, self._allowed.size)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(f"the grammar cannot be followed: {self._matcher.get_error()}")


class Grammars:
    """Starts grammars for one tokenizer, whose vocabulary is prepared with the first of them.

    Args:
        tokenizer: a transformers fast tokenizer.
        vocab_size: tokens that the model has logits for.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._prepared: Any = None

    def of_schema(self, schema: str) -> GrammarState:
        """The beginning of an answer that follows a JSON schema.

        Raises:
            InvalidRequestError: the schema is wrong, or uses what cannot be enforced; or llguidance is not installed.
        """
        return self._start("json_schema", lambda matcher: matcher.grammar_from_json_schema(schema, defaults=SPACING))

    def of_lark(self, text: str) -> GrammarState:
        """The beginning of an answer that follows a grammar in llguidance's Lark dialect.

        Raises:
            InvalidRequestError: as `of_schema`.
        """
        return self._start("grammar", lambda matcher: matcher.grammar_from_lark(text))

    def _start(self, name: str, make: Callable[[Any], str]) -> GrammarState:
        try:
            import llguidance.hf
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            raise InvalidRequestError(f"{name} needs llguidance; install 'pagedkv[serve]'") from None
        if self._prepared is None:
            self._prepared = llguidance.hf.from_tokenizer(self._tokenizer)
        try:
            grammar = make(LLMatcher)
            if fault := LLMatcher.validate_grammar(grammar, self._prepared):
                raise InvalidRequestError(f"{name}: {fault}")
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {error}") from None
        return GrammarState(LLMatcher(self._prepared, grammar), self._prepared.vocab_size, self._vocab_size)
