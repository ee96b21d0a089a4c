"""How a command ends when something is wrong: one sentence and an exit code, never a stack trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from pagedkv.errors import PagedKVError


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Our own errors end a command with one sentence and exit code 1, Ctrl-C with 130."""
    try:
        yield
    except PagedKVError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("pagedkv"):
            raise
        print(
            f"error: {missing.name!r} is not installed; pip install 'pagedkv[cli,engine,serve,plan]'", file=sys.stderr
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(130) from None
