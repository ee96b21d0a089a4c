"""Every error that pagedkv raises on purpose. Each message names the value that was wrong and the limit it broke."""

from __future__ import annotations


class PagedKVError(Exception):
    """Base of all errors raised by this package."""


class InvalidRequestError(PagedKVError, ValueError):
    """A request or a call's argument is wrong in itself; nothing was allocated."""


class NeverFitsError(InvalidRequestError):
    """A request that could not be served even by an empty pool, with the arithmetic in the message."""


class QueueFullError(PagedKVError):
    """The bounded waiting queue is full: try again later."""


class ConfigError(PagedKVError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class OutOfMemoryBudgetError(ConfigError):
    """The memory budget holds no useful number of pages; the message says bytes needed and bytes given."""


class StaleSequenceError(PagedKVError, LookupError):
    """A sequence handle whose row has been released."""


class UnsupportedModelError(PagedKVError):
    """This model cannot run on pages; the message says which property of it is the reason."""


class ModelNotFoundError(PagedKVError, LookupError):
    """The model is neither on disk nor in the cache, and could not be fetched."""


class AuditError(PagedKVError, AssertionError):
    """An invariant of the allocator does not hold; the message lists every violation found."""


class TraceError(PagedKVError, ValueError):
    """A row of a trace cannot be read; the message says file, line and reason."""
