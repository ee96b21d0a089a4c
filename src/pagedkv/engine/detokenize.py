"""Token ids to text one token at a time: the same text as decoding all at once, at a constant cost per token.

Responsible for characters that span tokens, special tokens, and the space at the start of a text. Knows nothing
about stop strings, requests or sampling.

Most tokenizers' decoders only join pieces of bytes: GPT-2's byte-level BPE, and SentencePiece models with byte
fallback. For those a token is looked up as bytes and an incremental UTF-8 decoder does the rest. It holds back at
most three bytes; each maximal part that can never become a character turns into one U+FFFD, as in Rust's
from_utf8_lossy and the WHATWG standard. Any other tokenizer decodes a short sliding window twice and sends the
difference (the algorithm of text-generation-inference).

`tokenizers.decoders.DecodeStream` does the latter for all, but has no end to flush at, holds back a run of invalid
bytes for ever at a growing cost, and raises when byte fallback changes its mind about earlier bytes.

With byte fallback, a tokenizer's own decode turns a whole run of byte tokens into U+FFFD when any part of it is
invalid, complete characters included. A stream cannot take those back, so here they stay.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
# Tokens before the new ones that a window starts with: enough for decoders that look at the token before.
CONTEXT_TOKENS = 6
# New tokens that may wait for a character to become whole; no encoding of one takes as many.
MAX_PENDING_TOKENS = 8
PROBED_TOKENS = 64


class TokenDecoder(Protocol):
    """One text being decoded."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; it will not change any more."""

    def flush(self) -> str:
        """At the end: what was held back, with U+FFFD for a character that was cut."""


class Detokenizer:
    """What is known about one tokenizer, shared by all texts that it decodes. Not for use by several threads.

    Takes a transformers tokenizer, a `tokenizers.Tokenizer`, or anything with
    `decode(list[int], skip_special_tokens=bool) -> str` and, if it has special tokens, `all_special_ids`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._options: dict[str, bool] = {}
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):
            # Removes spaces before punctuation that comes later: no stream could have known.
            self._options["clean_up_tokenization_spaces"] = False
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._special = _special_ids(tokenizer, backend)
        pieces = _Pieces.of(backend)
        self._pieces = pieces if pieces is not None and self._agrees(pieces) else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The tokenizer's own text of these ids, all at once."""
        ids = [int(token_id) for token_id in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, **self._options)
        return text

    def start(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> TokenDecoder:
        """A decoder for a text that continues the prompt, if one is given.

        Some tokenizers drop the space that a text begins with. After a prompt a text does not begin, so the
        space stays: decode(prompt) + text = decode(prompt + output).
        """
        skipped = self._special if skip_special_tokens else frozenset()
        pieces = self._pieces
        if pieces is not None:
            continues = any(i not in skipped and pieces.first(i) is not None for i in reversed(prompt_token_ids))
            return _PieceDecoder(pieces, skipped, continues)
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if len(context) == CONTEXT_TOKENS:
                break
            if token_id not in skipped:
                context.append(token_id)
        return _WindowDecoder(lambda ids: self.decode(ids, skip_special_tokens), skipped, context[::-1])

    def _agrees(self, pieces: _Pieces) -> bool:
        """Whether a sample of the vocabulary decodes the same by pieces, at the start of a text and inside it."""
        step = max(1, pieces.size // PROBED_TOKENS)
        for token_id in range(0, pieces.size, step):
            decoder = _PieceDecoder(pieces, frozenset(), False)
            text = decoder.push(token_id) + decoder.push(token_id) + decoder.flush()
            if text != self.decode([token_id, token_id], skip_special_tokens=False):
                return False
        return True


def _special_ids(tokenizer: Any, backend: Any) -> frozenset[int]:
    if hasattr(backend, "get_added_tokens_decoder"):
        return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return frozenset(getattr(tokenizer, "all_special_ids", ()))


class _Pieces:
    """A tokenizer whose text is the joined bytes of its tokens: id -> bytes, converted when first seen."""

    def __init__(self, backend: Any, convert: Callable[[str, bool], bytes], strip: tuple[str, int]) -> None:
        self.size: int = backend.get_vocab_size(with_added_tokens=True)
        self.strip = strip  # a character, and how many of it the start of a text loses
        self._token: Callable[[int], str | None] = backend.id_to_token
        self._convert = convert
        self._known: dict[int, bytes] = {}

    @staticmethod
    def of(backend: Any) -> _Pieces | None:
        """The pieces of a `tokenizers.Tokenizer` with a decoder of a known form, else None."""
        try:
            stages = json.loads(backend.decoder.__getstate__())
            stages = stages["decoders"] if stages["type"] == "Sequence" else [stages]
            form = _byte_level(stages) or _sentencepiece(stages)
        except (AttributeError, TypeError, ValueError, KeyError):
            return None  # another kind of tokenizer
        return _Pieces(backend, *form) if form else None

    def first(self, token_id: int) -> bytes | None:
        """The bytes of the token that begins a text; None for an id outside the vocabulary, which cannot."""
        token = self._token(token_id)
        return None if token is None else self._convert(token, True)

    def inner(self, token_id: int) -> bytes:
        """The bytes of any other token; ids outside the vocabulary have none."""
        piece = self._known.get(token_id)
        if piece is None:
            token = self._token(token_id)
            piece = self._known[token_id] = b"" if token is None else self._convert(token, False)
        return piece


_Form = tuple[Callable[[str, bool], bytes], tuple[str, int]]


def _byte_level(stages: list[dict[str, Any]]) -> _Form | None:
    """GPT-2's form: every byte is written as one printable character."""
    if [stage["type"] for stage in stages] != ["ByteLevel"]:
        return None
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}

    def convert(token: str, first: bool) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:
            return token.encode()  # an added token stands for its own text

    return convert, ("", 0)


def _sentencepiece(stages: list[dict[str, Any]]) -> _Form | None:
    """SentencePiece's form: a mark for the space, <0xHH> for a byte, maybe a start that is stripped.

    In order: Replace or Metaspace, any number; ByteFallback; Fuse; Strip at the start. Each may be missing.
    """
    replaced: list[tuple[str, str, str]] = []  # what, by what, by what in the first token
    rest = list(stages)
    while rest and rest[0]["type"] in ("Replace", "Metaspace"):
        stage = rest.pop(0)
        if stage["type"] == "Replace":
            replaced.append((stage["pattern"]["String"], stage["content"], stage["content"]))
        else:
            replaced.append((stage["replacement"], " ", " " if stage["prepend_scheme"] == "never" else ""))
    fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[1:] if fallback else rest
    fused = bool(rest) and rest[0]["type"] == "Fuse"
    rest = rest[1:] if fused else rest
    strip = ("", 0)
    if fused and rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        strip = (rest[0]["content"], rest[0]["start"])
        rest = rest[1:]
    if rest or not (replaced or fallback):
        return None

    def convert(token: str, first: bool) -> bytes:
        for what, inner, start in replaced:
            token = token.replace(what, start if first else inner)
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.encode()

    return convert, strip


class _PieceDecoder:
    """Joins pieces of bytes through an incremental UTF-8 decoder."""

    def __init__(self, pieces: _Pieces, skipped: frozenset[int], continues: bool) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = not continues
        self._to_strip = 0 if continues else pieces.strip[1]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces.first(token_id) if self._first else self._pieces.inner(token_id)
        if piece is None:
            return ""
        self._first = False
        return self._stripped(self._utf8.decode(piece))

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._pieces.strip[0]:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text


class _WindowDecoder:
    """Decodes a window of the last tokens with and without the new ones, and sends the difference.

    [ context, sent | pending ]    the text of the whole window must go on where the text of the context ends
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: frozenset[int], context: list[int]) -> None:
        self._decode, self._skipped = decode, skipped
        self._window = context
        self._sent = len(context)
        self._sent_text = decode(context) if context else ""

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(text) <= len(self._sent_text) or text.endswith(REPLACEMENT)
        if waiting and len(self._window) - self._sent < MAX_PENDING_TOKENS:
            return ""
        new = text[len(self._sent_text) :]
        self._window = self._window[-CONTEXT_TOKENS:]
        self._sent = len(self._window)
        self._sent_text = self._decode(self._window)
        return new

    def flush(self) -> str:
        if len(self._window) == self._sent:
            return ""
        return self._decode(self._window)[len(self._sent_text) :]
