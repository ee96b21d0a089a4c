"""Generation: from a request's body to an answer, streamed or whole, in OpenAI's form.

Knows the engine's client and the tokenizer; nothing about routes or keys.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from pagedkv.engine.chat import chat_tokens
from pagedkv.errors import InvalidRequestError, NeverFitsError, PagedKVError
from pagedkv.serve.answers import Choice, Format, Json, Usage
from pagedkv.serve.client import EngineClient, EngineDeadError
from pagedkv.serve.messages import Namespace, Piece
from pagedkv.serve.model_text import ModelText
from pagedkv.serve.schemas import ChatRequest, ChosenTool, CompletionRequest, ToolDefinition
from pagedkv.serve.tenants import Caller
from pagedkv.serve.tools import CallReader, Tool, ToolFormat, tool_grammar

Body = ChatRequest | CompletionRequest


class Call:
    """One request of a client: prompts, and the answers to each.

    Choice i of the response is answer i % n of prompt i // n.
    """

    def __init__(
        self,
        client: EngineClient,
        text: ModelText,
        body: Body,
        prompts: list[list[int]],
        form: Format,
        max_tokens: int,
        namespace: Namespace,
    ) -> None:
        self.client = client
        self.namespace = namespace
        self.body = body
        self.prompts = prompts
        self.form = form
        self.usage = Usage(prompt=sum(len(prompt) for prompt in prompts))
        logprobs = body.wanted_logprobs() if isinstance(body, ChatRequest) else body.logprobs
        self._params = body.sampling(max_tokens, logprobs)
        self._tools: ToolFormat | None = None
        if isinstance(body, ChatRequest) and (offered := body.offered()):
            self._tools, grammar = _calling(text, body, offered)
            # The marks of a call may be special tokens, and it is read out of the text.
            self._params |= {"grammar": grammar, "skip_special_tokens": False}

    @classmethod
    async def of(cls, client: EngineClient, text: ModelText, body: Body, model: str, caller: Caller) -> Call:
        """Turn the body's texts into tokens.

        Raises:
            InvalidRequestError, NeverFitsError: what is asked for cannot be meant, or cannot fit.
            EngineDeadError: the engine is not there.
        """
        if client.ready is None:
            raise EngineDeadError("the engine is being restarted")
        longest = client.ready.max_seq_len
        namespace = caller.namespace(body.cache_salt)
        name = f"{'chatcmpl' if isinstance(body, ChatRequest) else 'cmpl'}-{uuid.uuid4().hex}"
        if isinstance(body, ChatRequest):
            turns = [message.turn() for message in body.messages]
            text.check_fits((str(turn.get("content") or "") for turn in turns), longest)
            tools = [tool.model_dump(exclude_none=True) for tool in body.offered()]
            prompts = [await asyncio.to_thread(chat_tokens, text.tokenizer, turns, tools)]
            form = Format(name, model, True, text.tokenizer, body.logprobs)
            asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            rest = longest - len(prompts[0])
            if asked is None and rest < 1:
                raise NeverFitsError(f"{len(prompts[0])} prompt tokens leave no room for an answer in {longest}")
            max_tokens = asked if asked is not None else rest
        else:
            for prompt in body.prompts():
                text.check_fits([prompt] if isinstance(prompt, str) else [], longest)
            prompts = [await asyncio.to_thread(_tokens, text.tokenizer, prompt) for prompt in body.prompts()]
            form = Format(name, model, False, text.tokenizer, body.logprobs is not None)
            max_tokens = body.max_tokens
        return cls(client, text, body, prompts, form, max_tokens, namespace)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) of all prompts as they come, after one (-1, ...) once all are queued."""
        streams = [self._stream(number, prompt) for number, prompt in enumerate(self.prompts)]
        try:
            for stream in streams:
                await anext(stream)
            yield -1, Piece(self.form.id, 0, "", [])
            async for found in _merged(streams):
                yield found
        finally:
            for stream in streams:
                await stream.aclose()

    async def _stream(self, number: int, prompt: list[int]) -> Any:
        pieces = self.client.generate(
            f"{self.form.id}-{number}",
            prompt,
            self._params,
            namespace=self.namespace,
            priority=self.body.priority,
            seconds=self.body.timeout,
        )
        try:
            async for piece in pieces:
                if not isinstance(piece, Piece):
                    yield -1, None
                    continue
                self.usage.count(piece)
                if piece.finish_reason == "error":
                    raise PagedKVError(piece.error or "the request failed")
                yield number * self.body.n + piece.index, piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    async def whole(self) -> Json:
        """The response in one piece."""
        found: dict[int, list[Piece]] = {}
        async for choice, piece in self.pieces():
            if choice >= 0:
                found.setdefault(choice, []).append(piece)
        choices = [(self._choice(index), pieces) for index, pieces in sorted(found.items())]
        return self.form.whole(choices, self.usage)

    async def events(self) -> AsyncIterator[bytes]:
        """The response as server-sent events; the first, empty one says that all is queued."""
        choices: dict[int, Choice] = {}
        queued = False
        try:
            async for index, piece in self.pieces():
                if index < 0:
                    queued = True
                    yield b""
                    continue
                if index not in choices:
                    choices[index] = self._choice(index)
                chunk = self.form.chunk(choices[index], piece)
                if chunk is not None:
                    yield _event(chunk)
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield _event(self.form.last_chunk(self.usage))
        except PagedKVError as error:
            if not queued:
                raise  # nothing has been sent yet: the answer is an error with its status
            yield _event({"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": None}})
        yield b"data: [DONE]\n\n"

    def _choice(self, index: int) -> Choice:
        return Choice(index, self._prefix(index), CallReader(self._tools))

    def _prefix(self, choice: int) -> str:
        """What stands before an answer: its prompt, if it is to be echoed."""
        if isinstance(self.body, CompletionRequest) and self.body.echo:
            given = self.body.prompts()[choice // self.body.n]
            return given if isinstance(given, str) else str(self.form.tokenizer.decode(given))
        return ""


def _calling(text: ModelText, body: ChatRequest, offered: Sequence[ToolDefinition]) -> tuple[ToolFormat, str]:
    """How the model calls tools, and the grammar for those offered.

    Raises:
        InvalidRequestError: its chat template has no place for tools.
    """
    if text.tools is None:
        raise InvalidRequestError("tools are not served: the model's chat template has no place for them")
    tools = [Tool(tool.function.name, tool.function.parameters) for tool in offered]
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, ChosenTool)
    return text.tools, tool_grammar(text.tools, tools, text.added_tokens, required=body.must_call, several=several)


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _tokens(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    if not len(ids):
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    return list(ids)


async def _merged(streams: list[Any]) -> AsyncIterator[tuple[int, Piece]]:
    """Items of several streams as they come."""
    if len(streams) == 1:
        async for found in streams[0]:
            yield found
        return
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    found = task.result()
                except StopAsyncIteration:
                    continue
                yield found
                waiting[asyncio.ensure_future(anext(stream))] = stream
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
