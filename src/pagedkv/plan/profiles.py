"""Profiles: step times measured on a machine, and the model of time fitted to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import ConfigError
from pagedkv.plan.steptime import FEATURES, Fitted

_FORMAT = 1


class Measured(NamedTuple):
    """One kind of step: the amounts of `FEATURES` in it, and the seconds it took at the median."""

    amounts: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured.

    Attributes:
        model, machine: names. token_bytes: keys and values of a token, as they were stored.
        max_seq_len: the model's longest sequence.
        bandwidth: bytes per second that a plain read of memory reached.
        steps: the measurements. coefficients: of `FEATURES`, seconds. error: median of |fitted / measured - 1|.
    """

    model: str
    machine: str
    token_bytes: int
    max_seq_len: int
    bandwidth: float
    steps: tuple[Measured, ...]
    coefficients: tuple[float, ...]
    error: float

    @property
    def time(self) -> Fitted:
        """The model of time."""
        return Fitted(self.coefficients)


def fit(steps: Sequence[Measured], bandwidth: float) -> tuple[tuple[float, ...], float]:
    """Coefficients of `FEATURES`, none negative, and the median relative error of the fit.

    The least sum of absolute relative errors (Koenker and Bassett 1978, as a linear programme): short steps count as
    much as long ones, and a step that something else held up does not bend the rest. Copying a byte takes a read and a
    write at `bandwidth`.

    Raises:
        ConfigError: fewer steps than coefficients.
    """
    if len(steps) < len(FEATURES):
        raise ConfigError(f"{len(steps)} measured steps; a fit needs at least {len(FEATURES)}")
    seconds = np.array([step.seconds for step in steps])
    rows = np.array([step.amounts[:-1] for step in steps]) / seconds[:, None]
    found = _nonnegative(rows)
    error = float(np.median(np.abs(rows @ found - 1)))
    return (*map(float, found), 2 / bandwidth), error


def _nonnegative(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 with the least sum of |rows @ x - 1|; columns are scaled, for they differ by many orders.

    ::

        minimise sum(u)   where   rows @ x - u <= 1   and   -rows @ x - u <= -1
    """
    from scipy.optimize import linprog

    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    count, width = rows.shape
    plus, unit = rows / scale, np.eye(count)
    found = linprog(
        np.concatenate((np.zeros(width), np.ones(count))),
        A_ub=np.block([[plus, -unit], [-plus, -unit]]),
        b_ub=np.concatenate((np.ones(count), -np.ones(count))),
    )
    solved: NDArray[np.float64] = found.x[:width] / scale
    return solved


def write_profile(path: Path, profile: Profile) -> None:
    """Write it as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    tree = {"format": _FORMAT, "features": FEATURES, **asdict(profile)}
    try:
        path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None


def read_profile(path: Path) -> Profile:
    """Read what `write_profile` wrote.

    Raises:
        ConfigError: it cannot be read, or is of another format.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree.pop("format") != _FORMAT or tuple(tree.pop("features")) != FEATURES:
            raise ConfigError(f"{path} is a profile of another version; measure again with `pagedkv profile`")
        steps = tuple(Measured(tuple(amounts), seconds) for amounts, seconds in tree.pop("steps"))
        profile = Profile(steps=steps, coefficients=tuple(tree.pop("coefficients")), **tree)
        _ = profile.time
        return profile
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as a profile: {error}") from None
