"""Text of a growing output: streamed and whole are the same, and no stop string or half character gets out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pagedkv.engine.detokenize import Detokenizer
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.text import StopMatcher, TextStream

EOS, TOOL = 300, 301


def byte_level() -> Tokenizer:
    """Tokens 0..255 are the bytes; then merges over some pairs of them, a special and an ordinary added token."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    char = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    pairs = [(0xF0, 0x9F), (0x98, 0x80), (0xE2, 0x82), (0x82, 0xAC), (0xC3, 0xA9), (0x20, 0x61), (0x61, 0xE2)]
    pairs += [(0x80, b) for b in range(0x80, 0x80 + 44 - len(pairs))]
    vocab = {char[b]: b for b in range(256)} | {char[a] + char[b]: 256 + n for n, (a, b) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(char[a], char[b]) for a, b in pairs]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.add_tokens([AddedToken("<tool é▁ >", special=False)])
    assert tokenizer.token_to_id("<|eos|>") == EOS
    return tokenizer


WORDS = ["▁", "▁Hello", "▁world", "▁▁", "a", "bc", ".", "é", "<unk>", "</s>"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
METASPACE = [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
T5 = [decoders.Metaspace()]
# Forms that decoding by pieces does not cover.
WORDPIECE = [decoders.WordPiece(prefix="##", cleanup=False)]
REPEATED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("zz", "z")]


def sentencepiece(stages: list) -> Tokenizer:
    """Tokens 0..255 are <0x00>..<0xFF>, then WORDS."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {word: 256 + n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(stages) if len(stages) > 1 else stages[0]
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def word(text: str) -> int:
    return 256 + WORDS.index(text)


class Letters:
    """The simplest tokenizer: a token is a list entry. Plain Python, so decoded through a window."""

    def __init__(self, *pieces: str, special: Sequence[int] = ()) -> None:
        self.pieces, self.all_special_ids, self.decoded = pieces, list(special), 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        self.decoded += len(token_ids)
        skipped = self.all_special_ids if skip_special_tokens else []
        return "".join(self.pieces[i] for i in token_ids if i not in skipped)


def streamed(stream: TextStream, chunks: Iterable[Sequence[int]]) -> list[str]:
    parts = [stream.append(chunk) for chunk in chunks]
    return [*parts, stream.finish()]


def chunked(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(ids[at : at + size])
        at += size
    return [*chunks, ids[at:]]


BYTE_LEVEL = Detokenizer(byte_level())
chunk_sizes = st.lists(st.integers(0, 5), max_size=12)
# Random tokens are nearly all invalid; text with some tokens changed has whole and cut characters in it.
utf8_ids = st.lists(st.sampled_from([*"aé€😀\ufffd ", "e\u0301", "\x00"]), max_size=8).map(
    lambda text: list("".join(text).encode())
)
any_ids = st.lists(st.integers(0, TOOL + 3), max_size=12)
mixed_ids = st.lists(utf8_ids | any_ids, max_size=4).map(lambda parts: [i for part in parts for i in part])


@settings(max_examples=300, deadline=None)
@given(mixed_ids, chunk_sizes, st.booleans())
def test_byte_level_stream_equals_the_tokenizer_byte_for_byte(ids: list[int], sizes: list[int], skip: bool) -> None:
    stream = TextStream(BYTE_LEVEL, SamplingParams(skip_special_tokens=skip))
    assert "".join(streamed(stream, chunked(ids, sizes))) == byte_level_decode(ids, skip)
    assert stream.text == byte_level_decode(ids, skip)


def byte_level_decode(ids: list[int], skip: bool) -> str:
    return BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([LLAMA, GEMMA, METASPACE, T5]), chunk_sizes, st.booleans())
def test_sentencepiece_stream_equals_the_tokenizer(data, stages: list, sizes: list[int], skip: bool) -> None:
    """Byte tokens spell whole characters here: what invalid runs become differs, see the module's docstring."""
    low = 256 if stages is T5 else 0
    words = st.lists(st.integers(max(256, low), 255 + len(WORDS) + 2), max_size=6)
    parts = data.draw(st.lists(words if low else words | utf8_ids, max_size=4))
    ids = [i for part in parts for i in part]
    detokenizer = Detokenizer(sentencepiece(stages))
    assert detokenizer._pieces is not None or low
    stream = TextStream(detokenizer, SamplingParams(skip_special_tokens=skip))
    assert "".join(streamed(stream, chunked(ids, sizes))) == detokenizer.decode(ids, skip)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(256, 255 + len(WORDS)), max_size=20), st.sampled_from([WORDPIECE, REPEATED]), chunk_sizes)
def test_an_unknown_decoder_goes_through_the_window(ids: list[int], stages: list, sizes: list[int]) -> None:
    detokenizer = Detokenizer(sentencepiece(stages))
    assert detokenizer._pieces is None
    stream = TextStream(detokenizer, SamplingParams())
    assert "".join(streamed(stream, chunked(ids, sizes))) == detokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*"aé€😀 "]), max_size=12), chunk_sizes)
def test_the_window_holds_back_cut_characters_too(text: list[str], sizes: list[int]) -> None:
    class Bytes:
        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            return bytes(token_ids).decode(errors="replace")

    ids = list("".join(text).encode())
    parts = streamed(TextStream(Detokenizer(Bytes()), SamplingParams()), chunked(ids, sizes))
    assert "".join(parts) == "".join(text)
    assert not any("\ufffd" in part for part in parts)


def test_special_tokens_never_push_the_context_out_of_the_window() -> None:
    detokenizer = Detokenizer(sentencepiece(WORDPIECE))
    ids = [word("a"), *[word("</s>")] * 10, word("bc")]
    assert TextStream(detokenizer, SamplingParams()).append(ids) == detokenizer.decode(ids) == "a bc"


def test_clean_up_of_spaces_is_off() -> None:
    """It would take back a space that has been sent, when punctuation follows."""

    class Cleaning(Letters):
        clean_up_tokenization_spaces = True

        def decode(
            self, token_ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
        ) -> str:
            text = super().decode(token_ids, skip_special_tokens)
            return text.replace(" .", ".") if clean_up_tokenization_spaces else text

    stream = TextStream(Detokenizer(Cleaning("a ", ".")), SamplingParams())
    assert streamed(stream, [[0], [1]]) == ["a ", ".", ""]


def test_a_transformers_tokenizer_is_decoded_by_pieces() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece(METASPACE), clean_up_tokenization_spaces=True, eos_token="</s>"
    )
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer._pieces is not None
    ids = [word("▁Hello"), word("▁"), word("."), word("</s>")]
    assert TextStream(detokenizer, SamplingParams()).append(ids) == "Hello ."


def test_a_tokenizer_that_decodes_otherwise_than_its_backend_is_believed() -> None:
    class Shouting:
        backend_tokenizer = byte_level()

        def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
            return self.backend_tokenizer.decode(token_ids, skip_special_tokens).upper()

    assert TextStream(Detokenizer(Shouting()), SamplingParams()).append(list(b"loud")) == "LOUD"


def test_half_a_character_waits_for_the_rest() -> None:
    stream = TextStream(BYTE_LEVEL, SamplingParams())
    assert [stream.append([b]) for b in "a😀".encode()] == ["a", "", "", "", "😀"]
    assert stream.finish() == ""


@pytest.mark.parametrize("detokenizer", [BYTE_LEVEL, Detokenizer(sentencepiece(LLAMA))])
def test_a_character_cut_at_the_end_becomes_one_replacement_character(detokenizer: Detokenizer) -> None:
    """Failure 115 (ggml-org/llama.cpp#14937, #11738): the same rule streaming and whole, never half a character."""
    cut = list("a😀".encode()[:-2])
    stream, whole = (TextStream(detokenizer, SamplingParams()) for _ in range(2))
    assert streamed(stream, [[i] for i in cut]) == ["a", "", "", "\ufffd"]
    whole.append(cut)
    whole.finish()
    assert stream.text == whole.text == "a\ufffd"


def test_a_complete_character_stays_when_later_bytes_are_invalid() -> None:
    """DecodeStream raises here (vllm-project/vllm#17448): the tokenizer takes back a character already sent."""
    stream = TextStream(Detokenizer(sentencepiece(LLAMA)), SamplingParams())
    parts = streamed(stream, [list("€".encode()), [0x80], [word("▁world")]])
    assert parts == ["€", "\ufffd", " world", ""]


def test_special_tokens_inside_a_character_do_not_cut_it() -> None:
    stream = TextStream(BYTE_LEVEL, SamplingParams())
    assert stream.append([0xF0, 0x9F, EOS, 0x98, 0x80]) == "😀"


def test_an_added_token_stands_for_its_own_text() -> None:
    assert TextStream(BYTE_LEVEL, SamplingParams()).append([97, TOOL]) == "a<tool é▁ >"


def test_special_tokens_show_when_asked_for() -> None:
    assert TextStream(BYTE_LEVEL, SamplingParams(skip_special_tokens=False)).append([97, EOS]) == "a<|eos|>"
    letters = Letters("a", "<s>", special=[1])
    assert TextStream(Detokenizer(letters), SamplingParams(skip_special_tokens=False)).append([0, 1]) == "a<s>"
    assert TextStream(Detokenizer(letters), SamplingParams()).append([1, 0, 1, 0]) == "aa"


@pytest.mark.parametrize("stages", [LLAMA, METASPACE, REPEATED])
def test_a_text_that_continues_a_prompt_keeps_its_first_space(stages: list) -> None:
    detokenizer = Detokenizer(sentencepiece(stages))
    prompt, output = [word("</s>"), word("▁Hello")], [word("▁world"), word("▁Hello")]
    stream = TextStream(detokenizer, SamplingParams(), prompt)
    assert stream.append(output) == " world Hello"
    assert detokenizer.decode(prompt) + stream.text == detokenizer.decode(prompt + output)


@pytest.mark.parametrize("prompt", [[], [word("</s>")]])
def test_a_text_that_begins_loses_its_first_space(prompt: list[int]) -> None:
    stream = TextStream(Detokenizer(sentencepiece(LLAMA)), SamplingParams(), prompt)
    assert [stream.append([word("▁")]), stream.append([word("▁world")])] == ["", " world"]


@pytest.mark.parametrize("stages", [LLAMA, METASPACE])
def test_an_id_outside_the_vocabulary_is_no_text_and_begins_none(stages: list) -> None:
    """Models have more logits than their tokenizer has tokens."""
    detokenizer = Detokenizer(sentencepiece(stages))
    for ids in ([9999, word("▁world")], [word("▁world"), 9999, word("▁world")]):
        assert TextStream(detokenizer, SamplingParams()).append(ids) == detokenizer.decode(ids)
    assert TextStream(detokenizer, SamplingParams(), [9999]).append([word("▁world")]) == "world"


def stops(*strings: str, include: bool = False) -> SamplingParams:
    return SamplingParams(stop=list(strings), include_stop_str_in_output=include)


def test_a_stop_string_spread_over_tokens_does_not_leak() -> None:
    """Failure 117 (vllm-project/vllm#55483, #45636): text 'a', nothing after, tokens after the stop dropped."""
    stream = TextStream(Detokenizer(Letters("ab", "cd", "ef")), stops("bc"))
    assert [stream.append([0]), stream.append([1, 2]), stream.append([2]), stream.finish()] == ["a", "", "", ""]
    assert (stream.text, stream.stop_reason, stream.finished, stream.num_tokens) == ("a", "bc", True, 2)


@pytest.mark.parametrize(
    ("strings", "ids", "text", "reason"),
    [
        (["ab"], [0], "", "ab"),  # completed by the first token
        (["abcdef"], [0, 1, 2], "", "abcdef"),  # the whole output
        (["cde", "bcd"], [0, 1, 2], "a", "bcd"),  # overlapping: the one complete first
        (["d", "bcde"], [0, 1, 2], "abc", "d"),  # one inside another that begins before it
        (["cd", "bcd"], [0, 1, 2], "a", "bcd"),  # complete at the same character: the longest
        (["fa", "x"], [0, 1, 2], "abcdef", None),  # only begun
        (["efe"], [2, 2, 1], "", "efe"),
        (["efef"], [2, 0, 2, 2], "efab", "efef"),  # a false start inside
    ],
)
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_where_a_stop_string_ends_the_text(
    strings: list[str], ids: list[int], text: str, reason: str | None, include: bool, at_once: bool
) -> None:
    """Failure 117: the same streaming and whole; the earliest match wins."""
    stream = TextStream(Detokenizer(Letters("ab", "cd", "ef")), stops(*strings, include=include))
    parts = streamed(stream, [ids] if at_once else [[i] for i in ids])
    assert "".join(parts) == stream.text == text + (reason or "" if include else "")
    assert stream.stop_reason == reason


def whole_text_oracle(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The shortest prefix of the text that ends with a stop string, without the longest such string."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


small_text = st.text(alphabet="ab", max_size=14)


@settings(max_examples=400, deadline=None)
@given(small_text, st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3), chunk_sizes)
def test_stops_against_the_whole_text(text: str, strings: list[str], sizes: list[int]) -> None:
    stream = TextStream(BYTE_LEVEL, stops(*strings))
    sent = ""
    expected, reason = whole_text_oracle(text, strings)
    for chunk in chunked(list(text.encode()), sizes):
        sent += stream.append(chunk)
        assert expected.startswith(sent), "leaked"
    assert (sent + stream.finish(), stream.stop_reason) == (expected, reason)


@pytest.mark.parametrize("stop", ["é€", "😀", "x", "aé", "\ufffd"])
@pytest.mark.parametrize("at", range(5))
def test_a_stop_string_at_every_place(stop: str, at: int) -> None:
    text = "bbbb"[:at] + stop + "tail"
    stream = TextStream(BYTE_LEVEL, stops(stop))
    for i in text.encode():
        stream.append([i])
    assert (stream.text, stream.stop_reason) == ("bbbb"[:at], stop)


def test_the_least_possible_is_held_back() -> None:
    matcher = StopMatcher(["abac", "xy"])
    assert [matcher.feed(c) for c in "zabab"] == ["z", "", "", "", "ab"]
    assert matcher.feed("!") == "ab!"
    assert [matcher.feed("x"), matcher.flush()] == ["", "x"]


def test_a_stop_string_completed_by_the_cut_character_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, stops("a\ufffd"))
    assert streamed(stream, [[98, 97, 0xF0]]) == ["b", ""]
    assert stream.stop_reason == "a\ufffd"


def test_finish_twice_returns_nothing_and_later_tokens_are_dropped() -> None:
    stream = TextStream(BYTE_LEVEL, stops("ab"))
    stream.append([97])
    assert [stream.finish(), stream.finish(), stream.append([98]), stream.text] == ["a", "", "", "a"]
    assert stream.stop_reason is None


@pytest.mark.parametrize("piece", ["a", "\ufffd", ""])
def test_the_cost_of_a_token_does_not_grow_with_the_text(piece: str) -> None:
    letters = Letters(piece)
    stream = TextStream(Detokenizer(letters), stops("aaaaab"))
    stream.append([0] * 100)
    start = letters.decoded
    stream.append([0] * 100)
    first_hundred, letters.decoded = letters.decoded - start, 0
    stream.append([0] * 800)
    stream.append([0] * 100)
    assert letters.decoded <= 9 * first_hundred + 100


def test_a_run_of_invalid_bytes_is_not_held_back() -> None:
    """DecodeStream waits for the end of such a run, at a cost that grows with it."""
    stream = TextStream(BYTE_LEVEL, SamplingParams())
    assert [stream.append([0x80]) for _ in range(3)] == ["\ufffd"] * 3
