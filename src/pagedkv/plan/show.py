"""How a plan is shown: tables for people, and a mapping for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from pagedkv.budget import format_bytes
from pagedkv.plan.advice import advise, tensorrt_llm_yaml, vllm_flags
from pagedkv.plan.planner import RUNTIME_BYTES, Plan

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def lengths(plan: Plan) -> list[int]:
    """The lengths at which requests are counted: powers of two up to the longest, and the longest."""
    return [*(length for length in _LENGTHS if length < plan.max_seq_len), plan.max_seq_len]


def plan_as_dict(plan: Plan) -> Mapping[str, Any]:
    """All figures of a plan; sizes in bytes, of one rank unless named `total`."""
    advice = advise(plan)
    return {
        "model": plan.model.name,
        "device": {"name": plan.device.name, "memory_bytes": plan.device.memory, "used_bytes": plan.device.used},
        "tensor_parallel_size": plan.settings.tp,
        "weights": {
            "parameters": plan.weights.parameters,
            "dtype": plan.weights.dtype,
            "total_bytes": plan.weights.nbytes,
            "rank_bytes": plan.weights.rank_bytes,
        },
        "activation_bytes": plan.activations,
        "kv_bytes": plan.room,
        "kv_dtype": plan.settings.kv_dtype,
        "bytes_per_token": plan.token_bytes,
        "bytes_per_page": plan.token_bytes * plan.settings.page_size,
        "page_size": plan.settings.page_size,
        "pages": plan.pages,
        "tokens": plan.tokens,
        "pools": [
            {
                "layers": len(group.spec.layers),
                "window": group.window,
                "pages": group.pages,
                "page_bytes": group.page_bytes,
            }
            for group in plan.groups
        ],
        "max_seq_len": plan.max_seq_len,
        "requests": {str(length): plan.requests(length) for length in lengths(plan)},
        "contiguous_requests": plan.contiguous_requests(),
        "limits": advice.limits,
        "advice": {name: {"value": getattr(advice, name), "reason": reason} for name, reason in advice.reasons.items()},
        "tensorrt_llm": tensorrt_llm_yaml(plan, advice),
        "vllm": vllm_flags(plan, advice),
        "notes": list(plan.notes),
    }


def print_plan(console: Console, plan: Plan) -> None:
    """Print a plan: memory, pages, requests by length, what limits, and advice."""
    settings, advice = plan.settings, advise(plan)
    ranks = "" if settings.tp == 1 else f", each of {settings.tp}"
    console.print(f"[bold]{plan.model.name}[/] on {plan.device.name}{ranks}", highlight=False)
    console.print(_memory(plan))
    console.print(_pages(plan))
    console.print(_requests(plan))
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"\nwhat limits: {advice.limits}", highlight=False, markup=False)
    for name, reason in advice.reasons.items():
        console.print(f"  {name} {getattr(advice, name)}: {reason}", highlight=False, markup=False)
    console.print("\n[bold]TensorRT-LLM[/]")
    print(tensorrt_llm_yaml(plan, advice), end="")
    console.print("\n[bold]vLLM[/]")
    print(f"vllm serve {plan.model.hub} {vllm_flags(plan, advice)}")


def _memory(plan: Plan) -> Table:
    table = Table(title="memory of one device", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    device, settings = plan.device, plan.settings
    table.add_row("may be used", format_bytes(int(device.memory * settings.fraction)), f"{settings.fraction:.0%} of it")
    if device.used:
        table.add_row("others use", format_bytes(device.used), "now")
    millions = plan.weights.parameters / 1e6
    table.add_row("weights", format_bytes(plan.weights.rank_bytes), f"{millions:,.0f} M, {plan.weights.dtype}")
    table.add_row(
        "activations and runtime",
        format_bytes(plan.activations),
        f"{settings.max_num_tokens} tokens per step, and {format_bytes(RUNTIME_BYTES)}",
    )
    table.add_row("keys and values", format_bytes(plan.room), "the rest", style="bold")
    return table


def _pages(plan: Plan) -> Table:
    size = plan.settings.page_size
    table = Table(title=f"pages of {size} tokens, keys and values {plan.settings.kv_dtype}", title_justify="left")
    for name in ("layers", "heads x dims", "sees", "per token", "per page", "pages"):
        table.add_column(name, justify="right")
    for group in plan.groups:
        layer = group.spec.layers[0]
        table.add_row(
            str(len(group.spec.layers)),
            f"{layer.kv_heads} x ({layer.key_dim}+{layer.value_dim})",
            "all" if group.window is None else str(group.window),
            format_bytes(group.page_bytes // size),
            format_bytes(group.page_bytes),
            f"{group.pages:,}",
        )
    return table


def _requests(plan: Plan) -> Table:
    table = Table(title="requests at once", title_justify="left")
    table.add_column("tokens each", justify="right")
    table.add_column("paged", justify="right")
    table.add_column(f"contiguous, reserving {plan.max_seq_len}", justify="right")
    for length in lengths(plan):
        table.add_row(f"{length:,}", f"{plan.requests(length):,}", f"{plan.contiguous_requests():,}")
    return table
