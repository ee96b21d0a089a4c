"""The command line: parse, call, print. What takes time to import is imported by the command that needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"the command line needs {missing.name!r}; install it with: pip install 'pagedkv[cli,engine]'"
    ) from None

from pagedkv.cli_errors import errors_as_sentences
from pagedkv.cli_options import (
    AdminKey,
    APIKeys,
    BlockReuse,
    ChatTemplate,
    ConfigFile,
    CORSOrigins,
    GPUMemoryUtilization,
    Host,
    KVDtype,
    KVEvents,
    KVMemory,
    LogRequests,
    MaxBatchSize,
    MaxNumTokens,
    MaxQueueSize,
    MaxQueueTokens,
    MaxSeqLen,
    Model,
    PageSize,
    Port,
    RecordFile,
    RecordTo,
    ServedModel,
    ServedName,
    Tenants,
    Watermark,
    common_flags,
)
from pagedkv.cli_planning import planning
from pagedkv.errors import PagedKVError
from pagedkv.openmp import limit_spinning

app = typer.Typer(
    help="A paged KV cache for LLM inference: many requests in a fixed memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.add_typer(planning)


@app.callback()
def _commands() -> None:
    """A paged KV cache for LLM inference."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 picks the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this much mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 for all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")] = False,
    kv_memory: KVMemory = None,
    kv_dtype: KVDtype = None,
    max_seq_len: MaxSeqLen = None,
    page_size: PageSize = None,
    config: ConfigFile = None,
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    with errors_as_sentences():
        settings = _settings(config, model, kv_memory, kv_dtype, max_seq_len, page_size)
        from pagedkv.engine.chat import chat_tokens
        from pagedkv.engine.llm import LLM
        from pagedkv.engine.params import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        llm = LLM(config=settings, report=_report)
        tokens = prompt if raw else chat_tokens(llm.tokenizer, [{"role": "user", "content": prompt}])
        for piece in llm.stream(tokens, params):
            print(piece.text, end="", flush=True)
        print()
        if piece.result is not None and piece.result.error:
            raise PagedKVError(piece.result.error)


@app.command()
def demo(
    requests: Annotated[int, typer.Option(min=1, help="How many chats.")] = 64,
    kv_memory: KVMemory = "256MiB",
    kv_dtype: KVDtype = None,
    max_seq_len: MaxSeqLen = 2048,
    page_size: PageSize = None,
    model: Model = None,
    seed: Annotated[int, typer.Option(help="Another seed makes other chats.")] = 0,
    config: ConfigFile = None,
) -> None:
    """Answer many chats out of one small page pool, and compare with contiguous reservation."""
    with errors_as_sentences():
        settings = _settings(config, model, kv_memory, kv_dtype, max_seq_len, page_size)
        from pagedkv.demo.demo import run_demo

        result = run_demo(Console(), settings, requests, seed)
        if result.paged.errors or result.contiguous.errors:
            raise typer.Exit(1)


@app.command()
def serve(
    model: ServedModel = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: APIKeys = None,
    admin_key: AdminKey = None,
    served_model_name: ServedName = None,
    kv_memory: KVMemory = None,
    kv_dtype: KVDtype = None,
    max_seq_len: MaxSeqLen = None,
    page_size: PageSize = None,
    max_batch_size: MaxBatchSize = None,
    max_num_tokens: MaxNumTokens = None,
    max_queue_size: MaxQueueSize = None,
    max_queue_tokens: MaxQueueTokens = None,
    block_reuse: BlockReuse = None,
    watermark: Watermark = None,
    gpu_memory_utilization: GPUMemoryUtilization = None,
    tenants: Tenants = None,
    chat_template: ChatTemplate = None,
    cors_origin: CORSOrigins = None,
    record: RecordTo = None,
    kv_events_config: KVEvents = None,
    log_requests: LogRequests = False,
    config: ConfigFile = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients know it."""
    with errors_as_sentences():
        flags = {
            "max_batch_size": max_batch_size,
            "max_num_tokens": max_num_tokens,
            "max_queue_size": max_queue_size,
            "max_queue_tokens": max_queue_tokens,
            "kv_cache_config.enable_block_reuse": block_reuse,
            "kv_cache_config.free_gpu_memory_fraction": gpu_memory_utilization,
            "scheduler_config.watermark": watermark,
            **common_flags(model, kv_memory, kv_dtype, max_seq_len, page_size),
        }
        from pagedkv.config import EngineConfig
        from pagedkv.config_sources import read_text

        EngineConfig.load(config, flags, os.environ)  # what is wrong with the settings shows before a process starts
        from pagedkv.serve.app import ServeOptions
        from pagedkv.serve.run import events_settings, run
        from pagedkv.serve.tenants import read_tenants

        given = {key: value for key, value in flags.items() if value is not None}
        argument = {"path": None if config is None else str(config), "overrides": given}
        options = ServeOptions(
            api_key or (),
            admin_key,
            served_name=served_model_name,
            tenants=() if tenants is None else read_tenants(tenants),
            chat_template=None if chat_template is None else read_text(chat_template),
            cors_origins=cors_origin or (),
            record=record,
            kv_events=None if kv_events_config is None else events_settings(kv_events_config),
            log_requests=log_requests,
        )
        run(Console(), argument, options, host, port)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="Of a running server.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="PAGEDKV_ADMIN_KEY", help="If the server wants one.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, and end.")] = False,
) -> None:
    """Watch a running server in the terminal: its pages, requests and rates."""
    with errors_as_sentences():
        from pagedkv.serve.top import run

        run(Console(), url, admin_key, once)


@app.command()
def replay(
    file: RecordFile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8001,
) -> None:
    """Play a record in the page map, with pause, step, speed and a slider of time."""
    with errors_as_sentences():
        from pagedkv.monitor.record import Record
        from pagedkv.serve.run import run_replay

        run_replay(Console(), Record(file), host, port)


@app.command()
def explain(
    file: RecordFile,
    request: Annotated[str, typer.Option(help="Its id, or the beginning of it.")],
) -> None:
    """Say why a request of a record waited, was preempted, or missed the cache."""
    with errors_as_sentences():
        from pagedkv.monitor.explain import explain as sentences
        from pagedkv.monitor.record import Record

        for line in sentences(Record(file), request):
            print(line)


def main() -> None:
    """Entry point of the command `pagedkv`."""
    limit_spinning(os.environ)
    app()


def _settings(
    config: Path | None,
    model: str | None,
    kv_memory: str | None,
    kv_dtype: str | None,
    max_seq_len: int | None,
    page_size: int | None,
) -> Any:
    """The settings of flags, environment and file."""
    from pagedkv.config import EngineConfig

    return EngineConfig.load(config, common_flags(model, kv_memory, kv_dtype, max_seq_len, page_size), os.environ)


def _report(line: str) -> None:
    """Say on stderr what takes a while; stdout is for the answer."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
