"""Synthetic traces: requests drawn from an arrival process, length distributions, shared prefixes and conversations.

A spec is a line (`synthetic:requests=1000,rate=4,prompt=lognormal:512:1`) or a YAML file with the same keys.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.random import Generator
from numpy.typing import NDArray

from pagedkv.errors import ConfigError, TraceError
from pagedkv.plan.traces import Trace

PREFIX = "synthetic:"
_PROCESSES = ("poisson", "uniform", "gamma", "at-once")


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What a synthetic trace is drawn from.

    Attributes:
        requests: how many in all.
        arrival: poisson, uniform (evenly spaced), gamma (bursts, with the coefficient of variation `cv`), or at-once.
        rate: conversations per second that begin.
        prompt, output: tokens; fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA, or exponential:MEAN.
        groups, prefix: each conversation begins with the `prefix` tokens of one of so many groups; 0 for none.
        turns: requests of a conversation; each prompt holds all that was said before.
        think: mean seconds from one turn of a conversation to the next, exponential. The trace is fixed beforehand: a
            turn does not wait for the answer to the one before.
        seed: makes it repeatable.
    """

    requests: int = 1000
    arrival: str = "poisson"
    rate: float = 4.0
    cv: float = 2.0
    prompt: str = "lognormal:512:1"
    output: str = "lognormal:128:1"
    groups: int = 0
    prefix: int = 0
    turns: int = 1
    think: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"requests": 1, "groups": 0, "prefix": 0, "turns": 1, "think": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {bound}")
        for name in ("rate", "cv"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.arrival not in _PROCESSES:
            raise ConfigError(f"arrival is {self.arrival!r}; it must be one of {', '.join(_PROCESSES)}")
        if bool(self.groups) != bool(self.prefix):
            raise ConfigError(f"groups is {self.groups} and prefix {self.prefix}; shared prefixes need both")
        for name in ("prompt", "output"):
            lengths(getattr(self, name), name)


def parse_synthetic(text: str) -> Synthetic:
    """The spec of a line `synthetic:key=value,...`.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    pairs = [part.partition("=") for part in text.removeprefix(PREFIX).split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{key.strip()!r} of the synthetic trace is not of the form key=value")
    return _from_mapping({key.strip(): value.strip() for key, _, value in pairs}, "the synthetic trace")


def read_synthetic(path: Path) -> Synthetic:
    """The spec of a YAML file.

    Raises:
        TraceError: the file cannot be read. ConfigError: an unknown key, or a value out of range.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TraceError(f"{path} cannot be read as a synthetic trace: {error}") from None
    if not isinstance(tree, dict):
        raise TraceError(f"{path} cannot be read as a synthetic trace: it holds no mapping of names to values")
    return _from_mapping(tree, str(path))


def _from_mapping(values: Mapping[str, Any], place: str) -> Synthetic:
    kinds: dict[str, Callable[[str], Any]] = {
        field.name: {"int": int, "float": float, "str": str}[str(field.type)] for field in fields(Synthetic)
    }
    given = {}
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(str(key), kinds, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(kinds)}"
            raise ConfigError(f"{place}: {key!r} is not known; {hint}")
        try:
            given[key] = kinds[key](str(value))
        except ValueError:
            raise ConfigError(f"{place}: {key} is {value!r}; it must be a number") from None
    return Synthetic(**given)


def lengths(text: str, name: str) -> Callable[[Generator, int], NDArray[np.int64]]:
    """A distribution of lengths, from its text: draws n whole numbers of at least 1.

    Raises:
        ConfigError: no such distribution, or not its arguments.
    """
    kind, *rest = text.split(":")
    try:
        numbers = [float(part) for part in rest]
        if min(numbers) <= 0:
            raise ValueError
        match kind, numbers:
            case "fixed", [size]:
                return lambda _, n: np.full(n, round(size))
            case "uniform", [low, high] if low <= high:
                return lambda random, n: random.integers(round(low), round(high) + 1, n)
            case "lognormal", [mean, sigma]:
                middle = np.log(mean) - sigma**2 / 2
                return lambda random, n: np.maximum(random.lognormal(middle, sigma, n).round(), 1).astype(np.int64)
            case "exponential", [mean]:
                return lambda random, n: np.maximum(random.exponential(mean, n).round(), 1).astype(np.int64)
    except ValueError:
        pass
    raise ConfigError(
        f"{name} is {text!r}; it must be fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or exponential:MEAN, above 0"
    )


def make_trace(spec: Synthetic, seed: int | None = None) -> Trace:
    """Draw the requests; `seed` instead of the spec's own.

    ::

        turn 1   [ prefix of the group | question 1 ]                                        -> answer 1
        turn 2   [ prefix of the group | question 1 | answer 1 | question 2 ]                -> answer 2
    """
    seed = spec.seed if seed is None else seed
    random = np.random.default_rng(seed)
    talks = -(-spec.requests // spec.turns)
    begin = np.cumsum(_gaps(spec, random, talks)) if spec.arrival != "at-once" else np.zeros(talks)
    pauses = random.exponential(spec.think, (talks, spec.turns)) if spec.think else np.zeros((talks, spec.turns))
    pauses[:, 0] = 0
    when = begin[:, None] + np.cumsum(pauses, axis=1)
    asked = lengths(spec.prompt, "prompt")(random, talks * spec.turns).reshape(talks, spec.turns)
    told = lengths(spec.output, "output")(random, talks * spec.turns).reshape(talks, spec.turns)
    group = random.integers(0, spec.groups, talks) if spec.groups else np.zeros(talks, np.int64)
    order = np.argsort(when, axis=None, kind="stable")[: spec.requests]
    ids: list[int] = []
    counts: list[int] = []
    starts = [0]
    for talk, turn in zip(*np.unravel_index(order, when.shape), strict=True):
        if spec.groups:
            ids.append(int(group[talk]))
            counts.append(spec.prefix)
        first = spec.groups + 2 * int(talk) * spec.turns  # of the talk's segments: question, answer, question, ...
        ids += range(first, first + 2 * int(turn) + 1)
        said = np.stack((asked[talk], told[talk]), axis=1).ravel()
        counts += said[: 2 * int(turn) + 1].tolist()
        starts.append(len(ids))
    part_start, part_tokens = np.array(starts, np.int64), np.array(counts, np.int32)
    return Trace(
        f"synthetic, seed {seed}",
        when.ravel()[order] - when.ravel()[order[0]],
        np.add.reduceat(part_tokens, part_start[:-1]).astype(np.int32),
        told.ravel()[order].astype(np.int32),
        part_start,
        np.array(ids, np.int64),
        part_tokens,
        spec.groups + 2 * order + 1,
    )


def _gaps(spec: Synthetic, random: Generator, count: int) -> NDArray[np.float64]:
    """Seconds between arrivals, with a mean of 1 / rate."""
    if spec.arrival == "uniform":
        return np.full(count, 1 / spec.rate)
    shape = 1.0 if spec.arrival == "poisson" else 1 / spec.cv**2
    return random.gamma(shape, 1 / (spec.rate * shape), count)
