"""The options of the commands: names, aliases, and what `--help` says of them. The second names are vLLM's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str | None,
    typer.Option(help="Folder, GGUF file or Hugging Face id; SmolLM2-135M-Instruct if not given."),
]
KVMemory = Annotated[
    str | None,
    typer.Option("--kv-memory", "--kv-cache-memory-bytes", help="Bytes for keys and values, such as 256MiB."),
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option("--max-seq-len", "--max-model-len", help="Longest prompt and answer together, in tokens."),
]
PageSize = Annotated[int | None, typer.Option("--page-size", "--block-size", help="Tokens per page, a multiple of 16.")]
KVDtype = Annotated[
    str | None,
    typer.Option("--kv-dtype", "--kv-cache-dtype", help="Element type of keys and values: bfloat16 or float32."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings; options here go before it.")]

ServedModel = Annotated[str | None, typer.Argument(help="Folder, GGUF file or Hugging Face id; the default model.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]
APIKeys = Annotated[
    list[str] | None, typer.Option(envvar="PAGEDKV_API_KEY", help="Who may ask; may be given several times.")
]
AdminKey = Annotated[
    str | None, typer.Option(envvar="PAGEDKV_ADMIN_KEY", help="Who may administer; without it, this machine.")
]
ServedName = Annotated[str | None, typer.Option(help="What clients call the model.")]
MaxBatchSize = Annotated[
    int | None, typer.Option("--max-batch-size", "--max-num-seqs", help="Requests computed at once.")
]
MaxNumTokens = Annotated[
    int | None, typer.Option("--max-num-tokens", "--max-num-batched-tokens", help="Tokens of one step.")
]
MaxQueueSize = Annotated[
    int | None, typer.Option("--max-queue-size", "--max-num-queued-reqs", help="Requests that may wait; more get 429.")
]
MaxQueueTokens = Annotated[int | None, typer.Option(help="Prompt tokens that may wait; more get 429.")]
BlockReuse = Annotated[
    bool | None,
    typer.Option(
        "--enable-block-reuse/--no-enable-block-reuse",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Share the pages of equal prefixes.",
    ),
]
Watermark = Annotated[float | None, typer.Option(help="Share of the pages kept free at admission.")]
GPUMemoryUtilization = Annotated[str | None, typer.Option(hidden=True)]
Tenants = Annotated[
    Path | None, typer.Option(help="YAML file of callers: name -> api_key, floor and ceiling of pages.")
]
ChatTemplate = Annotated[Path | None, typer.Option(help="Jinja file used instead of the model's template.")]
CORSOrigins = Annotated[
    list[str] | None, typer.Option(help="Web pages of this origin may call; may be given several times.")
]
RecordTo = Annotated[
    Path | None, typer.Option(help="Write what happens to pages and requests to this file, for `pagedkv replay`.")
]
KVEvents = Annotated[
    str | None, typer.Option(help='Publish KV events: \'{"endpoint": "tcp://*:5557"}\', as vLLM takes it.')
]
LogRequests = Annotated[
    bool, typer.Option("--log-requests", help="A line of JSON on stderr for each answer that has ended.")
]
RecordFile = Annotated[Path, typer.Argument(help="A file that `pagedkv serve --record` has written.")]


def common_flags(
    model: str | None, kv_memory: str | None, kv_dtype: str | None, max_seq_len: int | None, page_size: int | None
) -> dict[str, Any]:
    """The flags that all commands share, by the names of the settings."""
    return {
        "model": model,
        "max_seq_len": max_seq_len,
        "kv_cache_config.max_memory": kv_memory,
        "kv_cache_config.dtype": kv_dtype,
        "kv_cache_config.tokens_per_block": page_size,
    }
