"""OpenTelemetry spans of requests: queue, prefill and decode under one span each, in the gen_ai conventions.

Needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, and an endpoint in
OTEL_EXPORTER_OTLP_ENDPOINT; without them there are no spans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedkv.engine.request import Request
from pagedkv.monitor.monitor import Listener
from pagedkv.monitor.timings import Track

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Tracing(Listener):
    """Makes a span of every answer that has ended. A listener of the monitor.

    Args:
        tracer: an OpenTelemetry tracer.
        model: what the model is called.
        started: one moment by the monitor's clock, in seconds, and by the wall's, in nanoseconds since 1970.
    """

    def __init__(self, tracer: Tracer, model: str, started: tuple[float, int]) -> None:
        self._tracer = tracer
        self._model = model
        self._started = started

    def happened(self, request: Request, what: str, now: float, **details: Any) -> None:
        """See `Listener`."""
        if what == "ended":
            self._trace(request, details["track"], now)

    def _trace(self, request: Request, track: Track, now: float) -> None:
        from opentelemetry.trace import set_span_in_context

        reason = "" if request.finish_reason is None else request.finish_reason.value
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.id,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.input_tokens": int(request.prompt.size),
            "gen_ai.usage.output_tokens": len(request.sampled),
            "gen_ai.response.finish_reasons": [reason],
            "pagedkv.cached_tokens": request.cached_tokens or 0,
            "pagedkv.preemptions": request.preemptions,
            "pagedkv.miss": track.reason,
        }
        whole = self._tracer.start_span("llm_request", start_time=self._wall(track.queued), attributes=attributes)
        inside = set_span_in_context(whole)
        for name, begin, end in (
            ("queue", track.queued, track.admitted or now),
            ("prefill", track.admitted, track.first or now),
            ("decode", track.first, now),
        ):
            if begin is not None:
                self._tracer.start_span(name, context=inside, start_time=self._wall(begin)).end(self._wall(end))
        whole.end(self._wall(now))

    def _wall(self, seconds: float) -> int:
        """Nanoseconds since 1970."""
        return self._started[1] + int((seconds - self._started[0]) * 1e9)


def tracing(model: str, now: float, environ: Mapping[str, str]) -> Tracing | None:
    """Spans for the collector that the environment names; None where there is none, or no package to send them with."""
    if not environ.get(ENDPOINT):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": environ.get("OTEL_SERVICE_NAME", "pagedkv")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("pagedkv"), model, (now, time.time_ns()))
