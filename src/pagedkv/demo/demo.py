"""The demonstration: many chats that share a system prompt, in a memory that contiguous reservation fills with a few.

Runs the same workload twice on the same model and budget, paged and with contiguous reservations, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from pagedkv.budget import format_bytes
from pagedkv.config import EngineConfig
from pagedkv.demo.run import Run, run_chats
from pagedkv.demo.view import RunView, comparison
from pagedkv.demo.workload import Chat, make_chats
from pagedkv.engine.allocators import Allocator
from pagedkv.engine.chat import chat_tokens
from pagedkv.engine.engine import Engine
from pagedkv.models.load import load_model
from pagedkv.models.loaded import LoadedModel

_SHOWN_ANSWERS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs of a demonstration."""

    paged: Run
    contiguous: Run


def run_demo(console: Console, config: EngineConfig, requests: int, seed: int) -> Comparison:
    """Load the model, run the workload paged and contiguously, show both, compare, and print some answers."""
    config = config.model_copy(update={"max_queue_size": max(config.max_queue_size, requests)})
    model = load_model(config.model, dtype=config.dtype, report=console.print)
    chats = make_chats(requests, seed)
    prompts = [
        chat_tokens(model.tokenizer, [{"role": "system", "content": c.system}, {"role": "user", "content": c.user}])
        for c in chats
    ]
    console.print("compiling kernels (kept for the next time)")
    Engine(model, config).warm_up()
    paged = _run(console, model, config, "paged", chats, prompts)
    contiguous = _run(console, model, config, "contiguous", chats, prompts)
    console.print(comparison(paged, contiguous))
    _print_answers(console, chats, paged)
    for error in paged.errors + contiguous.errors:
        console.print(Text(f"error: {error}", style="red"))
    return Comparison(paged, contiguous)


def _run(
    console: Console,
    model: LoadedModel,
    config: EngineConfig,
    allocator: Allocator,
    chats: list[Chat],
    prompts: list[list[int]],
) -> Run:
    """One run; its engine and page tensors are gone when it returns, so that the next has the same memory."""
    engine = Engine(model, config, allocator=allocator)
    title = (
        f"{allocator}: {len(chats)} chats in {format_bytes(engine.store.nbytes)} of keys and values, "
        f"{engine.store.num_pages} pages of {engine.store.page_size} tokens"
    )
    with RunView(console, engine, title) as view:
        run = run_chats(engine, allocator, chats, prompts, view.update)
    if console.is_terminal:
        console.print(f"{title}: done in {run.seconds:.1f} s", highlight=False)
    return run


def _print_answers(console: Console, chats: list[Chat], run: Run) -> None:
    """The first few answers, each with its question."""
    for number in range(min(_SHOWN_ANSWERS, len(chats))):
        result = run.finished[f"chat-{number}"]
        console.print(Text(f"\n> {_shortened(chats[number].user)}", style="bold"))
        console.print(Text(result.outputs[0].text.strip() or f"({result.error or 'empty answer'})"))


def _shortened(text: str, most: int = 300) -> str:
    """The text on one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + " ..."
