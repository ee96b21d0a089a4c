"""The folder that pagedkv keeps fetched and converted models in, and how several processes share it.

Knows nothing about what is kept there. A name in the folder is either absent or complete: work is done under a
partial name and renamed when finished, so neither a crash nor a second process ever sees half a model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pagedkv.errors import ModelNotFoundError

_PARTIAL = ".partial-"


def cache_folder() -> Path:
    """$PAGEDKV_CACHE, else $XDG_CACHE_HOME/pagedkv, else ~/.cache/pagedkv. Not created here."""
    if own := os.environ.get("PAGEDKV_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pagedkv"
    return Path.home() / ".cache" / "pagedkv"


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the folder against other processes that would fetch or convert into it; made if absent.

    Whatever partial work lies there when the lock is held was left by a process that was killed: it is removed.
    Where the system has no file locks the work is done unlocked, which costs a second fetch at worst.

    Raises:
        ModelNotFoundError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise ModelNotFoundError(
            f"the model cache {folder} cannot be written ({error.strerror}); set PAGEDKV_CACHE to a folder that can"
        ) from None
    with lock:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


@contextlib.contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder inside `folder` (same file system, so that a rename out of it is atomic), removed at the end."""
    scratch = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
