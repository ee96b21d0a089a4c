"""What the HTTP process and the engine's process say to each other: msgpack over a local socket, in batches."""

from __future__ import annotations

from typing import Any

import msgspec

Namespace = str | tuple[str, str | None] | None
"""Where pages are shared: a cache_salt, or a tenant and the salt within it."""


class Limit(msgspec.Struct):
    """Pages that a namespace is sure of, and pages that it may use at most."""

    namespace: Namespace
    floor: int = 0
    ceiling: int | None = None


class Duties(msgspec.Struct, frozen=True):
    """What an engine's process does beside serving.

    Attributes:
        limits: of namespaces.
        record: file to write what happens to; a process that is started later takes another name.
        kv_events: settings of `KVEventsConfig`; None for no events.
        log_requests: a line of JSON on stderr for each answer that has ended.
    """

    limits: list[Limit] = []
    record: str | None = None
    kv_events: dict[str, Any] | None = None
    log_requests: bool = False


class Add(msgspec.Struct, tag=True):
    """Queue a prompt. `params` are the fields of SamplingParams."""

    id: str
    prompt: list[int]
    params: dict[str, Any]
    namespace: Namespace = None
    priority: int = 0


class Abort(msgspec.Struct, tag=True):
    """End a request; one that has ended already is ignored."""

    id: str


class Ask(msgspec.Struct, tag=True):
    """Do something between two steps, and say what came of it: "stats", "audit", "reset", "resize", "snapshot"."""

    number: int
    verb: str
    args: dict[str, Any] = {}


class Stop(msgspec.Struct, tag=True):
    """End the process."""


class Ready(msgspec.Struct, tag=True):
    """The model is loaded. The tokenizer lies in the folder that the process was given."""

    model: str
    max_seq_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    page_bytes: int
    weight_bytes: int
    settings: list[tuple[str, str, str]]


class Failed(msgspec.Struct, tag=True):
    """The engine could not be started; the message is for the operator."""

    message: str


class Piece(msgspec.Struct, tag=True):
    """What a step added to one answer of a request.

    Attributes:
        finish_reason: of this answer, with its last piece.
        last: whether the whole request has ended with this piece.
        cached_tokens: prompt tokens found in the cache, with the last piece.
        logprobs: per new token: id, log-probability, and (id, log-probability) of the likeliest.
    """

    id: str
    index: int
    text: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    last: bool = False
    cached_tokens: int = 0
    error: str | None = None
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] = []


class Queued(msgspec.Struct, tag=True):
    """A request has its place in the queue."""

    id: str


class Refused(msgspec.Struct, tag=True):
    """A request was not queued: "invalid", "never", "queue full", or "failed" by a fault of ours."""

    id: str
    kind: str
    message: str


class Answer(msgspec.Struct, tag=True):
    """What came of an Ask; with an error, the value is its message."""

    number: int
    value: Any
    error: bool = False


Command = Add | Abort | Ask | Stop
Event = Ready | Failed | Queued | Piece | Refused | Answer

decode_duties = msgspec.json.Decoder(Duties).decode
encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_events = msgspec.msgpack.Decoder(list[Event]).decode
