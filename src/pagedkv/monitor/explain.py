"""Explain: what a record says of one request, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.errors import InvalidRequestError
from pagedkv.monitor.record import Entry, Record

_WAITS = {
    "pages": "for pages: it needs {needed}, and {free} could be had",
    "rows": "for a row: as many requests run as may",
    "prefix": "for its prefix, which another request is just computing, so as not to compute it twice",
    "ceiling": "for its tenant's ceiling: it needs {needed} pages, and {free} are left below it",
}
_MISSES = {
    "never_seen": "nobody has sent it before",
    "evicted": "it had been cached, and was evicted to make room",
    "other_namespace": "only another tenant or salt has had it, and they do not share",
    "too_short": "only its last tokens were left, which fill no page",
}


def explain(record: Record, name: str) -> Iterator[str]:
    """Sentences on every answer to a request.

    Args:
        name: its id, or the beginning of it.

    Raises:
        InvalidRequestError: there is no such request, or several.
    """
    entries = [entry for moment in record for entry in moment.log]
    found = {entry["request"] for entry in entries if entry["request"].startswith(name)}
    exact = {request for request in found if request in (name, f"{name}-0")}
    found = exact or found
    if not found:
        known = list(dict.fromkeys(entry["request"] for entry in entries))
        raise InvalidRequestError(f"no request {name!r} in this record; it has {len(known)}, such as {known[:3]}")
    if len(found) > 1:
        raise InvalidRequestError(f"{len(found)} requests begin with {name!r}: {', '.join(sorted(found)[:5])}")
    mine = [entry for entry in entries if entry["request"] in found]
    for key in dict.fromkeys(entry["key"] for entry in mine):
        yield from _answer([entry for entry in mine if entry["key"] == key])


def _answer(entries: list[Entry]) -> Iterator[str]:
    start = entries[0]["t"]
    yield f"request {entries[0]['request']}"
    for entry in entries:
        yield f"{entry['t']:9.3f} s  (+{entry['t'] - start:.3f})  {_sentence(entry)}"
    if entries[-1]["what"] != "ended":
        yield "           the record ends before it does"


def _sentence(entry: Entry) -> str:
    what = entry["what"]
    if what == "queued":
        return f"came with {entry['prompt']} prompt tokens, and asked for {entry['most']} at most"
    if what == "waits":
        return "waited " + _WAITS[entry["on"]].format(**entry)
    if what == "admitted":
        cached = entry["cached"]
        found = f"{cached} prompt tokens were cached" if cached else "nothing of its prompt was cached"
        miss = f"; of the rest, {_MISSES[entry['missed']]}" if entry["missed"] else ""
        return f"was admitted after {entry['waited']:.3f} s in row {entry['row']}: {found}{miss}"
    if what == "preempted":
        return f"lost its pages to make room for others (time {entry['times']}), and waited again"
    return _end(entry)


def _end(entry: Entry) -> str:
    first = "no token" if entry["first_token"] is None else f"its first token after {entry['first_token']:.3f} s"
    error = f" ({entry['error']})" if entry["error"] else ""
    return f"ended by {entry['reason']}{error} with {entry['tokens']} tokens: {first}, {entry['in_all']:.3f} s in all"
