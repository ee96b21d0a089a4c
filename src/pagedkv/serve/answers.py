"""Answers in OpenAI's form: chunks of a stream, and whole responses, from the same pieces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pagedkv.serve.messages import Piece

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Tokens of a call, over all its prompts and answers."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def count(self, piece: Piece) -> None:
        """Add what a piece brought."""
        self.completion += len(piece.tokens)
        if piece.last:
            self.cached += piece.cached_tokens

    def json(self) -> Json:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(slots=True)
class Format:
    """One response, chat or not.

    Attributes:
        id: of the response. model: what it is said to come from.
        chat: whether it is a chat completion.
        tokenizer: names tokens, where log-probabilities are wanted.
    """

    id: str
    model: str
    chat: bool
    tokenizer: Any
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, piece: Piece, index: int, text: str, *, first: bool) -> Json:
        """A piece as a chunk of the stream; the first of a choice names the role."""
        choice: Json = {"index": index, "finish_reason": piece.finish_reason, "logprobs": self._logprobs([piece])}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            choice["text"] = text
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return self._response([choice], streamed=True)

    def last_chunk(self, usage: Usage) -> Json:
        """The chunk that only counts."""
        return {**self._response([], streamed=True), "usage": usage.json()}

    def whole(self, choices: list[tuple[int, str, list[Piece]]], usage: Usage) -> Json:
        """The response without a stream: (index, text, pieces) of each choice."""
        listed = []
        for index, text, pieces in choices:
            end = pieces[-1]
            choice: Json = {"index": index, "finish_reason": end.finish_reason, "stop_reason": end.stop_reason}
            choice["logprobs"] = self._logprobs(pieces)
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            listed.append(choice)
        return {**self._response(listed, streamed=False), "usage": usage.json()}

    def _response(self, choices: list[Json], *, streamed: bool) -> Json:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and streamed:
            kind += ".chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, pieces: list[Piece]) -> Json | None:
        """Log-probabilities of the pieces' tokens, in the form of chat or of completions."""
        if not self.logprobs:
            return None
        found = [one for piece in pieces for one in piece.logprobs]
        if self.chat:
            return {
                "content": [
                    {**self._named(token, value), "top_logprobs": [self._named(*other) for other in top]}
                    for token, value, top in found
                ]
            }
        return {
            "tokens": [self._text(token) for token, _, _ in found],
            "token_logprobs": [value for _, value, _ in found],
            "top_logprobs": [{self._text(token): value for token, value in top} for _, _, top in found],
        }

    def _named(self, token: int, value: float) -> Json:
        text = self._text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


def error_json(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
