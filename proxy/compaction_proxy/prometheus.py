"""Metrics of the SDK as Prometheus text (exposition format 0.0.4): counters, histograms, dots as underscores. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import Histogram, MetricsData

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_:]")
_UNITS = {"s": "seconds"}


def exposition(data: MetricsData | None) -> bytes:
    """All metrics, sorted by name; empty text where nothing was measured yet."""
    blocks: dict[str, list[str]] = {}
    for resource in () if data is None else data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                histogram = isinstance(metric.data, Histogram)
                name = metric_name(metric.name, metric.unit or "", counter=not histogram)
                lines = [
                    f"# HELP {name} {_help(metric.description or '')}",
                    f"# TYPE {name} {'histogram' if histogram else 'counter'}",
                ]
                for point in metric.data.data_points:
                    lines += _histogram(name, point) if histogram else _number(name, point)
                blocks[name] = lines
    return "".join(f"{line}\n" for name in sorted(blocks) for line in blocks[name]).encode("utf-8", "replace")


def metric_name(name: str, unit: str, *, counter: bool) -> str:
    """``context.compaction.duration`` in s -> ``context_compaction_duration_seconds``; counters end in ``_total``."""
    text = _NOT_A_NAME.sub("_", name)
    suffix = _UNITS.get(unit)
    if suffix and not text.endswith(suffix):
        text = f"{text}_{suffix}"
    return f"{text}_total" if counter and not text.endswith("_total") else text


def labels(attributes: Mapping[str, Any] | None, *more: tuple[str, str]) -> str:
    pairs = [*sorted((_NOT_A_NAME.sub("_", key), str(value)) for key, value in (attributes or {}).items()), *more]
    shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in pairs)
    return f"{{{shown}}}" if shown else ""


def number(value: float) -> str:
    """All its digits: a counter beyond a million still moves by one."""
    return str(int(value)) if value == int(value) else repr(float(value))


def _number(name: str, point: Any) -> Iterator[str]:
    yield f"{name}{labels(point.attributes)} {number(point.value)}"


def _histogram(name: str, point: Any) -> Iterator[str]:
    total = 0
    bounds: Sequence[float] = (*point.explicit_bounds, float("inf"))
    for bound, count in zip(bounds, point.bucket_counts, strict=True):
        total += count
        edge = "+Inf" if bound == float("inf") else number(bound)
        yield f"{name}_bucket{labels(point.attributes, ('le', edge))} {total}"
    yield f"{name}_sum{labels(point.attributes)} {number(point.sum)}"
    yield f"{name}_count{labels(point.attributes)} {point.count}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
