"""Traces: when requests came, how long their prompts and answers were, and which prompts began alike.

Reads what others publish (Azure's CSV, BurstGPT's CSV, Mooncake's JSONL) into arrays. Text is in none of them: tokens
are made up so that two prompts share exactly the prefixes that the trace says they share.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceError

_MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """n requests in order of arrival.

    ::

        prompt of request i      [ segment 7: 512 tokens | segment 9: 512 | segment 31: 88 ]
        segments                 part_start[i] ... part_start[i + 1] of part_id and part_tokens

    Equal segments have equal tokens, so prompts that begin with the same segments begin with the same tokens.

    Attributes:
        name: the file, or the synthetic spec.
        arrival: float64 [n], seconds after the first request.
        prompt, output: int32 [n], tokens.
        part_start: int64 [n + 1]. part_id: int64, part_tokens: int32, one for each segment.
        answer: int64 [n], the segment that is the request's answer.
        skipped: rows that were passed over as bad.
    """

    name: str
    arrival: NDArray[np.float64]
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    part_start: NDArray[np.int64]
    part_id: NDArray[np.int64]
    part_tokens: NDArray[np.int32]
    answer: NDArray[np.int64]
    skipped: int = 0

    def __len__(self) -> int:
        return self.arrival.size

    def prompt_tokens(self, index: int) -> NDArray[np.int32]:
        """Token ids of a prompt, int32 [prompt[index]]."""
        parts = slice(self.part_start[index], self.part_start[index + 1])
        counts = self.part_tokens[parts]
        offsets = np.arange(self.prompt[index]) - np.repeat(np.cumsum(counts) - counts, counts)
        return _tokens(np.repeat(self.part_id[parts], counts), offsets)

    def answer_tokens(self, index: int) -> list[int]:
        """Token ids of an answer."""
        return _tokens(np.full(self.output[index], self.answer[index]), np.arange(self.output[index])).tolist()

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        end = self.part_start[min(count, len(self))]
        return replace(
            self,
            arrival=self.arrival[:count],
            prompt=self.prompt[:count],
            output=self.output[:count],
            part_start=self.part_start[: count + 1],
            part_id=self.part_id[:end],
            part_tokens=self.part_tokens[:end],
            answer=self.answer[:count],
        )

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving `factor` times as fast."""
        return replace(self, arrival=self.arrival / factor)


def _tokens(segments: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    """Token ids by segment and place in it: an arbitrary mixing function, the same each time."""
    mixed = segments * 2_654_435_761 + offsets * 40_503 + (segments >> 7)
    return (mixed & _LIMIT).astype(np.int32)


class Row(NamedTuple):
    """One request of a file: seconds on any clock, tokens, and the ids of the blocks of its prompt."""

    seconds: float
    prompt: int
    output: int
    blocks: Sequence[int] = ()


def read_trace(path: Path, *, limit: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a trace in one of the known formats, which is told by its first line.

    Args:
        path: Azure LLM inference (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT (Timestamp,Model,Request tokens,
            Response tokens,...), or Mooncake (JSONL with timestamp, input_length, output_length, hash_ids).
        limit: read so many requests.
        skip_bad: pass over rows that cannot be read, instead of ending.

    Raises:
        TraceError: the file cannot be read, has an unknown format, a bad row (with its line), or no row.
    """
    bad = 0

    def good(rows: Iterable[tuple[int, Callable[[], Row]]]) -> Iterator[Row]:
        nonlocal bad
        for line, parse in rows:
            row = _parsed(parse)
            if isinstance(row, Row):
                yield row
            elif skip_bad:
                bad += 1
            else:
                raise TraceError(f"{path}, line {line}: {row} (--skip-bad passes over such rows)")

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(islice(good(_rows(path, file)), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}") from None
    if not rows:
        raise TraceError(f"{path} holds no request" + (f"; {bad} bad rows were passed over" if bad else ""))
    return replace(_from_rows(path.name, rows), skipped=bad)


def _parsed(parse: Callable[[], Row]) -> Row | str:
    """The row, or what is wrong with it."""
    try:
        return _checked(parse())
    except KeyError as missing:
        return f"there is no {missing}"
    except (ValueError, TypeError, AttributeError) as error:
        return str(error)


def _rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, Callable[[], Row]]]:
    """Line numbers, and how each line becomes a row."""
    lines = iter(file)
    first = next(lines, "")
    if first.lstrip().startswith("{"):
        for number, line in enumerate(chain([first], lines), 1):
            if line.strip():
                yield number, lambda line=line: _mooncake(json.loads(line))  # type: ignore[misc]
        return
    names = next(csv.reader([first]), [])
    parse = _FORMATS.get(tuple(names[:3]))
    if parse is None:
        raise TraceError(
            f"{path}, line 1: {first.strip()[:80]!r} begins no known trace; known are Azure's "
            "(TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT's (Timestamp,Model,Request tokens,...) and Mooncake's "
            "JSONL"
        )
    reader = csv.reader(lines)
    for cells in reader:
        if cells:
            yield reader.line_num + 1, lambda cells=cells: parse(dict(zip(names, cells, strict=False)))  # type: ignore[misc]


def _checked(row: Row) -> Row:
    for name, tokens in (("prompt", row.prompt), ("answer", row.output)):
        if not 1 <= tokens <= _LIMIT:
            raise ValueError(f"the {name} has {tokens} tokens; it must be at least 1 and at most {_LIMIT}")
    if not np.isfinite(row.seconds):
        raise ValueError(f"the time is {row.seconds}")
    return row


def _azure(cells: dict[str, str]) -> Row:
    text = cells["TIMESTAMP"].strip().replace(" ", "T")
    date, _, fraction = text.removesuffix("+00:00").partition(".")
    moment = datetime.fromisoformat(date).replace(tzinfo=timezone.utc)
    seconds = moment.timestamp() + float(f"0.{fraction or 0}")
    return Row(seconds, int(cells["ContextTokens"]), int(cells["GeneratedTokens"]))


def _burst(cells: dict[str, str]) -> Row:
    return Row(float(cells["Timestamp"]), int(cells["Request tokens"]), int(cells["Response tokens"]))


def _mooncake(entry: dict[str, object]) -> Row:
    blocks = entry["hash_ids"]
    length, output, moment = entry["input_length"], entry["output_length"], entry["timestamp"]
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise ValueError("hash_ids is not a list of whole numbers")
    if not (isinstance(length, int) and isinstance(output, int) and isinstance(moment, (int, float))):
        raise ValueError("timestamp, input_length and output_length must be numbers")
    needed = -(-length // _MOONCAKE_BLOCK)
    if len(blocks) != needed:
        raise ValueError(f"{len(blocks)} hash_ids; {length} tokens are {needed} blocks of {_MOONCAKE_BLOCK}")
    return Row(moment / 1000, length, output, blocks)


_FORMATS: dict[tuple[str, ...], Callable[[dict[str, str]], Row]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Model", "Request tokens"): _burst,
}


def _from_rows(name: str, rows: list[Row]) -> Trace:
    """Sorted by time; a prompt without blocks is one segment that nobody else has."""
    rows.sort(key=lambda row: row.seconds)
    unique = max((max(row.blocks) for row in rows if row.blocks), default=-1) + 1
    ids: list[int] = []
    counts: list[int] = []
    starts = [0]
    for index, row in enumerate(rows):
        ids += row.blocks or [unique + index]
        whole = max(len(row.blocks) - 1, 0)
        counts += [_MOONCAKE_BLOCK] * whole + [row.prompt - whole * _MOONCAKE_BLOCK]
        starts.append(len(ids))
    seconds = np.array([row.seconds for row in rows])
    return Trace(
        name,
        seconds - seconds[0],
        np.array([row.prompt for row in rows], np.int32),
        np.array([row.output for row in rows], np.int32),
        np.array(starts, np.int64),
        np.array(ids, np.int64),
        np.array(counts, np.int32),
        unique + len(rows) + np.arange(len(rows)),
    )
