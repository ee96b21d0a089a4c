"""The commands that plan: plan, simulate, tune, profile."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagedkv.cli_errors import errors_as_sentences
from pagedkv.cli_options import (
    ConfigFile,
    KVDtype,
    KVMemory,
    MaxBatchSize,
    MaxNumTokens,
    MaxSeqLen,
    PageSize,
    common_flags,
)

if TYPE_CHECKING:
    from pagedkv.plan.traces import Trace

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


TraceName = Annotated[
    str, typer.Argument(help="Azure or BurstGPT CSV, Mooncake JSONL, synthetic:KEY=VALUE,... or its YAML file.")
]
RateScale = Annotated[float, typer.Option(help="Let requests arrive so many times as fast.")]
Limit = Annotated[int | None, typer.Option(help="Take the first so many requests.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Pass over rows that cannot be read.")]
Profile = Annotated[Path | None, typer.Option(help="What `pagedkv profile` measured, instead of --gpu's data sheet.")]
Seed = Annotated[int | None, typer.Option(help="Of a synthetic trace; instead of its own.")]
SimulatedModel = Annotated[str, typer.Option(help="As for `pagedkv plan`.")]
KVBudget = Annotated[
    list[str] | None,
    typer.Option("--kv-memory", "--kv-cache-memory-bytes", help="Bytes for keys and values, not the GPU's; several."),
]


def _requests(trace: str, limit: int | None, skip_bad: bool, rate_scale: float, seed: int | None) -> Trace:
    """The trace of a command; says how many bad rows were passed over."""
    from pagedkv.plan.compare import open_trace

    requests = open_trace(trace, limit=limit, skip_bad=skip_bad, rate_scale=rate_scale, seed=seed)
    if requests.skipped:
        print(f"{requests.skipped} bad rows were passed over", file=sys.stderr)
    return requests


@planning.command()
def simulate(
    trace: TraceName,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: GPU = "H100",
    tp: TP = 1,
    dtype: WeightDtype = "auto",
    kv_dtype: KVDtypes = "auto",
    gpu_memory_fraction: Fraction = 0.9,
    kv_memory: KVBudget = None,
    allocator: Annotated[
        list[str] | None, typer.Option(help="paged, contiguous (longest length) or growing; several. All if not given.")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option("--page-size", "--block-size", help="Tokens per page; several make a sweep.")
    ] = None,
    prefix_caching: Annotated[
        str | None, typer.Option(help="on, off, or both; as the settings have it if not given.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="capacity_scheduler_policy; several.")] = None,
    max_batch_size: Annotated[int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="512.")] = None,
    max_num_tokens: Annotated[
        int | None, typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="2048.")
    ] = None,
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", "--max-model-len", help="The trace's longest request if not given.")
    ] = None,
    watermark: Annotated[float | None, typer.Option(help="Share of the pages kept free at admission.")] = None,
    config: ConfigFile = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    skip_bad: SkipBad = False,
    seed: Seed = None,
    profile: Profile = None,
    report: Annotated[Path | None, typer.Option(help="Write tables and plots to this HTML file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write figures and requests as CSV to this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a trace through the scheduler and allocator that serve, in simulated time, on several setups."""
    with errors_as_sentences():
        from pagedkv.engine.allocators import ALLOCATORS
        from pagedkv.plan import compare
        from pagedkv.plan.report import write_report
        from pagedkv.plan.scene import Scene, on_or_off

        console = Console(stderr=True)
        requests = _requests(trace, limit, skip_bad, rate_scale, seed)
        flags = {
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            "max_seq_len": max_seq_len,
            "scheduler_config.watermark": watermark,
        }
        scene = Scene.make(
            requests, model, gpu, tp, dtype, kv_dtype, gpu_memory_fraction, profile, (config, flags, os.environ)
        )
        choices = compare.Choices(
            budgets=scene.budgets(kv_memory),
            allocators=allocator or ALLOCATORS,
            page_sizes=page_size or (scene.page_size,),
            prefix_caching=on_or_off(prefix_caching) if prefix_caching else (scene.prefix_caching,),
            policies=policy or (scene.config.scheduler_config.capacity_scheduler_policy,),
        )
        chosen = compare.setups(choices, scene.config, scene.token_bytes)
        results = compare.run_all(console, requests, chosen, scene.time)
        titles = [compare.title(setup, chosen) for setup in chosen]
        if as_json:
            print(compare.as_json(titles, results))
        else:
            out = Console()
            out.print(scene.about, highlight=False, markup=False)
            out.print(compare.figures_table(titles, results))
            for name, result in zip(titles, results, strict=True):
                for reason, count in result.refused.items():
                    if count:
                        out.print(f"{name}: {count} requests refused, {reason}", highlight=False, markup=False)
        if csv is not None:
            compare.write_csv(csv, titles, results)
        if report is not None:
            write_report(report, requests, scene.about, titles, results)
            print(f"report: {report}", file=sys.stderr)


@planning.command()
def profile(
    model: Annotated[str | None, typer.Argument(help="As for `pagedkv generate`; the default model.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write what was measured.")] = Path("profile.json"),
    repeats: Annotated[int, typer.Option(min=1, help="How often each batch is run; medians count.")] = 3,
    kv_memory: KVMemory = None,
    kv_dtype: KVDtype = None,
    max_seq_len: MaxSeqLen = None,
    page_size: PageSize = None,
    max_batch_size: MaxBatchSize = None,
    max_num_tokens: MaxNumTokens = None,
    config: ConfigFile = None,
) -> None:
    """Measure this machine: memory bandwidth and step times, for `simulate --profile`."""
    with errors_as_sentences():
        from rich.progress import Progress

        from pagedkv.config import EngineConfig
        from pagedkv.engine.engine import Engine
        from pagedkv.plan.measure import measure
        from pagedkv.plan.profiles import write_profile
        from pagedkv.plan.steptime import FEATURES

        flags = {
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            **common_flags(model, kv_memory, kv_dtype, max_seq_len, page_size),
        }
        settings = EngineConfig.load(config, flags, os.environ)
        console = Console(stderr=True)
        engine = Engine.from_config(settings, report=lambda line: console.print(line, highlight=False, markup=False))
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("measuring steps", total=1.0)
            measured = measure(engine, repeats, lambda share: bar.update(task, completed=share))
        write_profile(output, measured)
        print(f"{measured.model} on {measured.machine}: {len(measured.steps)} kinds of step")
        print(f"plain reads: {measured.bandwidth / 1e9:.1f} GB/s")
        for name, seconds in zip(FEATURES, measured.coefficients, strict=True):
            print(f"  {name:14} {seconds:.3g} s")
        print(f"fitted steps are off by {measured.error:.1%} at the median; written to {output}")


@planning.command()
def tune(
    trace: TraceName,
    model: SimulatedModel = "llama-3.1-8b",
    gpu: GPU = "H100",
    tp: TP = 1,
    dtype: WeightDtype = "auto",
    kv_dtype: KVDtypes = "auto",
    gpu_memory_fraction: Fraction = 0.9,
    kv_memory: Annotated[str | None, typer.Option(help="Bytes for keys and values, not the GPU's.")] = None,
    ttft: Annotated[float | None, typer.Option(help="Goal: p95 of the time to first token, in seconds.")] = None,
    itl: Annotated[float | None, typer.Option(help="Goal: p95 of the time between tokens, in seconds.")] = None,
    refuse: Annotated[float, typer.Option(help="Share of the longest requests that max_seq_len may refuse.")] = 0.0,
    trials: Annotated[int, typer.Option(help="Settings to try.")] = 40,
    limit: Annotated[int, typer.Option(help="Take the first so many requests.")] = 1000,
    rate_scale: RateScale = 1.0,
    skip_bad: SkipBad = False,
    seed: Annotated[int, typer.Option(help="Of the search and of a synthetic trace.")] = 0,
    profile: Profile = None,
    config: ConfigFile = None,
    output: Annotated[Path | None, typer.Option(help="Write the settings to this file, for `serve --config`.")] = None,
) -> None:
    """Find the settings that maximise throughput under a latency goal, by simulating a trace."""
    with errors_as_sentences():
        from rich.progress import Progress

        from pagedkv.plan import compare
        from pagedkv.plan.scene import Scene
        from pagedkv.plan.tune import Goal, config_file, write_config
        from pagedkv.plan.tune import tune as search

        console = Console(stderr=True)
        goal = Goal(ttft, itl, refuse)
        requests = _requests(trace, limit, skip_bad, rate_scale, seed)
        scene = Scene.make(
            requests, model, gpu, tp, dtype, kv_dtype, gpu_memory_fraction, profile, (config, {}, os.environ)
        )
        budget = scene.budgets([kv_memory] if kv_memory else None)[0]
        start = compare.make_setup(
            "paged", budget, scene.token_bytes, scene.config, scene.page_size, scene.prefix_caching
        )
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("trying settings", total=trials)
            tuned = search(
                requests, start, scene.time, goal, trials, seed, lambda done: bar.update(task, completed=done)
            )
        Console().print(compare.figures_table(["before", "tuned"], [tuned.before, tuned.after]))
        text = config_file(tuned, scene.about)
        print(text, end="")
        if output is not None:
            write_config(output, text)
        if not tuned.meets:
            print("no settings tried meet the goal; these come nearest", file=sys.stderr)
            raise typer.Exit(1)
