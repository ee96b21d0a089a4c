"""Models to plan for: a built-in name, a folder or config.json, or a Hugging Face id; and what each is made of."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from pagedkv.errors import ConfigError, ModelNotFoundError
from pagedkv.spec import ModelSpec

_QUANTIZATION = "quantization_config"


@dataclass(frozen=True, slots=True)
class Model:
    """A model before it is loaded.

    Attributes:
        name: as the user wrote it.
        hub: its Hugging Face id or path, for other engines' commands.
        config: its transformers config with every default filled in, as far as transformers knows the architecture.
        spec: what its keys and values are made of; latent attention as GPU kernels store it.
        quantization: how its weights are quantised, as the config says it; None for not at all.
    """

    name: str
    hub: str
    config: Mapping[str, Any]
    spec: ModelSpec
    quantization: Mapping[str, Any] | None

    def size(self, key: str, default: int = 0) -> int:
        """A size from the config of the language model."""
        return int(self.config.get(key) or default)


@cache
def _built_in() -> Mapping[str, Mapping[str, Any]]:
    entries: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
        files("pagedkv.plan").joinpath("models.yaml").read_text(encoding="utf-8")
    )
    return entries


def built_in_models() -> list[str]:
    """Names of the models whose dimensions come with the package."""
    return list(_built_in())


def find_model(name: str) -> Model:
    """A model by built-in name or hub id of one, folder, config file, or Hugging Face id (cached, or fetched).

    Raises:
        ModelNotFoundError: there is none; the message has the nearest built-in names.
        ConfigError: its config cannot be read, or lacks a size.
    """
    config, hub = _config_of(name)
    quantization = config.get(_QUANTIZATION) or (config.get("text_config") or {}).get(_QUANTIZATION)
    full = _filled_in({key: value for key, value in config.items() if key != _QUANTIZATION}, name)
    return Model(name, hub, full, ModelSpec.from_config(full, name, latent=True), quantization)


def _config_of(name: str) -> tuple[Mapping[str, Any], str]:
    """The model's config as it is written, and what other engines call the model."""
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelNotFoundError(f"{path.parent} has no config.json")
    if path.is_file():
        return _read(path), name
    entries = _built_in()
    plain = name.lower()
    for known, entry in entries.items():
        if plain in (known, entry["hub"].lower()):
            config: Mapping[str, Any] = entry["config"]
            return config, entry["hub"]
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _read(_from_hub(name)), name
    raise ModelNotFoundError(f"there is no model {name!r} here; {_nearest(name)}")


def _nearest(name: str) -> str:
    """Built-in names like this one, for a message."""
    names = built_in_models()
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=4, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"built in are {', '.join(names)}"


def _from_hub(name: str) -> Path:
    """The config.json of a Hugging Face id, from the local cache or the hub."""
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError:
        raise ModelNotFoundError(
            f"{name} would come from the Hugging Face hub, for which huggingface_hub is missing: "
            f"pip install 'pagedkv[engine]'; {_nearest(name)}"
        ) from None
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub has many kinds of them, all with the reason in their first line
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelNotFoundError(
            f"{name} is not in the Hugging Face cache and cannot be fetched: {reason} ({_nearest(name)})"
        ) from None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's config: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} cannot be read as a model's config: it holds no mapping")
    return config


def _filled_in(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config of the language model with the architecture's defaults; as it is where transformers knows none.

    Published configs leave out what their architecture takes for granted, such as which layers see a window.
    """
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError:
        raise ConfigError(
            "planning needs transformers, for what architectures take for granted: pip install 'pagedkv[engine]'"
        ) from None
    kind = config.get("model_type")
    try:
        full: Any = AutoConfig.for_model(**config)
    except ValueError:
        if kind is None:
            raise ConfigError(f"config of {name} has no 'model_type'") from None
        return dict(config.get("text_config") or config)  # an architecture that transformers does not know
    except Exception as error:  # a value of the config that the architecture refuses
        raise ConfigError(f"config of {name} cannot be used: {str(error).strip().splitlines()[0]}") from None
    text = full.get_text_config(decoder=True)
    return dict(text.to_dict())
