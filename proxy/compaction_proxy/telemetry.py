"""Spans and metrics: what is recorded of a request, and under which names. Counts and words of ours, never message text.

The standard ``OTEL_*`` variables decide what is exported and where; with none of them set nothing is, and spans cost next
to nothing. Spans are ended by hand, exactly once, and never attached to a task: a stream ends long after its handler began.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from opentelemetry import trace
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from compaction_policies.outcomes import FAILED, NOT_DUE
from compaction_policies.policy import Policy
from compaction_proxy import __version__
from compaction_proxy.config.settings import ProviderSettings, TelemetrySettings
from compaction_proxy.exporters import batched, metric_readers, span_exporters, switched_off
from compaction_proxy.prometheus import exposition
from compaction_proxy.relay import Usage
from compaction_proxy.shaping import Shaped

GEN_AI = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "model": "gen_ai.request.model",
    "stream": "gen_ai.request.stream",
    "conversation": "gen_ai.conversation.id",
    "compacted": "gen_ai.conversation.compacted",
    "input": "gen_ai.usage.input_tokens",
    "output": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "token_type": "gen_ai.token.type",
}
"""Today's names of the GenAI semantic conventions (development status, 2026-11), in one place."""

INSTRUMENTS = {
    "context.compaction.triggered.total": ("{compaction}", "Compactions, by source and strategy."),
    "context.compaction.skipped.total": ("{request}", "Requests for which no compaction was due, by reason."),
    "context.compaction.failed.total": ("{request}", "Requests whose compaction failed, by reason."),
    "context.compaction.reclaimed.tokens": ("{token}", "Tokens that compactions took off the forwarded prompt."),
    "context.compaction.sticky.hit.total": ("{request}", "Requests to which a stored compaction was re-applied."),
    "context.compaction.duration": (
        "s",
        "Time from reading a conversation to its new form, for requests that compacted.",
    ),
    "compaction_proxy.overhead": ("s", "Time a request spent in the proxy before it was forwarded."),
    "gen_ai.client.token.usage": ("{token}", "Tokens that providers billed, by type."),
    "gen_ai.client.operation.duration": ("s", "Duration of provider calls."),
}

CONTENT_CHARS = 8_000
"""Of a summary, in a span, where ``telemetry.captureContent`` asks for it."""

_propagator = TraceContextTextMapPropagator()


class Telemetry:
    """One a process. ``environment`` holds the ``OTEL_*`` variables."""

    def __init__(
        self,
        settings: TelemetrySettings,
        environment: Mapping[str, str] | None = None,
        *,
        exporters: Iterable[SpanExporter] = (),
    ) -> None:
        environment = environment or {}
        resource = Resource.create(
            {
                "service.name": environment.get("OTEL_SERVICE_NAME", settings.service_name),
                "service.version": __version__,
            }
        )
        self.capture_content = settings.capture_content
        sinks = [] if switched_off(environment) else [*span_exporters(environment), *exporters]
        self._tracers: TracerProvider | None = None
        if sinks:
            self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            for sink in sinks:
                self._tracers.add_span_processor(batched(sink))
        self._tracer = (self._tracers or trace.NoOpTracerProvider()).get_tracer("compaction_proxy", __version__)
        self._local = InMemoryMetricReader()
        readers: list[MetricReader] = [self._local]
        if not switched_off(environment):
            readers += metric_readers(environment)
        self._meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        meter = self._meters.get_meter("compaction_proxy", __version__)
        self._counters = {
            name: meter.create_counter(name, unit, text) for name, (unit, text) in INSTRUMENTS.items() if _counts(name)
        }
        self._histograms: dict[str, Histogram] = {
            name: meter.create_histogram(name, unit, text)
            for name, (unit, text) in INSTRUMENTS.items()
            if not _counts(name)
        }

    def request_span(self, headers: Iterable[tuple[bytes, bytes]], method: str, path: str) -> RequestSpan:
        """The SERVER span of a request, a child of the caller's trace."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        parent = _propagator.extract(carrier)
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": "http"}
        span = self._tracer.start_span(f"{method} {path}", context=parent, kind=SpanKind.SERVER, attributes=attributes)
        if not span.get_span_context().is_valid:
            span = trace.get_current_span(parent)  # no tracing of ours: the caller's trace passes through
        return RequestSpan(self, span)

    def client_span(
        self, parent: Span, provider: ProviderSettings, model: str, attributes: dict[str, Any]
    ) -> ClientSpan:
        """A CLIENT span of a provider call."""
        known = {
            GEN_AI["operation"]: "chat",
            GEN_AI["provider"]: provider.name,
            "server.address": _host(provider.base_url),
            **({GEN_AI["model"]: model} if model else {}),
            **attributes,
        }
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(f"chat {model}".strip(), context=context, kind=SpanKind.CLIENT, attributes=known)
        if not span.get_span_context().is_valid:
            span = parent
        return ClientSpan(self, span, provider.name, model, owned=span is not parent)

    def compaction_span(self, parent: Span, shaped: Shaped, policy: Policy) -> None:
        """The INTERNAL span of a shaped conversation, recorded once it is known."""
        end = time.time_ns()
        span = self._tracer.start_span(
            "compaction",
            context=trace.set_span_in_context(parent),
            kind=SpanKind.INTERNAL,
            attributes=compaction_attributes(shaped, policy),
            start_time=end - int(shaped.seconds * 1e9),
        )
        if self.capture_content and shaped.record is not None and shaped.record.body:
            span.set_attribute("compaction.content", shaped.record.body[:CONTENT_CHARS])
        if shaped.reason in FAILED:
            span.set_status(Status(StatusCode.ERROR, shaped.reason))
        span.end(end)

    def count(self, shaped: Shaped, overhead_seconds: float) -> None:
        """Book what happened to a conversation."""
        if shaped.event and shaped.record is not None:
            record = shaped.record
            self._counters["context.compaction.triggered.total"].add(
                1, {"source": shaped.source or record.source, "strategy": record.strategy}
            )
            self._counters["context.compaction.reclaimed.tokens"].add(
                max(0, record.tokens_before - record.tokens_after)
            )
            self._histograms["context.compaction.duration"].record(shaped.seconds, {"source": record.source})
        elif shaped.reason in FAILED:
            self._counters["context.compaction.failed.total"].add(1, {"reason": shaped.reason})
        elif shaped.reason in NOT_DUE:
            self._counters["context.compaction.skipped.total"].add(1, {"reason": shaped.reason})
        if shaped.outcome == "sticky":
            self._counters["context.compaction.sticky.hit.total"].add(1)
        self._histograms["compaction_proxy.overhead"].record(overhead_seconds)

    def book_call(self, provider: str, model: str, seconds: float, usage: Usage | None, error: str | None) -> None:
        """Book a provider call."""
        known = {GEN_AI["operation"]: "chat", GEN_AI["provider"]: provider, GEN_AI["model"]: model}
        self._histograms["gen_ai.client.operation.duration"].record(
            seconds, {**known, **({"error.type": error} if error else {})}
        )
        if usage is not None:
            tokens = self._histograms["gen_ai.client.token.usage"]
            tokens.record(usage.prompt, {**known, GEN_AI["token_type"]: "input"})
            tokens.record(usage.completion, {**known, GEN_AI["token_type"]: "output"})

    def render_prometheus(self) -> bytes:
        """The same instruments as Prometheus text."""
        return exposition(self._local.get_metrics_data())

    def shutdown(self, seconds: float = 3.0) -> None:
        """Export what is left, within a bound: a dead collector never holds the process."""
        if self._tracers is not None:
            self._tracers.force_flush(int(seconds * 1000))
            self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=seconds * 1000)


class RequestSpan:
    """A request's SERVER span; a context manager that ends it once, whatever happens."""

    def __init__(self, telemetry: Telemetry, span: Span) -> None:
        self._telemetry = telemetry
        self._span = span
        self._ended = False

    @property
    def trace_id(self) -> str | None:
        context = self._span.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    def client(
        self,
        provider: ProviderSettings,
        model: str,
        *,
        stream: bool,
        compacted: bool = False,
        session: str | None = None,
    ) -> ClientSpan:
        """The span of a call to a provider on behalf of this request."""
        attributes: dict[str, Any] = {GEN_AI["stream"]: stream}
        if compacted:
            attributes[GEN_AI["compacted"]] = True
        if session is not None:
            attributes[GEN_AI["conversation"]] = session
        return self._telemetry.client_span(self._span, provider, model, attributes)

    def compaction(self, shaped: Shaped, policy: Policy) -> None:
        """Outcome and reason on the request's span; an own span where records were looked up."""
        self._span.set_attribute("compaction.outcome", shaped.outcome)
        self._span.set_attribute("compaction.reason", shaped.reason)
        if shaped.looked_up and self._span.is_recording():
            self._telemetry.compaction_span(self._span, shaped, policy)

    def status(self, status: int) -> None:
        if status:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self._span.set_status(Status(StatusCode.ERROR))

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR))
        if not self._ended and not isinstance(self._span, NonRecordingSpan):
            self._ended = True
            self._span.end()


class ClientSpan:
    """A provider call's CLIENT span. ``end`` may be called more than once; the first counts."""

    def __init__(self, telemetry: Telemetry, span: Span, provider: str, model: str, *, owned: bool) -> None:
        self._telemetry = telemetry
        self._span = span
        self._provider = provider
        self._model = model
        self._owned = owned
        self._started = time.monotonic()
        self._error: str | None = None
        self._ended = False

    def headers_out(self) -> tuple[tuple[bytes, bytes], ...]:
        """``traceparent`` and ``tracestate`` for the provider."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(self._span))
        return tuple((name.encode(), value.encode()) for name, value in carrier.items())

    def failed(self, error: Exception) -> None:
        self._error = type(error).__name__

    def end(self, *, status: int = 0, usage: Usage | None = None, ended: str = "complete") -> None:
        if self._ended:
            return
        self._ended = True
        error = self._error or (str(status) if status >= 400 else None) or (ended if ended != "complete" else None)
        self._telemetry.book_call(self._provider, self._model, time.monotonic() - self._started, usage, error)
        if not self._owned:
            return
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if usage is not None:
            self._span.set_attribute(GEN_AI["input"], usage.prompt)
            self._span.set_attribute(GEN_AI["output"], usage.completion)
            self._span.set_attribute(GEN_AI["cached"], usage.cached)
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def compaction_attributes(shaped: Shaped, policy: Policy) -> dict[str, Any]:
    """Everything that the ``compaction`` span says; counts, ids and words from closed lists."""
    record = shaped.record
    known: dict[str, Any] = {
        "compaction.policy": policy.name,
        "compaction.revision": policy.revision,
        "compaction.outcome": shaped.outcome,
        "compaction.reason": shaped.reason,
        "compaction.source": shaped.source,
        "compaction.tokens_before": shaped.tokens_before,
        "compaction.tokens_after": shaped.tokens_after,
        "compaction.tokens_limit": shaped.limit,
        "compaction.messages_before": shaped.messages_before,
        "compaction.messages_after": shaped.messages_after,
    }
    if record is not None:
        known |= {
            "compaction.strategy": record.strategy,
            "compaction.covers": record.covers,
            "compaction.summarized_to": record.summarized_to,
            "compaction.generation": record.generation,
            "compaction.id": record.id,
            "compaction.trust": record.trust,
            "compaction.degraded": record.degraded,
        }
    return {name: value for name, value in known.items() if value is not None}


def _counts(name: str) -> bool:
    return name.endswith((".total", ".tokens"))


def _host(base_url: str) -> str:
    return base_url.partition("://")[2].partition("/")[0].rpartition("@")[2]
