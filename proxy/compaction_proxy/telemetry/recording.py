"""Records spans and metrics in the SDK. Spans are ended by hand, exactly once, and never attached to a task.

The standard ``OTEL_*`` variables decide what is exported and where; with none of them set nothing is, and spans cost next
to nothing. A stream ends long after its handler began, and whoever reads it may be another task.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Literal

from opentelemetry import trace
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
from compaction_proxy.errors import ProxyError
from compaction_proxy.exporters import batched, metric_readers, span_exporters, switched_off
from compaction_proxy.prometheus import exposition
from compaction_proxy.relay import Usage
from compaction_proxy.shaping import Shaped
from compaction_proxy.telemetry.words import (
    CONTENT_CHARS,
    GEN_AI,
    INSTRUMENTS,
    attributes,
    compaction_attributes,
    plain,
    provider_attributes,
    request_attributes,
    request_name,
)

log = logging.getLogger(__name__)

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
                "service.name": environment.get("OTEL_SERVICE_NAME") or settings.service_name,
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
        self._tracer = self._tracers.get_tracer("compaction_proxy", __version__) if self._tracers is not None else None
        self._local = InMemoryMetricReader()
        readers: list[MetricReader] = [self._local]
        if not switched_off(environment):
            readers += metric_readers(environment)
        self._meters = MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
        meter = self._meters.get_meter("compaction_proxy", __version__)
        self._counters = {
            name: meter.create_counter(name, known.unit, known.description)
            for name, known in INSTRUMENTS.items()
            if not known.bounds
        }
        self._histograms = {
            name: meter.create_histogram(
                name, known.unit, known.description, explicit_bucket_boundaries_advisory=known.bounds
            )
            for name, known in INSTRUMENTS.items()
            if known.bounds
        }

    def request_span(self, headers: Iterable[tuple[bytes, bytes]], method: str, path: str) -> RequestSpan:
        """The SERVER span of a request, a child of the caller's trace."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        parent = _propagator.extract(carrier)
        if self._tracer is None:
            return RequestSpan(self, trace.get_current_span(parent))  # the caller's trace passes through
        said = request_attributes(method, path)
        name = request_name(method, path)
        return RequestSpan(self, self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=said))

    def client_span(
        self, parent: Span, provider: ProviderSettings, model: str, known: Mapping[str, object]
    ) -> ClientSpan:
        """A CLIENT span of a provider call."""
        if self._tracer is None:
            return ClientSpan(self, parent, provider.name, model, owned=False)
        said = provider_attributes(provider, model) | attributes(known if model else {})
        name = f"chat {plain(model)}" if model else "forward"
        context = trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context=context, kind=SpanKind.CLIENT, attributes=said)
        return ClientSpan(self, span, provider.name, model, owned=True)

    def compaction_span(self, parent: Span, shaped: Shaped, policy: Policy) -> None:
        """The INTERNAL span of a shaped conversation, recorded once it is known."""
        if self._tracer is None:
            return
        end = time.time_ns()
        span = self._tracer.start_span(
            "compaction",
            context=trace.set_span_in_context(parent),
            kind=SpanKind.INTERNAL,
            attributes=compaction_attributes(shaped, policy),
            start_time=end - int(shaped.seconds * 1e9),
        )
        if self.capture_content and shaped.record is not None and shaped.record.body:
            span.set_attribute("compaction.content", plain(shaped.record.body, CONTENT_CHARS))
        if shaped.reason in FAILED:
            span.set_status(Status(StatusCode.ERROR, shaped.reason))
        span.end(end)

    def count(self, shaped: Shaped, overhead_seconds: float) -> None:
        """Book what happened to a conversation."""
        if shaped.event and shaped.record is not None:
            record = shaped.record
            source = shaped.source or record.source
            said = attributes({"source": source, "strategy": record.strategy})
            self._counters["context.compaction.triggered.total"].add(1, said)
            reclaimed = max(0, record.tokens_before - record.tokens_after)
            self._counters["context.compaction.reclaimed.tokens"].add(reclaimed)
            self._histograms["context.compaction.duration"].record(shaped.seconds, attributes({"source": source}))
        elif shaped.reason in FAILED:
            self._counters["context.compaction.failed.total"].add(1, attributes({"reason": shaped.reason}))
        elif shaped.reason in NOT_DUE:
            self._counters["context.compaction.skipped.total"].add(1, attributes({"reason": shaped.reason}))
        if shaped.outcome == "sticky":
            self._counters["context.compaction.sticky.hit.total"].add(1)
        self._histograms["compaction_proxy.overhead"].record(overhead_seconds)

    def book_call(
        self,
        provider: str,
        model: str,
        seconds: float,
        usage: Usage | None,
        error: str | None,
        purpose: str | None = None,
    ) -> None:
        """Book a model call. A provider that names no usage adds none; what summaries cost stands apart by ``purpose``."""
        known = {
            GEN_AI["operation"]: "chat",
            GEN_AI["provider"]: provider,
            GEN_AI["model"]: model,
            "compaction.purpose": purpose,
        }
        said = attributes({**known, "error.type": error})
        self._histograms["gen_ai.client.operation.duration"].record(seconds, said)
        if usage is not None:
            tokens = self._histograms["gen_ai.client.token.usage"]
            tokens.record(usage.prompt, attributes({**known, GEN_AI["token_type"]: "input"}))
            tokens.record(usage.completion, attributes({**known, GEN_AI["token_type"]: "output"}))

    def render_prometheus(self) -> bytes:
        """The same instruments as Prometheus text."""
        return exposition(self._local.get_metrics_data())

    def shutdown(self, seconds: float = 3.0) -> None:
        """Export what is left, within a bound: a collector that is away or hangs never holds the process.

        The SDK's own bounds are not kept while an export is under way (one may take its whole time-out of 10 s), so it
        ends in threads that are left behind when time is up.
        """
        parts: list[Callable[[], None]] = [lambda: self._meters.shutdown(timeout_millis=seconds * 1000)]
        if self._tracers is not None:
            parts.append(self._tracers.shutdown)
        endings = [threading.Thread(target=_end, args=(part,), daemon=True) for part in parts]
        deadline = time.monotonic() + seconds
        for ending in endings:
            ending.start()
        for ending in endings:
            ending.join(max(0.0, deadline - time.monotonic()))
        if any(ending.is_alive() for ending in endings):
            log.warning("the collector did not take the last spans and metrics within %g s: dropped", seconds)


def _end(part: Callable[[], None]) -> None:
    try:
        part()
    except Exception:  # the documented edge: the SDK raises bare exceptions for exporters that failed
        log.exception("telemetry did not shut down cleanly")


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
        purpose: Literal["summary"] | None = None,
    ) -> ClientSpan:
        """The span of a call to a provider on behalf of this request. ``model`` is empty where no model is called."""
        known = {
            GEN_AI["stream"]: stream,
            GEN_AI["compacted"]: compacted or None,
            GEN_AI["conversation"]: session,
            "compaction.purpose": purpose,
        }
        call = self._telemetry.client_span(self._span, provider, model, known)
        call.purpose = purpose
        return call

    def compaction(self, shaped: Shaped, policy: Policy) -> None:
        """Outcome and reason on the request's span; an own span where records were looked up."""
        self._span.set_attribute("compaction.outcome", shaped.outcome)
        self._span.set_attribute("compaction.reason", shaped.reason)
        if shaped.reason == "shadow":
            known = {
                "compaction.would": shaped.detail or None,
                "compaction.tokens_before": shaped.tokens_before,
                "compaction.tokens_limit": shaped.limit,
            }
            self._span.set_attributes(attributes(known))
        if shaped.looked_up:
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
        if isinstance(error, ProxyError):
            self.status(error.status)
        elif isinstance(error, Exception):  # a client that left is nobody's error
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
        self.purpose: str | None = None
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
        """The call is over. ``ended`` is how its answer ended; ``status`` is 0 where none came."""
        if self._ended:
            return
        self._ended = True
        error = self._error or (str(status) if status >= 400 else None) or (ended if ended != "complete" else None)
        if self._model:
            took = time.monotonic() - self._started
            self._telemetry.book_call(self._provider, self._model, took, usage, error, self.purpose)
        if not self._owned:
            return
        known: dict[str, object] = {"http.response.status_code": status or None, "error.type": error}
        if usage is not None:
            known |= {GEN_AI["input"]: usage.prompt, GEN_AI["output"]: usage.completion, GEN_AI["cached"]: usage.cached}
        self._span.set_attributes(attributes(known))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
