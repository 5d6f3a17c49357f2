"""Spans and metrics. :mod:`words` says what may be recorded and under which names, :mod:`recording` records it."""

from __future__ import annotations

from compaction_proxy.telemetry.recording import ClientSpan, RequestSpan, Telemetry
from compaction_proxy.telemetry.words import INSTRUMENTS, compaction_attributes

__all__ = ["INSTRUMENTS", "ClientSpan", "RequestSpan", "Telemetry", "compaction_attributes"]
