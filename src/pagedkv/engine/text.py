"""The text of one request as it grows: what may be sent now, what must wait, and where a stop string ends it.

Responsible for stop strings, and for streamed and whole text being the same. Knows nothing about tokenizers beyond
`Detokenizer`, nor about end-of-sequence tokens and `max_tokens`: those are the engine's to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.engine.detokenize import Detokenizer
from pagedkv.engine.params import SamplingParams


class TextStream:
    """One request's output text.

    The pieces returned by `append` and `finish`, joined, are `text`, however the tokens were cut into calls. No
    piece holds part of a character or of a stop string. The stop string that is complete first ends the text
    (of several complete at one character, the longest); tokens after it are dropped.

    A token that ended the request by its id (end of sequence, stop_token_ids) should not be appended.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        """An empty text. With a prompt, the text continues it (see `Detokenizer.start`)."""
        self._decoder = detokenizer.start(params.skip_special_tokens, prompt_token_ids)
        self._matcher = StopMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._sent: list[str] = []
        self._ended = False
        self.num_tokens = 0
        """Tokens taken: those dropped after a stop are not counted, the one that completed it is."""

    @property
    def text(self) -> str:
        """All text returned so far; after `finish`, or a stop, the whole text."""
        return "".join(self._sent)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.matched

    @property
    def finished(self) -> bool:
        """Whether a stop string was found or `finish` was called: nothing more will be returned."""
        return self._ended

    def append(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the new text that is safe to send. Once finished, drops them and returns ''."""
        new = []
        for token_id in token_ids:
            if self._ended:
                break
            self.num_tokens += 1
            new.append(self._matcher.feed(self._decoder.push(int(token_id))))
            self._ended = self._matcher.matched is not None
        return self._send("".join(new))

    def finish(self) -> str:
        """End the text; returns what was held back, with U+FFFD for a character that was cut. Once only."""
        if self._ended:
            return ""
        self._ended = True
        last = self._matcher.feed(self._decoder.flush())
        return self._send(last if self._matcher.matched is not None else last + self._matcher.flush())

    def _send(self, text: str) -> str:
        if text:
            self._sent.append(text)
        return text


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces (Knuth, Morris and Pratt 1977).

    Per string it keeps how long a prefix of it the text ends with; the longest of these is what must be held
    back. The cost per character does not depend on the lengths of the strings or of the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Look for `stops`, none of them empty; `include` keeps the found one in the text."""
        self.matched: str | None = None
        self._stops, self._include = tuple(stops), include
        self._borders = [_borders(stop) for stop in stops]
        self._lengths = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text; returns what cannot belong to a stop string any more. Not to be called after a match."""
        if not self._held and not any(stop[0] in text for stop in self._stops):
            return text
        buffer = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self.matched = self._advance(character)
            if self.matched is not None:
                self._held = ""
                return buffer[: end if self._include else end - len(self.matched)]
        safe = len(buffer) - max(self._lengths, default=0)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """At the end of the text: what was held back, no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; returns the longest stop string that it completes, if any."""
        found: str | None = None
        for at, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._lengths[at]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            self._lengths[at] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = borders[length - 1]
        length += stop[at] == stop[length]
        borders[at] = length
    return borders
