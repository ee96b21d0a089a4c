"""Tool calls: how a model writes them, the grammar that keeps it to that, and how they are read back out of its text.

The format is the chat template's own. From its first mark on, a call is held to the grammar: a tool that was offered,
with arguments that follow its schema. So reading needs no guessing.

::

    Sure.  <tool_call>\\n{"name": "  weather  ", "arguments":   {"city": "Oslo"}  }\\n</tool_call>
    text   opening                   name     between           arguments         closing
           ^ trigger
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.engine.grammar import SPACING

_ANYTHING = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a call.

    Attributes:
        trigger: what no other text contains; `opening` begins with it.
        opening, between, closing: what stands before the name, between name and arguments, and after these.
    """

    trigger: str
    opening: str
    between: str
    closing: str


HERMES = ToolFormat("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
"""Hermes 2 Pro, Qwen 2.5 and 3, and many fine-tuned models."""

MISTRAL = ToolFormat("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]")
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", "")
"""Mistral models with a tokenizer of version 11 and later."""

LLAMA = ToolFormat('{"name": "', '{"name": "', '", "parameters": ', "}")
"""Llama 3.1 and later."""


def tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template asks for; None if it has no place for tools, or asks for one not known here."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    return LLAMA if '"parameters": ' in template else None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that is offered, and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] | None = None


def tool_grammar(
    form: ToolFormat, tools: Sequence[Tool], marks: Mapping[str, int], *, required: bool, several: bool
) -> str:
    """A grammar in llguidance's Lark dialect: text in which calls may stand, or one call or several and no text.

    Args:
        marks: texts that are tokens of their own, and these tokens' ids.
        required: there must be a call.
        several: there may be more than one.
    """
    trigger = _terminals(form.trigger, marks)
    rest = form.opening.removeprefix(form.trigger)
    rules = ["%llguidance {}"]
    if required:
        rules += ['start: call ("\\n" call)*' if several else "start: call", f"call: {trigger} body"]
    else:
        rules += ["start: call* text" if several else "start: call | text", "text: TEXT", "TEXT: /(.|\\n)*/"]
        # Lazy: the first trigger that is spelled out begins a call, whatever else the text might have become.
        if form.trigger in marks:
            rules.append(f"call: TEXT {trigger} body")
        else:
            rules += [f"begin[lazy]: TEXT {trigger}", "call: begin body"]
    rules.append(f"body: {_terminals(rest, marks)} named {_terminals(form.closing, marks)}")
    rules.append("named: " + " | ".join(f"tool_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        schema = json.dumps({**(tool.parameters or _ANYTHING), "x-guidance": SPACING})
        rules.append(f"tool_{number}: {json.dumps(tool.name)} {_terminals(form.between, marks)} %json {schema}")
    return "\n".join(rules) + "\n"


def _terminals(text: str, marks: Mapping[str, int]) -> str:
    """The text as a grammar spells it: marks by their ids, what is between them in quotes."""
    found = [mark for mark in sorted(marks, key=len, reverse=True) if mark in text]
    parts = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model has made; the arguments are JSON, as it wrote them."""

    id: str
    name: str
    arguments: str


class CallReader:
    """Takes an answer as it comes, and tells its text from its calls. White space around a call belongs to neither.

    Args:
        form: how calls are written; None for an answer without.
    """

    def __init__(self, form: ToolFormat | None) -> None:
        self._form = form
        self._held = ""

    def feed(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        """More text; returns what is certain now. With the last piece, a call that was cut off is text."""
        if self._form is None:
            return text, []
        self._held += text
        shown, calls = "", []
        while True:
            start = self._held.find(self._form.opening)
            call = None if start < 0 else self._call(start)
            if call is None:
                break
            shown += self._held[:start].rstrip()
            calls.append(call[0])
            self._held = self._held[call[1] :].lstrip()
        kept = len(self._held) if last else self._certain(start)
        shown, self._held = shown + self._held[:kept], self._held[kept:]
        return shown, calls

    def _call(self, start: int) -> tuple[ToolCall, int] | None:
        """The call that begins at `start` and where it ends; None if it is not complete."""
        form = self._form
        assert form is not None
        name_at = start + len(form.opening)
        between = self._held.find(form.between, name_at)
        if between < 0:
            return None
        at = between + len(form.between)
        try:
            value, end = json.JSONDecoder().raw_decode(self._held, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not self._held.startswith(form.closing, end):
            return None
        name, arguments = self._held[name_at:between], self._held[at:end]
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", name, arguments), end + len(form.closing)

    def _certain(self, start: int) -> int:
        """How much of the held text is no part of a call, nor white space before one."""
        form = self._form
        assert form is not None
        if start < 0:
            longest = min(len(form.opening) - 1, len(self._held))
            cut = next((n for n in range(longest, 0, -1) if self._held.endswith(form.opening[:n])), 0)
            start = len(self._held) - cut
        return len(self._held[:start].rstrip())
