"""Exporters by the standard ``OTEL_*`` variables. Each is imported only when it is configured.

Read here: OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER and OTEL_METRICS_EXPORTER (``otlp``, ``console``, ``none``),
OTEL_EXPORTER_OTLP_[TRACES_|METRICS_]ENDPOINT and _PROTOCOL (``http/protobuf``, ``grpc``). Headers, time-outs, certificates
and batch sizes are read by the SDK itself.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, cast

from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

log = logging.getLogger(__name__)

_CLASSES = {
    ("traces", "grpc"): "opentelemetry.exporter.otlp.proto.grpc.trace_exporter:OTLPSpanExporter",
    ("traces", "http/protobuf"): "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
    ("traces", "console"): "opentelemetry.sdk.trace.export:ConsoleSpanExporter",
    ("metrics", "grpc"): "opentelemetry.exporter.otlp.proto.grpc.metric_exporter:OTLPMetricExporter",
    ("metrics", "http/protobuf"): "opentelemetry.exporter.otlp.proto.http.metric_exporter:OTLPMetricExporter",
    ("metrics", "console"): "opentelemetry.sdk.metrics.export:ConsoleMetricExporter",
}


def switched_off(environment: Mapping[str, str]) -> bool:
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def batched(exporter: SpanExporter) -> BatchSpanProcessor:
    """Exports in the background: a collector that is away costs no request anything."""
    return BatchSpanProcessor(exporter)


def span_exporters(environment: Mapping[str, str]) -> list[SpanExporter]:
    return [cast(SpanExporter, exporter) for exporter in _exporters("traces", environment)]


def metric_readers(environment: Mapping[str, str]) -> list[MetricReader]:
    return [
        PeriodicExportingMetricReader(cast(MetricExporter, exporter)) for exporter in _exporters("metrics", environment)
    ]


def _exporters(signal: str, environment: Mapping[str, str]) -> list[Any]:
    """The exporters of a signal; none unless a variable asks for one."""
    kind = signal.upper()
    named = environment.get(f"OTEL_{kind}_EXPORTER", "").strip()
    endpoint = environment.get(f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not named and not endpoint:
        return []
    made = []
    for name in [part.strip() for part in (named or "otlp").split(",")]:
        if name in ("", "none"):
            continue
        key = name
        if name == "otlp":
            protocol = environment.get(f"OTEL_EXPORTER_OTLP_{kind}_PROTOCOL") or environment.get(
                "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
            )
            key = protocol.strip()
        dotted = _CLASSES.get((signal, key))
        if dotted is None:
            log.error("%s are not exported to '%s': known are otlp (grpc or http/protobuf), console, none", signal, key)
            continue
        module, _, attribute = dotted.partition(":")
        try:
            made.append(getattr(importlib.import_module(module), attribute)())
        except (ValueError, OSError) as error:  # a variable that the exporter itself reads: a time-out, a certificate
            log.error("%s are not exported: an OTEL_EXPORTER_* variable is wrong (%s)", signal, type(error).__name__)
    return made
