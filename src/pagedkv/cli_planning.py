"""The commands that plan: plan, simulate, tune, profile."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from pagedkv.cli_errors import errors_as_sentences

planning = typer.Typer(pretty_exceptions_enable=False)

PlannedModel = Annotated[
    str, typer.Argument(help="Built-in name (llama-3-8b), Hugging Face id, folder, or config.json.")
]
GPU = Annotated[str, typer.Option(help="A10, A100-40GB, A100-80GB, L4, L40S, H100, H200, B200, MI300X, or 80GiB.")]
TP = Annotated[int, typer.Option("--tp", "--tensor-parallel-size", help="Devices that share each layer.")]
WeightDtype = Annotated[
    str,
    typer.Option("--dtype", help="Of the weights: auto (the config's), bfloat16, float16, float32, fp8, int8, int4."),
]
KVDtypes = Annotated[
    str,
    typer.Option("--kv-dtype", "--kv-cache-dtype", help="Of keys, values: auto, bfloat16, float16, float32, fp8."),
]
PlannedPageSize = Annotated[int, typer.Option("--page-size", "--block-size", help="Tokens per page.")]
Fraction = Annotated[
    float,
    typer.Option("--gpu-memory-fraction", "--gpu-memory-utilization", help="Share of the memory that may be used."),
]


@planning.command()
def plan(
    model: PlannedModel,
    gpu: GPU = "H100",
    tp: TP = 1,
    dtype: WeightDtype = "auto",
    kv_dtype: KVDtypes = "auto",
    page_size: PlannedPageSize = 16,
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", "--max-model-len", help="Longest prompt and answer together.")
    ] = None,
    avg_seq_len: Annotated[int, typer.Option(help="Tokens that a request holds on average.")] = 1024,
    gpu_memory_fraction: Fraction = 0.9,
    max_num_tokens: Annotated[int, typer.Option(help="Tokens of one step; they size the activations.")] = 2048,
    max_batch_size: Annotated[int, typer.Option(help="Requests of one step; they size the logits.")] = 256,
    weight_bytes: Annotated[str | None, typer.Option(help="Bytes of all weights, instead of counting them.")] = None,
    detect: Annotated[bool, typer.Option("--detect", help="Plan for this machine's GPUs, as used now.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how many requests fit on a GPU beside a model, and what to set."""
    with errors_as_sentences():
        from pagedkv.plan import show
        from pagedkv.plan.planner import Settings, plan_for

        settings = Settings(
            tp, kv_dtype, page_size, max_seq_len, avg_seq_len, gpu_memory_fraction, max_batch_size, max_num_tokens
        )
        made = plan_for(model, None if detect else gpu, settings, dtype, weight_bytes)
        if as_json:
            print(json.dumps(show.plan_as_dict(made), indent=2))
        else:
            show.print_plan(Console(), made)
