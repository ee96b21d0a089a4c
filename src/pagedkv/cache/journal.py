"""Journal: what a verb has changed so far, so that a verb that fails half-way can be undone.

A refusal changes nothing because a verb asks before it acts. The journal is for what nobody asks about: no memory for
an array, an interrupt, a fault in our own code. Whoever changes a manager's state notes here first what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from operator import setitem
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Call:
    """A verb and what it was given. Arguments are copies: what the caller does with his own later changes nothing."""

    verb: str
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


class Journal:
    """The undo log of one manager. An entry restores what was there, so one whose change did not happen is harmless."""

    def __init__(self) -> None:
        self.verbs = 0  # begun so far
        self.calls: list[Call] | None = None  # that were answered, where somebody wants to replay them
        self._entries: list[tuple[Callable[..., object], Any, Any, Any]] = []

    def begin(self) -> None:
        """A verb starts; what the last one did stays."""
        self.verbs += 1
        self._entries.clear()

    def save(self, array: NDArray[Any], index: Any) -> None:
        """Remember array[index] before it is changed in place."""
        held = array[index]
        if isinstance(held, np.ndarray) and held.base is not None:  # a view would change with the array
            held = held.copy()
        self._entries.append((setitem, array, index, held))

    def put(self, array: NDArray[Any], index: Any, values: ArrayLike) -> None:
        """array[index] = values."""
        self.save(array, index)
        array[index] = values

    def replace(self, array: NDArray[Any], index: NDArray[np.integer], old: ArrayLike, new: ArrayLike) -> None:
        """`put` where the caller knows what is there: `old`, an array or one value for all."""
        self._entries.append((setitem, array, index, old))
        array[index] = new

    def keep(self, thing: object, *names: str) -> None:
        """Remember attributes before they are assigned to."""
        for name in names:
            self._entries.append((setattr, thing, name, getattr(thing, name)))

    def entry(self, mapping: dict[Any, Any], key: object) -> None:
        """Remember mapping[key], or that it is absent."""
        self._entries.append((_restore, mapping, key, mapping.get(key, _ABSENT)))

    def undo(self) -> None:
        """Put everything back as it was when the verb began."""
        while self._entries:
            restore, thing, at, value = self._entries[-1]
            restore(thing, at, value)
            self._entries.pop()


def _restore(mapping: dict[Any, Any], key: object, value: object) -> None:
    if value is _ABSENT:
        mapping.pop(key, None)
    else:
        mapping[key] = value


class _Journaled(Protocol):
    journal: Journal
    nested: bool


_Self = TypeVar("_Self", bound=_Journaled)
_Args = ParamSpec("_Args")
_Answer = TypeVar("_Answer")


def atomic(verb: Callable[Concatenate[_Self, _Args], _Answer]) -> Callable[Concatenate[_Self, _Args], _Answer]:
    """A method that, if it raises, leaves the manager as it was before the call."""

    @wraps(verb)
    def whole(self: _Self, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Answer:
        if self.nested:  # called by a verb of the manager that owns this one: done or undone together with that
            return verb(self, *args, **kwargs)
        self.journal.begin()
        try:
            if self.journal.calls is not None:
                return _recorded(verb, self, self.journal.calls, *args, **kwargs)
            return verb(self, *args, **kwargs)
        except BaseException:
            self.journal.undo()
            raise

    return whole


def _recorded(
    verb: Callable[..., _Answer], manager: _Journaled, calls: list[Call], *args: object, **kwargs: object
) -> _Answer:
    """Run the verb and note the call once it is answered."""
    args = tuple(_read(arg) for arg in args)
    kwargs = {name: _read(arg) for name, arg in kwargs.items()}
    call = Call(verb.__name__, tuple(_kept(arg) for arg in args), {name: _kept(arg) for name, arg in kwargs.items()})
    answer = verb(manager, *args, **kwargs)
    calls.append(call)
    return answer


def _read(argument: object) -> object:
    """What can be read only once, as a list."""
    return list(argument) if isinstance(argument, Iterator) else argument


def _kept(argument: object) -> object:
    """A copy of what its owner may change. Namespaces and handles stay themselves: some are known by identity alone."""
    if isinstance(argument, np.ndarray):
        return argument.copy()
    return [_kept(item) for item in argument] if isinstance(argument, list) else argument
