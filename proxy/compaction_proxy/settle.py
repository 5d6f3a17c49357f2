"""After the answer, or the disconnect: metrics, the log line, the ends of the spans. Runs exactly once a request."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from compaction_policies.outcomes import FAILED
from compaction_proxy.http import Request
from compaction_proxy.logs import log_event
from compaction_proxy.relay import Relayed
from compaction_proxy.routing import Destination
from compaction_proxy.services import Services
from compaction_proxy.shaping import Shaped
from compaction_proxy.telemetry import ClientSpan, RequestSpan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settled:
    """Everything that is known of a request when it is over. ``overhead`` is seconds spent before forwarding."""

    request: Request
    model: str
    where: Destination
    shaped: Shaped
    relayed: Relayed
    overhead: float


def settle(done: Settled, services: Services, span: RequestSpan, call: ClientSpan) -> None:
    """Book a finished request. Never raises: its client has its answer, and the connection is to be kept."""
    try:
        call.end(status=done.relayed.status, usage=done.relayed.usage, ended=done.relayed.ended)
        span.status(done.relayed.status)
        services.telemetry.count(done.shaped, done.overhead)
        _log(done, span)
    except Exception:  # the documented edge: a fault of telemetry never fails a user's request
        log.exception("a finished request could not be booked")


def _log(done: Settled, span: RequestSpan) -> None:
    """One line a compaction and a failure, never one a request."""
    shaped = done.shaped
    if not shaped.event and shaped.reason not in FAILED:
        return
    log_event(
        "compaction" if shaped.event else "compaction failed",
        trace_id=span.trace_id,
        policy=done.where.policy.name,
        outcome=shaped.outcome,
        reason=shaped.reason,
        detail=shaped.detail or None,
        tokens_before=shaped.tokens_before if shaped.record is None else shaped.record.tokens_before,
        tokens_after=shaped.tokens_after,
        ms=round(shaped.seconds * 1000),
        compaction_id=None if shaped.record is None else shaped.record.id,
    )
