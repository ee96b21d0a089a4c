"""Answers in OpenAI's form: chunks of a stream, and whole responses, from the same pieces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pagedkv.serve.messages import Piece
from pagedkv.serve.tools import CallReader, ToolCall

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


class Choice:
    """One answer of a response as it comes.

    Args:
        index: of the choice.
        prefix: what stands before its text: the prompt, if it is echoed.
        reader: tells text from tool calls.
    """

    def __init__(self, index: int, prefix: str, reader: CallReader) -> None:
        self.index = index
        self.begun = False
        self.finish_reason: str | None = None
        self.called = 0
        self._prefix = prefix
        self._reader = reader

    def add(self, piece: Piece) -> tuple[str, list[ToolCall]]:
        """The next piece; returns the text and the calls that it completes."""
        text, calls = self._reader.feed(piece.text, last=piece.finish_reason is not None)
        self.called += len(calls)
        if piece.finish_reason is not None:
            called = self.called and piece.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called else piece.finish_reason
        shown = text if self.begun else self._prefix + text
        self.begun = True
        return shown, calls


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

    def chunk(self, choice: Choice, piece: Piece) -> Json | None:
        """The next piece of a choice as a chunk of the stream; None if it completes nothing that could be shown."""
        first, before = not choice.begun, choice.called
        text, calls = choice.add(piece)
        if not (first or text or calls or piece.finish_reason or piece.logprobs):
            return None
        shown: Json = {"index": choice.index, "finish_reason": choice.finish_reason}
        shown["logprobs"] = self._logprobs([piece])
        if self.chat:
            shown["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
            if calls:
                shown["delta"]["tool_calls"] = [
                    {"index": number, **_call_json(call)} for number, call in enumerate(calls, before)
                ]
        else:
            shown["text"] = text
        if piece.finish_reason is not None:
            shown["stop_reason"] = piece.stop_reason
        return self._response([shown], streamed=True)

    def last_chunk(self, usage: Usage) -> Json:
        """The chunk that only counts."""
        return {**self._response([], streamed=True), "usage": usage.json()}

    def whole(self, choices: list[tuple[Choice, list[Piece]]], usage: Usage) -> Json:
        """The response without a stream: each choice and all its pieces."""
        listed = [self._choice(choice, pieces) for choice, pieces in choices]
        return {**self._response(listed, streamed=False), "usage": usage.json()}

    def _choice(self, choice: Choice, pieces: list[Piece]) -> Json:
        parts = [choice.add(piece) for piece in pieces]
        text = "".join(part for part, _ in parts)
        calls = [_call_json(call) for _, made in parts for call in made]
        shown: Json = {"index": choice.index, "finish_reason": choice.finish_reason}
        shown |= {"stop_reason": pieces[-1].stop_reason, "logprobs": self._logprobs(pieces)}
        if not self.chat:
            return {**shown, "text": text}
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {**shown, "message": message}

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


def _call_json(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def error_json(message: str, kind: str, *, code: str | None = None, param: str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
