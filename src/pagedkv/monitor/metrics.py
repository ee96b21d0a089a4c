"""Metrics in Prometheus's words: one table of what there is, read from a monitor at the moment of a scrape.

Own names begin with `pagedkv_` and end with their unit; vLLM's names are offered beside them, since dashboards exist.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedkv.cache import EventKind
from pagedkv.monitor.figures import Figures, by_tenant
from pagedkv.monitor.histogram import Histogram
from pagedkv.monitor.monitor import Monitor

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_UNITS = {"pages": "pages", "tokens": "token slots", "bytes": "bytes of keys and values"}


class EngineCollector(Collector):
    """Everything that a monitor knows, as metric families; counters only ever grow while the engine lives."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def collect(self) -> Iterator[Metric]:
        """The families, as they are now."""
        self.monitor.refresh()
        figures = self.monitor.figures()
        yield from _pool(figures)
        yield from self._pages()
        yield from self._prefixes()
        yield from self._requests(figures)
        yield from self._tenants()
        yield from self._vllm(figures)

    def _pages(self) -> Iterator[Metric]:
        feed = self.monitor.feed
        for name, kind, words in (
            ("allocations", EventKind.ALLOCATED, "Pages handed out."),
            ("evictions", EventKind.EVICTED, "Cached pages that made room."),
            ("copies", EventKind.COPIED, "Pages copied, before a write into a shared one or by partial reuse."),
            ("releases", EventKind.RELEASED, "Owners that gave a page back."),
        ):
            yield _counter(f"pagedkv_page_{name}", words, feed.count(kind))
        regret = self.monitor.misses.regret
        yield _histogram("pagedkv_eviction_regret_seconds", "From an eviction until the page was wanted again.", regret)

    def _prefixes(self) -> Iterator[Metric]:
        scheduler = self.monitor.engine.scheduler
        yield _counter("pagedkv_prefix_query_tokens", "Prompt tokens looked up, once each.", scheduler.prompt_tokens)
        yield _counter("pagedkv_prefix_hit_tokens", "Of these, found in the cache.", scheduler.cached_tokens)
        missed = CounterMetricFamily("pagedkv_prefix_miss_tokens", "Of these, not found, by reason.", labels=["reason"])
        for reason, tokens in self.monitor.misses.tokens.items():
            missed.add_metric([reason], tokens)
        yield missed

    def _requests(self, figures: Figures) -> Iterator[Metric]:
        stats, scheduler, timings = self.monitor.engine.stats(), self.monitor.engine.scheduler, self.monitor.timings
        yield _gauge("pagedkv_requests_running", "Requests that have pages.", figures.running)
        waiting = GaugeMetricFamily(
            "pagedkv_requests_waiting", "Requests in the queue, by what they wait for.", labels=["reason"]
        )
        for reason, count in figures.waits.items():
            waiting.add_metric([reason], count)
        yield waiting
        ended = CounterMetricFamily("pagedkv_requests_ended", "Answers that have ended, by reason.", labels=["reason"])
        for reason, count in timings.ended.items():
            ended.add_metric([reason.value], count)
        yield ended
        for name, words, value in (
            ("steps", "Steps that computed something.", stats.steps),
            ("computed_tokens", "Tokens that went through the model.", stats.computed_tokens),
            ("generated_tokens", "Tokens sampled.", stats.generated_tokens),
            ("preemptions", "How often a request lost its pages.", stats.preemptions),
            ("preempted_tokens", "Computed tokens lost to preemptions.", scheduler.preempted_tokens),
            ("recovered_tokens", "Of these, cached when the request came back.", scheduler.recovered_tokens),
        ):
            yield _counter(f"pagedkv_{name}", words, value)
        for name, words, histogram in (
            ("queue_time", "From submission to the first pages.", timings.queue),
            ("time_to_first_token", "From submission to the first token.", timings.first_token),
            ("inter_token_latency", "Between two tokens of an answer.", timings.inter_token),
            ("e2e_request_latency", "From submission to the end of the first answer.", timings.in_all),
        ):
            yield _histogram(f"pagedkv_{name}_seconds", words, histogram)

    def _tenants(self) -> Iterator[Metric]:
        pages = GaugeMetricFamily("pagedkv_tenant_pages", "Pages by tenant and state.", labels=["tenant", "state"])
        requests = GaugeMetricFamily("pagedkv_tenant_requests", "Requests by tenant.", labels=["tenant", "state"])
        for tenant, usage in by_tenant(self.monitor.engine).items():
            pages.add_metric([tenant, "used"], usage.used)
            pages.add_metric([tenant, "cached"], usage.cached)
            requests.add_metric([tenant, "running"], usage.running)
            requests.add_metric([tenant, "waiting"], usage.waiting)
        yield from (pages, requests)

    def _vllm(self, figures: Figures) -> Iterator[Metric]:
        engine, timings = self.monitor.engine, self.monitor.timings
        model = engine.model.name
        gauges = {
            "num_requests_running": figures.running,
            "num_requests_waiting": figures.waiting,
            "kv_cache_usage_perc": figures.used / figures.total,
        }
        for name, value in gauges.items():
            family = GaugeMetricFamily(f"vllm:{name}", "As vLLM calls it.", labels=["model_name"])
            family.add_metric([model], value)
            yield family
        counters = {
            "prefix_cache_queries": engine.scheduler.prompt_tokens,
            "prefix_cache_hits": engine.scheduler.cached_tokens,
            "num_preemptions": engine.scheduler.preemptions,
        }
        for name, count in counters.items():
            counted = CounterMetricFamily(f"vllm:{name}", "As vLLM calls it.", labels=["model_name"])
            counted.add_metric([model], count)
            yield counted
        histograms = {"time_to_first_token": timings.first_token, "inter_token_latency": timings.inter_token}
        for name, histogram in histograms.items():
            times = HistogramMetricFamily(f"vllm:{name}_seconds", "As vLLM calls it.", labels=["model_name"])
            times.add_metric([model], buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield times


def metrics_text(monitor: Monitor) -> str:
    """All metrics of a monitor in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(monitor))
    return generate_latest(registry).decode()


def _pool(figures: Figures) -> Iterator[Metric]:
    """Where the pages are, each figure in pages, tokens and bytes."""
    sizes = {"pages": 1, "tokens": figures.page_size, "bytes": figures.page_bytes}
    states = {"used": figures.used, "cached": figures.cached, "free": figures.free}
    others = {
        "pinned": (figures.pinned, "kept from eviction, of the used ones"),
        "in_flight": (figures.in_flight, "used but not computed yet"),
        "promised": (figures.promised, "set aside for requests with a reservation"),
        "shared_savings": (figures.saved, "that sharing saves"),
    }
    for unit, words in _UNITS.items():
        pool = GaugeMetricFamily(
            f"pagedkv_pool_{unit}", f"The pool in {words}; the states add up to all of it.", labels=["state"]
        )
        for state, count in states.items():
            pool.add_metric([state], count * sizes[unit])
        yield pool
        for name, (count, what) in others.items():
            yield _gauge(f"pagedkv_{name}_{unit}", f"In {words}: {what}.", count * sizes[unit])
    ratio = GaugeMetricFamily(
        "pagedkv_pool_utilization_ratio", "Share of the pool's pages; cached ones can be had.", labels=["state"]
    )
    ratio.add_metric(["used"], figures.used / figures.total)
    ratio.add_metric(["cached"], figures.cached / figures.total)
    yield ratio
    slots = figures.used * figures.page_size
    yield _gauge("pagedkv_held_tokens", "Tokens in used pages, shared ones counted once.", figures.tokens)
    yield _gauge("pagedkv_fragmentation_tokens", "Slots of used pages that hold no token.", figures.empty_slots)
    share = figures.empty_slots / slots if slots else 0.0
    yield _gauge("pagedkv_fragmentation_ratio", "Share of the used pages' slots that hold no token.", share)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, words, buckets=histogram.cumulative(), sum_value=histogram.sum)
