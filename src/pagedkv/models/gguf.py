"""GGUF files as transformers models: dequantised once, kept as a safetensors folder in the cache, quick from then on.

Reading a GGUF file takes transformers some 25 s for a 135M model, most of it spent on the vocabulary in Python loops;
reading the converted folder takes under one. Knows nothing about pages, or about which model is the default.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.cachedir import cache_folder, exclusive, partial_folder
from pagedkv.models.support import check_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A converted folder is float32, 5 to 7 times the size of a 4-bit file: worth its disk space for small models only.
_CONVERT_UP_TO_BYTES = 1 << 30

_log = logging.getLogger(__name__)


def converted_folder(path: Path, report: Callable[[str], None] | None = None) -> Path | None:
    """The safetensors folder of a GGUF file, converted on first use.

    None for a file that is too large to keep twice. The folder is named after
    the file's path, size and time, so a replaced file is converted anew.

    Raises:
        UnsupportedModelError: the file cannot be read as a causal LM.
        ModelNotFoundError: the cache folder cannot be written.
    """
    path = path.resolve()
    facts = path.stat()
    if facts.st_size > _CONVERT_UP_TO_BYTES:
        return None
    identity = hashlib.sha256(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "converted"
    target = folder / f"{path.stem}-{identity}"
    if target.is_dir():
        return target
    with exclusive(folder):
        if target.is_dir():  # another process converted it while this one waited
            return target
        line = f"converting {path.name} for quicker starts (once, half a minute for a small model)"
        _log.info(line)
        if report is not None:
            report(line)
        model, tokenizer = read_gguf(path)
        with partial_folder(folder) as scratch:
            complete = scratch / "model"
            model.save_pretrained(complete)
            tokenizer.save_pretrained(complete)
            complete.replace(target)
    return target


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (float32) and tokenizer out of one GGUF file, dequantised.

    This goes through the function that transformers' own `from_pretrained(gguf_file=...)` uses, but not through that
    method, which insists on the package accelerate without a use for it here.

    Raises:
        UnsupportedModelError: transformers does not know the architecture, or weights are missing from the file.
    """
    # tqdm writes its bar to stderr whatever transformers' own switch says
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            auto: Any = AutoModelForCausalLM  # neither carries types
            read: Any = load_gguf_checkpoint
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            check_config(config, path.name)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            with torch.device("meta"):
                names = auto.from_config(config)
            weights = read(str(path), return_tensors=True, model_to_load=names)["tensors"]
            model = auto.from_config(config, dtype=torch.float32)
        except (ValueError, NotImplementedError, KeyError, OSError) as error:
            raise UnsupportedModelError(
                f"{path} cannot be read as a causal LM ({str(error).splitlines()[0] if str(error) else error!r})"
            ) from None
        missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ())
    absent = [name for name in missing if not (model.config.tie_word_embeddings and name in tied)]
    if absent or unexpected:
        wrong = f"lacks {absent[0]}" if absent else f"has {unexpected[0]}, which the model does not know"
        raise UnsupportedModelError(
            f"{path} cannot be loaded: it {wrong} ({len(absent) + len(unexpected)} such weights)"
        )
    return model, tokenizer
