"""Where settings come from: a YAML file with the line of each key, environment variables, and flags.

Each reader returns dotted key -> (raw value, place). Knows nothing about which settings exist or what they may be
(see config.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from pagedkv.errors import ConfigError

Found = dict[str, tuple[Any, str]]
"""Dotted key -> (raw value, place): "engine.yaml:7", "environment PAGEDKV_..." or "flag"."""

ENVIRONMENT_PREFIX = "PAGEDKV_"

_NIM_NAMES = MappingProxyType(
    {
        "NIM_ENABLE_KV_CACHE_REUSE": "kv_cache_config.enable_block_reuse",
        "NIM_KVCACHE_PERCENT": "kv_cache_config.free_gpu_memory_fraction",
        "NIM_MAX_MODEL_LEN": "max_seq_len",
        "NIM_NUM_KV_CACHE_SEQ_LENS": "kv_cache_config.num_full_sequences",
    }
)
"""What NVIDIA NIM calls some of the settings. Our own variable goes before NIM's."""

_NOT_SETTINGS = frozenset({"PAGEDKV_CACHE", "PAGEDKV_API_KEY", "PAGEDKV_ADMIN_KEY"})
"""Variables of our prefix that are no settings of an engine: places of this machine, and keys of the server."""

# A Kubernetes service called "pagedkv" injects these into every pod; they are nobody's settings.
_KUBERNETES = re.compile(r"PAGEDKV_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


def read_flags(overrides: Mapping[str, Any]) -> Found:
    """Values of flags, by dotted key or nested one deep; None means that the flag was not given."""
    found: Found = {}
    for key, value in overrides.items():
        nested = isinstance(value, Mapping)
        leaves = {f"{key}.{name}": leaf for name, leaf in value.items()} if nested else {key: value}
        found.update({name: (leaf, "flag") for name, leaf in leaves.items() if leaf is not None})
    return found


def read_environment(environ: Mapping[str, str]) -> Found:
    """PAGEDKV_SECTION__NAME and NIM's variables; an empty one counts as not set, the text `null` means None."""
    found: Found = {
        key: (environ[variable].strip(), f"environment {variable}")
        for variable, key in _NIM_NAMES.items()
        if environ.get(variable, "").strip()
    }
    for variable, value in sorted(environ.items()):
        text = value.strip()
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text:
            continue
        if variable in _NOT_SETTINGS or _KUBERNETES.fullmatch(variable):
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        found[key] = (None if text == "null" else text, f"environment {variable}")
    return found


def read_text(path: Path) -> str:
    """The text of a file; ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def read_file(path: Path, sections: Collection[str] | None) -> Found:
    """Keys of a YAML file whose mappings are the top level and `sections`; None if all its keys are sections.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, repeats a key, or has no mapping where one must be.
    """
    text = read_text(path)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        root = loader.get_single_node()
        found: Found = {}
        for key, (node, place) in ({} if root is None else _pairs(loader, root, path, "")).items():
            if sections is not None and key not in sections:
                found[key] = (_value(loader, node, place), place)
                continue
            for name, (leaf, leaf_place) in _pairs(loader, node, path, key).items():
                found[f"{key}.{name}"] = (_value(loader, leaf, leaf_place), leaf_place)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from None
    finally:
        loader.dispose()
    return found


def _pairs(loader: yaml.SafeLoader, node: yaml.Node, path: Path, section: str) -> dict[str, tuple[yaml.Node, str]]:
    """Key -> (value node, "file:line") of a mapping node; an empty section counts as an empty mapping."""
    if not isinstance(node, yaml.MappingNode):
        place = f"{path}:{node.start_mark.line + 1}"
        if _value(loader, node, place) is None:
            return {}
        raise ConfigError(f"{place}: {section or 'the file'} must be a mapping of names to values")
    pairs: dict[str, tuple[yaml.Node, str]] = {}
    for key_node, value_node in node.value:
        key, place = str(key_node.value), f"{path}:{key_node.start_mark.line + 1}"
        if key in pairs:  # YAML readers let the last one win without a word
            raise ConfigError(f"{place}: {key} stands here a second time, first at {pairs[key][1]}")
        pairs[key] = (value_node, place)
    return pairs


def _value(loader: yaml.SafeLoader, node: yaml.Node, place: str) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # a date that does not exist, for example
        raise ConfigError(f"{place}: {node.value!r} cannot be read: {error}") from None
