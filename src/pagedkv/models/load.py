"""From what a user calls a model (nothing, a folder, a GGUF file, a Hugging Face id) to a model ready to run on pages.

Every way in which this can fail ends in one sentence that says what was looked for and what to do.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants as hub
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from pagedkv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from pagedkv.models.embedded import DEFAULT_MODEL, default_model_path
from pagedkv.models.gguf import converted_folder, read_gguf
from pagedkv.models.loaded import LoadedModel, adopt
from pagedkv.models.support import check_config
from pagedkv.models.weights import order_for_small_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# For models that carry no chat template of their own.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DTYPES = ("auto", "float32", "bfloat16")


def load_model(
    name: str | None = None, *, dtype: str = "auto", report: Callable[[str], None] | None = None
) -> LoadedModel:
    """Load a model and make it ready to run on pages.

    Args:
        name: None or its name for the embedded default model; a folder with safetensors, or with one GGUF file; a GGUF
            file; or a Hugging Face id (from the local cache, or fetched where HF_HUB_OFFLINE does not forbid it).
        dtype: "float32", "bfloat16", or "auto": bfloat16 where the CPU multiplies matrices of it in
            hardware, else float32.
        report: called with a line before anything that takes long (a fetch, a conversion).

    Raises:
        ConfigError: unknown dtype.
        ModelNotFoundError: there is no such model here, and it could not be fetched.
        UnsupportedModelError: the model cannot run on pages; the message says which property of it is the reason.
    """
    chosen = resolve_dtype(dtype)
    with _quiet():
        model, tokenizer, title = _read(name, chosen, report)
        if not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
        loaded = adopt(model, tokenizer, title)
    order_for_small_steps(model)
    return loaded


def resolve_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a name in `DTYPES`.

    Raises:
        ConfigError: any other name.
    """
    if dtype == "auto":
        return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return torch.float32 if dtype == "float32" else torch.bfloat16


def _cpu_multiplies_bfloat16() -> bool:
    """Whether bfloat16 products run in hardware. Elsewhere oneDNN emulates them, slower than float32."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def _read(
    name: str | None, dtype: torch.dtype, report: Callable[[str], None] | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """Find the model and read it; returns it with its tokenizer and the name to serve it under."""
    if name is None or name == DEFAULT_MODEL:
        return *_read_gguf(default_model_path(report=report), dtype, report), DEFAULT_MODEL
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is a file, but not a .gguf file; give its folder if it holds safetensors")
        return *_read_gguf(path, dtype, report), path.stem
    if path.is_dir():
        title = path.resolve().name
        if (path / "config.json").is_file():
            return *_read_pretrained(str(path), dtype), title
        return *_read_gguf(_only_gguf(path), dtype, report), title
    if name.endswith(".gguf") or name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no file or folder {path}")
    return *_read_pretrained(name, dtype), name


def _only_gguf(folder: Path) -> Path:
    """The one GGUF file of a folder."""
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"{folder} holds neither config.json (with safetensors) nor a .gguf file")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFoundError(f"{folder} holds {len(files)} .gguf files; give the path of one of them: {names}")
    return files[0]


def _read_gguf(
    path: Path, dtype: torch.dtype, report: Callable[[str], None] | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = converted_folder(path, report)
    if folder is not None:
        return _read_pretrained(str(folder), dtype)
    model, tokenizer = read_gguf(path)
    module: torch.nn.Module = model  # transformers' own `to` is typed without the dtype form
    module.to(dtype)
    return model, tokenizer


def _read_pretrained(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Config first, so that a model that cannot run is refused before its weights are read or fetched."""
    with _one_sentence(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_config(config, name)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UnsupportedModelError(f"{name} cannot run on pages: {config.model_type} is no causal language model")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        auto: Any = AutoModelForCausalLM  # its methods carry no types
        model, info = auto.from_pretrained(
            name, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would fill them with random numbers and go on
        raise UnsupportedModelError(f"{name} cannot be loaded: it lacks {missing[0]} ({len(missing)} weights missing)")
    return model, tokenizer


@contextlib.contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Turn what transformers and the hub raise about a model into one sentence of ours."""
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise ModelNotFoundError(f"{name} cannot be read as a model: {_first_line(error)}") from None
        where = f"neither a folder here nor in the Hugging Face cache {hub.HF_HUB_CACHE}"
        if hub.HF_HUB_OFFLINE:
            raise ModelNotFoundError(
                f"{name} is {where}, and HF_HUB_OFFLINE=1 forbids fetching it; unset it, or give a folder or .gguf file"
            ) from None
        raise ModelNotFoundError(f"{name} is {where}, and fetching it failed: {_first_line(error)}") from None
    except (ValueError, ImportError, KeyError) as error:
        raise UnsupportedModelError(f"{name} cannot be loaded: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and warnings off stderr: what matters of them is raised by name here."""
    logs: Any = transformers_logging  # its functions carry no types
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
