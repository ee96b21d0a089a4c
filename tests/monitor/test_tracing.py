"""Spans of requests, as a collector would get them."""

from __future__ import annotations

import pytest
from monitor_support import finish, greedy, watched

from pagedkv.monitor.tracing import Tracing, tracing


def test_a_request_is_a_span_with_its_parts() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    engine, monitor, clock = watched(max_num_tokens=16)
    monitor.listeners.append(Tracing(provider.get_tracer("test"), "fake", (clock.now, 10**18)))
    engine.add_request("x" * 20, greedy(3), request_id="one")
    finish(engine, clock, 1.0)
    spans = {span.name: span for span in memory.get_finished_spans()}
    seconds = {name: ((s.start_time - 10**18) / 1e9, (s.end_time - 10**18) / 1e9) for name, s in spans.items()}
    assert seconds == {"queue": (0.0, 1.0), "prefill": (1.0, 2.0), "decode": (2.0, 4.0), "llm_request": (0.0, 4.0)}
    whole = spans["llm_request"]
    assert {spans[name].parent.span_id for name in ("queue", "prefill", "decode")} == {whole.context.span_id}
    assert whole.attributes["gen_ai.usage.input_tokens"] == 20
    assert whole.attributes["gen_ai.request.id"] == "one"


def test_no_endpoint_no_spans() -> None:
    assert tracing("fake", 0.0, {}) is None
