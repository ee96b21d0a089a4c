"""Planner: how many pages, tokens and requests fit on a device beside a model's weights.

The arithmetic is the allocator's own (pagedkv.budget): what a plan calls "most requests", a manager of that many pages
admits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from pagedkv.budget import (
    DTYPE_BYTES,
    format_bytes,
    kv_room,
    page_bytes,
    pages_for_tokens,
    parse_bytes,
    window_pages,
)
from pagedkv.errors import ConfigError, OutOfMemoryBudgetError, PagedKVError
from pagedkv.plan.catalog import Model, find_model
from pagedkv.plan.hardware import DEVICES, Device, detect, find_device
from pagedkv.plan.weights import Weights, count_weights, given_weights
from pagedkv.spec import ModelSpec

RUNTIME_BYTES = 1024**3
"""Set aside on a GPU for what is neither weights nor activations: the driver's context, graphs, workspaces."""

KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn", **{name: name for name in DTYPE_BYTES}}
"""What users call an element type of keys and values, and what it is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What to plan with.

    Attributes:
        tp: tensor-parallel ranks, each a device of its own.
        kv_dtype: a name of `KV_DTYPES`.
        page_size: tokens of a page.
        max_seq_len: longest prompt and answer together, in tokens; None for the model's own, lowered if it must be.
        avg_seq_len: tokens that a request holds on average.
        fraction: share of a device's memory that may be used, by all together.
        max_batch_size, max_num_tokens: of one step; they size the activations.
    """

    tp: int = 1
    kv_dtype: str = "auto"
    page_size: int = 16
    max_seq_len: int | None = None
    avg_seq_len: int = 1024
    fraction: float = 0.9
    max_batch_size: int = 256
    max_num_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("tp", "page_size", "avg_seq_len", "max_batch_size", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise ConfigError(f"max_seq_len is {self.max_seq_len}; it must be at least 2")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"the share of the memory is {self.fraction}; it must be above 0 and at most 1")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"KV dtype {self.kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that keep the same tokens, and their pool on one rank.

    Attributes:
        spec: the layers. window: tokens that their queries see, None for all.
        page_bytes: of one page over these layers. pages: usable ones.
    """

    spec: ModelSpec
    window: int | None
    page_bytes: int
    pages: int = 0

    def demand(self, tokens: int, page_size: int, step: int) -> int:
        """Pages that a request holds here when it stores `tokens` tokens: those in its window and in one step."""
        whole = pages_for_tokens(tokens, page_size)
        return whole if self.window is None else min(whole, window_pages(self.window, step, page_size))


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits on each rank. Bytes are of one rank, unless they say otherwise.

    Attributes:
        groups: one pool for each kind of layer; models without windows have one.
        room: bytes for keys and values.
        notes: what was changed or should be known, in sentences.
    """

    model: Model
    device: Device
    settings: Settings
    weights: Weights
    activations: int
    room: int
    groups: tuple[Group, ...]
    max_seq_len: int
    notes: tuple[str, ...] = field(default=())

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(group.page_bytes for group in self.groups) // self.settings.page_size

    @property
    def pages(self) -> int:
        """Pages of the pool in which a request grows with its length."""
        return min((group.pages for group in self.groups if group.window is None), default=self.groups[0].pages)

    @property
    def tokens(self) -> int:
        """Tokens that those pages hold."""
        return self.pages * self.settings.page_size

    def requests(self, tokens: int) -> int:
        """Requests that store `tokens` tokens each and fit at once, sharing nothing."""
        size, step = self.settings.page_size, self.settings.max_num_tokens
        return min(group.pages // group.demand(tokens, size, step) for group in self.groups)

    def contiguous_requests(self) -> int:
        """Requests that fit if each reserves max_seq_len tokens in every layer, whatever it comes to."""
        stretch = pages_for_tokens(self.max_seq_len, self.settings.page_size)
        return self.room // (stretch * sum(group.page_bytes for group in self.groups))


def layer_groups(spec: ModelSpec, page_size: int, kv_dtype: str, longest: int) -> tuple[Group, ...]:
    """The layers by their windows, full attention first; a window as long as the longest request counts as none."""
    by_window: dict[int | None, list[int]] = {}
    for at, layer in enumerate(spec.layers):
        window = layer.window if layer.window is not None and layer.window < longest else None
        by_window.setdefault(window, []).append(at)
    parts = [
        (window, replace(spec, layers=tuple(spec.layers[at] for at in by_window[window])))
        for window in sorted(by_window, key=lambda window: -math.inf if window is None else window)
    ]
    return tuple(Group(part, window, page_bytes(part, page_size, kv_dtype)) for window, part in parts)


def divide(room: int, groups: tuple[Group, ...], settings: Settings, longest: int) -> tuple[Group, ...]:
    """Pools of `room` bytes in all, in the ratio in which a request of avg_seq_len tokens needs them.

    Each sets a null page aside, and has room for one request of `longest` tokens if they all can.

    Raises:
        OutOfMemoryBudgetError: they cannot.
    """
    size, step = settings.page_size, settings.max_num_tokens
    least = [group.demand(longest, size, step) for group in groups]
    fixed = sum((pages + 1) * group.page_bytes for pages, group in zip(least, groups, strict=True))
    if fixed > room:
        raise OutOfMemoryBudgetError(
            f"{format_bytes(room)} ({room} bytes) for keys and values cannot hold one request of {longest} tokens, "
            f"which takes {format_bytes(fixed)} ({fixed} bytes) with the null page"
        )
    usual = [group.demand(min(settings.avg_seq_len, longest), size, step) for group in groups]
    null = sum(group.page_bytes for group in groups)
    unit = sum(pages * group.page_bytes for pages, group in zip(usual, groups, strict=True))
    pools = [(room - null) // unit * pages for pages in usual]
    if any(have < need for have, need in zip(pools, least, strict=True)):  # the long request first, then the usual
        times = (room - fixed) // unit
        pools = [need + times * pages for need, pages in zip(least, usual, strict=True)]
    left = room - null - sum(pages * group.page_bytes for pages, group in zip(pools, groups, strict=True))
    pools[0] += left // groups[0].page_bytes
    return tuple(replace(group, pages=pages) for group, pages in zip(groups, pools, strict=True))


def activation_bytes(model: Model, settings: Settings) -> int:
    """Bytes of activations of the largest step on one rank, by formula.

    ::

        tokens x 2 bytes x (4 hidden + 2 intermediate / tp + query heads x dim / tp)  +  requests x vocabulary x 6 bytes

    Residual, normed input, attention output and its projection; gate and up projection; queries; and the logits in
    bfloat16 and float32. With experts, `intermediate` is what the experts of one token have together.
    """
    config = model.config
    width = model.size("intermediate_size")
    if config.get("num_experts_per_tok"):
        expert = model.size("moe_intermediate_size", width)
        width = expert * (model.size("num_experts_per_tok") + model.size("n_shared_experts"))
    queries = max(layer.query_heads * layer.key_dim for layer in model.spec.layers)
    per_token = 2 * (4 * model.size("hidden_size") + (2 * width + queries) // settings.tp)
    return settings.max_num_tokens * per_token + settings.max_batch_size * model.spec.vocab_size * 6


def pages_of_ranks(pages: list[int]) -> int:
    """Pages that every rank uses when they measured room for different numbers: the fewest.

    Raises:
        ConfigError: no rank.
    """
    if not pages:
        raise ConfigError("no rank has said how many pages it has room for")
    return min(pages)


def make_plan(model: Model, device: Device, weights: Weights, settings: Settings) -> Plan:
    """Plan for a model on `settings.tp` devices like this one.

    Raises:
        OutOfMemoryBudgetError: the model does not fit, or leaves no room for one request of max_seq_len tokens; the
            message says how many bytes are missing.
        ConfigError: heads that do not divide among the ranks.
    """
    spec = model.spec.on_rank(settings.tp)
    kv_dtype = KV_DTYPES[settings.kv_dtype]
    activations = activation_bytes(model, settings) + RUNTIME_BYTES
    room = kv_room(device.memory, settings.fraction, device.used, weights.rank_bytes, activations)
    longest = settings.max_seq_len or spec.max_seq_len
    smallest = page_bytes(spec, settings.page_size, kv_dtype)
    if room < 2 * smallest:
        raise OutOfMemoryBudgetError(_does_not_fit(model, device, weights, settings, activations, 2 * smallest))
    notes = []
    groups = layer_groups(spec, settings.page_size, kv_dtype, longest)
    if settings.max_seq_len is None:
        lowered = longest_that_fits(room, groups, settings, longest)
        if lowered < longest:
            notes.append(f"max_seq_len is lowered from the model's {longest} to {lowered}: longer ones do not fit")
            longest = lowered
            groups = layer_groups(spec, settings.page_size, kv_dtype, longest)
    try:
        pools = divide(room, groups, settings, longest)
    except OutOfMemoryBudgetError as error:
        fits = longest_that_fits(room, groups, settings, longest)
        raise OutOfMemoryBudgetError(f"{error}; requests of up to {fits} tokens fit") from None
    if spec.layers[0].kv_heads * settings.tp > model.spec.layers[0].kv_heads:
        times = settings.tp * spec.layers[0].kv_heads // model.spec.layers[0].kv_heads
        notes.append(f"each KV head is kept by {times} ranks: more ranks than heads")
    return Plan(model, device, settings, weights, activations, room, pools, longest, tuple(notes))


def longest_that_fits(room: int, groups: tuple[Group, ...], settings: Settings, longest: int) -> int:
    """Tokens of the longest request, at most `longest`, that fits alone; whole pages."""
    size, step = settings.page_size, settings.max_num_tokens
    low, high = 0, pages_for_tokens(longest, size)
    while low < high:
        middle = (low + high + 1) // 2
        fixed = sum((group.demand(middle * size, size, step) + 1) * group.page_bytes for group in groups)
        low, high = (middle, high) if fixed <= room else (low, middle - 1)
    return min(low * size, longest)


def _does_not_fit(
    model: Model, device: Device, weights: Weights, settings: Settings, activations: int, least: int
) -> str:
    """The arithmetic of a model that is too large."""
    usable = int(device.memory * settings.fraction)
    missing = device.used + weights.rank_bytes + activations + least - usable
    others = f" + {format_bytes(device.used)} in use by others" if device.used else ""
    return (
        f"{model.name} does not fit on {device.name}: {format_bytes(weights.rank_bytes)} of weights + "
        f"{format_bytes(activations)} of activations and runtime{others} against {format_bytes(usable)} "
        f"({settings.fraction:.0%} of {format_bytes(device.memory)}): with a page and the null page "
        f"({least} bytes), {format_bytes(missing)} ({missing} bytes) are missing"
    )


def plan_for(
    model: str, gpu: str | None, settings: Settings, dtype: str = "auto", weight_bytes: str | None = None
) -> Plan:
    """A plan from names; `gpu` None is this machine's, of which the fullest decides.

    Raises:
        OutOfMemoryBudgetError: it does not fit; the message ends with what would.
        ModelNotFoundError, ConfigError: see `find_model`, `find_device` and `make_plan`.
    """
    found = find_model(model)
    devices = [find_device(gpu)] if gpu is not None else _detected(settings.tp)

    def on(device: Device, tp: int = settings.tp, weight_dtype: str = dtype) -> Plan:
        if weight_bytes is None:
            weights = count_weights(found, weight_dtype, tp)
        else:
            weights = given_weights(parse_bytes(weight_bytes), tp)
        return make_plan(found, device, weights, replace(settings, tp=tp))

    try:
        plans = [on(device) for device in devices]
    except OutOfMemoryBudgetError as error:
        raise OutOfMemoryBudgetError(f"{error}; {_what_would_fit(on, devices[-1], settings.tp)}") from None
    fewest = pages_of_ranks([plan.pages for plan in plans])
    return next(plan for plan in plans if plan.pages == fewest)


def _detected(tp: int) -> list[Device]:
    """The `tp` GPUs of this machine that have most room, the fullest of them last."""
    devices = detect()
    if len(devices) < tp:
        raise ConfigError(f"tp is {tp}; this machine has {len(devices)} GPUs")
    return sorted(devices, key=lambda device: device.used - device.memory)[:tp]


def _what_would_fit(on: Callable[..., Plan], device: Device, tp: int) -> str:
    """Options with which a plan on this device can be made, each by itself; found by making it."""
    larger = sorted((other for other in DEVICES.values() if other.memory > device.memory), key=lambda one: one.memory)
    choices: tuple[list[tuple[str, Callable[[], Plan]]], ...] = (
        [(f"--tp {ranks}", partial(on, device, ranks)) for ranks in (2, 4, 8, 16) if ranks > tp],
        [(f"--dtype {name}", partial(on, device, tp, name)) for name in ("fp8", "int4")],
        [(f"--gpu {other.name}", partial(on, other)) for other in larger],
    )
    fits = [next((name for name, attempt in ways if _works(attempt)), None) for ways in choices]
    named = [name for name in fits if name is not None]
    return f"{' or '.join(named)} would fit" if named else "no GPU known here would do, nor fewer bits"


def _works(attempt: Callable[[], Plan]) -> bool:
    try:
        attempt()
    except PagedKVError:
        return False
    return True
