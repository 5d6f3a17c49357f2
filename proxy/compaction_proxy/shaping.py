"""What a conversation becomes: transcript -> active record -> sticky view -> measure -> decide -> compact -> check.

Everything here is about the message array; the HTTP around it lives in :mod:`compaction_proxy.pipeline`. A fault never
fails the request: the form last sent goes out, else the client's own bytes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from compaction_policies import wire
from compaction_policies.decide import Decision, decide, decode_attempt
from compaction_policies.dialects import openai_chat
from compaction_policies.draft import Situation
from compaction_policies.measure import Count, Limits, Units, limits
from compaction_policies.outcomes import Outcome, Reason, Source
from compaction_policies.plan import NoPlan, plan
from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent
from compaction_policies.record import Record
from compaction_policies.transcript import Item, Transcript
from compaction_policies.validate import order_problem
from compaction_policies.view import Piece, applies, apply, both_tokens, view_tokens
from compaction_proxy.compaction import Compactor, Result, Summarizer, Work
from compaction_proxy.jobs import Jobs
from compaction_proxy.store.keys import Scope
from compaction_proxy.store.records import Records
from compaction_proxy.tokens import OFF_LOOP_BYTES, Counters

log = logging.getLogger(__name__)

LEAST_BODY_BYTES = 1_024
"""Smaller bodies get no record and no look-up."""
_SPLIT_IN_LOOP_BYTES = 512 * 1024
_PARSE_IN_LOOP_BYTES = 64 * 1024
_DEFAULT_SUMMARY = SummarizeOldPreserveRecent()
_DEFAULT_CLEAR = ClearOldToolResults()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat request as shaping needs it.

    Args:
        body: the decoded JSON body; ``fields`` are the spans of its top-level keys, where known.
        model: the request's model name.
        policy: with the mode that is in force for this request.
        force: ``x-compaction: force``.
        tenant, session: the bucket; ``session`` is ``None`` where no client named one.
        window: the model's context window, where known.
        tenant_secret: keys the handles of originals.
        summarizer: writes summaries for this request.
    """

    body: bytes
    model: str
    policy: Policy
    force: bool
    tenant: str
    session: str | None
    window: int | None
    tenant_secret: bytes
    summarizer: Summarizer
    fields: Mapping[str, wire.Span] | None = None


@dataclass(frozen=True, slots=True)
class Shaped:
    """What to forward (``None``: the client's own bytes), and everything that spans, headers and logs say about it."""

    body: bytes | None
    outcome: Outcome
    reason: Reason
    record: Record | None = None
    source: Source | None = None
    detail: str = ""
    looked_up: bool = False
    tokens_before: int | None = None
    tokens_after: int | None = None
    estimated: bool = False
    limit: int | None = None
    messages_before: int | None = None
    messages_after: int | None = None
    seconds: float = 0.0

    @property
    def event(self) -> bool:
        return self.outcome == "compacted"


def unchanged(reason: Reason, **known: object) -> Shaped:
    return replace(Shaped(None, "unchanged", reason), **known)  # type: ignore[arg-type]


class Shaper:
    """Shapes conversations. One a process; everything that waits is in what it is given."""

    def __init__(
        self,
        records: Records,
        counters: Counters,
        compactor: Compactor,
        jobs: Jobs[Result],
        units: Callable[[Count], Units],
    ) -> None:
        self._records = records
        self._counters = counters
        self._compactor = compactor
        self._jobs = jobs
        self._units = units
        self._memo = openai_chat.Memo()

    async def shape(self, conversation: Conversation) -> Shaped:
        """Never raises but for cancellation."""
        progress = _Progress(conversation)
        started = time.monotonic()
        try:
            shaped = await self._shape(progress)
        except Exception:  # the documented edge: a fault inside the proxy never fails a user's request
            log.exception("compaction failed inside the proxy; the request goes out in the form last sent")
            shaped = progress.fallback("internal-error")
        return replace(shaped, seconds=time.monotonic() - started)

    async def _shape(self, progress: _Progress) -> Shaped:
        conversation = progress.conversation
        policy = conversation.policy
        if policy.mode == "off":
            return unchanged("disabled")
        if len(conversation.body) < LEAST_BODY_BYTES:
            return unchanged("under-threshold")
        try:
            request, transcript = await self._read(conversation)
        except wire.Unreadable as error:
            return unchanged("unreadable", detail=str(error))
        progress.read(request, transcript)
        session = conversation.session or derived_session(transcript)
        size = _limits(policy, conversation.window, transcript)
        progress.limit = size.limit
        if policy.mode == "shadow":
            return await self._shadow(progress, size)
        if session is None:
            return unchanged("under-threshold", **progress.counts())

        scope = Scope(conversation.tenant, session, policy.name, policy.epoch)
        boundaries = tuple(group.end for group in transcript.groups)
        found = await self._records.look_up(scope, transcript.chain, boundaries)
        passed: list[str] = []
        for entry in found.candidates:
            record = await self._records.record(scope, transcript.chain, entry)
            if record is None:
                continue  # gone or unreadable: as if it had never been; the next one takes its place
            if applies(transcript, record):
                progress.base = record
                break
            passed.append(entry.id)
        progress.looked_up = True
        progress.show(progress.base)

        if self._proven(progress, size) and not conversation.force:
            return self._sticky(progress, scope, "under-threshold")
        units = await self._units_for(conversation.model)
        tokens = await self._measure(progress, units)
        attempt = decode_attempt(found.attempt)
        decision = decide(
            policy,
            size,
            tokens,
            transcript,
            progress.base,
            attempt,
            force=conversation.force,
            passed_over=bool(passed),
        )
        if not decision.due:
            return self._sticky(progress, scope, decision.reason)
        work = Work(
            situation=Situation(
                transcript=transcript,
                policy=policy,
                units=units,
                limits=_forced_limits(policy, tokens, conversation.window, transcript) if conversation.force else size,
                base=progress.base,
                source=decision.source,
                handle=self._handle(conversation),
            ),
            scope=scope,
            passed=tuple(passed),
            boundaries=boundaries,
            tokens=tokens,
            attempt=attempt,
            summarizer=conversation.summarizer,
        )
        return await self._compacted(progress, work, decision)

    async def _read(self, conversation: Conversation) -> tuple[openai_chat.ChatRequest, Transcript]:
        """Split and parse, off the loop where there is much to do."""
        body, fields = conversation.body, conversation.fields
        if len(body) > _SPLIT_IN_LOOP_BYTES:
            request = await self._counters.off_loop(openai_chat.split, body, fields)
        else:
            request = openai_chat.split(body, fields)
        if openai_chat.unknown_bytes(request, self._memo) > _PARSE_IN_LOOP_BYTES:
            return request, await self._counters.off_loop(openai_chat.read, request, self._memo)
        return request, openai_chat.read(request, self._memo)

    def _proven(self, progress: _Progress, size: Limits) -> bool:
        """A token is at least one byte, and JSON never shrinks text: bytes within the limit prove tokens within it."""
        if size.limit is None:
            return False
        if any(item.media for item in progress.items()):
            return False
        return len(progress.body or progress.conversation.body) <= size.limit

    async def _units_for(self, model: str) -> Units:
        return self._units((await self._counters.get(model)).count)

    async def _measure(self, progress: _Progress, units: Units) -> int:
        transcript = progress.transcript
        counter = await self._counters.get(progress.conversation.model)
        unknown = sum(
            len(part.text) for item in transcript.items for part in item.parts if not counter.knows(part.text)
        )
        if unknown + len(progress.conversation.body) // 16 > OFF_LOOP_BYTES:
            before, after = await self._counters.off_loop(both_tokens, transcript, progress.base, units)
        else:
            before, after = both_tokens(transcript, progress.base, units)
        progress.tokens_before, progress.tokens_after = before, after
        progress.estimated = not counter.exact
        return after

    def _handle(self, conversation: Conversation) -> Callable[[bytes], str]:
        key, tenant = conversation.tenant_secret[:64], conversation.tenant.encode()

        def handle(original: bytes) -> str:
            return hashlib.blake2b(tenant + b"\0" + original, key=key, digest_size=10).hexdigest()

        return handle

    async def _compacted(self, progress: _Progress, work: Work, decision: Decision) -> Shaped:
        result = await self._compactor.compact(work, decision)
        if result.record is not work.base:
            progress.base = result.record
            progress.show(result.record)
            progress.tokens_after = await self._counters.off_loop(
                view_tokens, work.transcript, result.record, work.situation.units
            )
        shaped = self._sticky(progress, work.scope, result.reason)
        if shaped.reason == "invariant-failed":
            return replace(shaped, source=decision.source)
        return replace(shaped, outcome=result.outcome, source=decision.source, detail=result.detail)

    def _sticky(self, progress: _Progress, scope: Scope, reason: Reason) -> Shaped:
        """The view of the active record, checked; the client's own bytes where there is none or the check fails."""
        base = progress.base
        if base is None:
            return unchanged(reason, **progress.counts())
        wrong = order_problem(progress.transcript, progress.pieces)
        if wrong is not None:
            return unchanged("invariant-failed", detail=wrong, **progress.counts())
        if self._records.applied(scope, progress.transcript.chain, base):
            self._jobs.background(self._records.renew_due())
        return Shaped(
            progress.body,
            "sticky",
            "sticky" if reason == "under-threshold" else reason,
            record=base,
            **progress.counts(),  # type: ignore[arg-type]
        )

    async def _shadow(self, progress: _Progress, size: Limits) -> Shaped:
        """What would happen, without a model call and without a record; the request goes out as it came."""
        conversation = progress.conversation
        if size.limit is None or len(conversation.body) <= size.limit:
            return unchanged("shadow", **progress.counts())
        units = await self._units_for(conversation.model)
        tokens = await self._measure(progress, units)
        decision = decide(conversation.policy, size, tokens, progress.transcript, None, None)
        detail: str = decision.reason
        if decision.due:
            situation = Situation(
                transcript=progress.transcript,
                policy=conversation.policy,
                units=units,
                limits=size,
                base=None,
                source=decision.source,
                handle=self._handle(conversation),
            )
            planned = await self._counters.off_loop(plan, situation)
            detail = planned.reason if isinstance(planned, NoPlan) else planned.strategy
        return unchanged("shadow", detail=detail, **progress.counts())


class _Progress:
    """How far shaping came: what to fall back to when a later step fails."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.transcript: Transcript = _EMPTY
        self.base: Record | None = None
        self.pieces: tuple[Piece, ...] = ()
        self.body: bytes | None = None
        self.looked_up = False
        self.limit: int | None = None
        self.tokens_before: int | None = None
        self.tokens_after: int | None = None
        self.estimated = False
        self._request: openai_chat.ChatRequest | None = None

    def read(self, request: openai_chat.ChatRequest, transcript: Transcript) -> None:
        self._request, self.transcript = request, transcript

    def items(self) -> tuple[Item, ...]:
        return (*self.transcript.head, *self.transcript.items)

    def show(self, record: Record | None) -> None:
        """Apply a record; with none the client's own bytes stand."""
        if record is None or self._request is None:
            return
        self.pieces = apply(self.transcript, record)
        self.body = openai_chat.assemble(self._request, len(self.transcript.head), self.pieces)

    def counts(self) -> dict[str, object]:
        head = len(self.transcript.head)
        before = head + len(self.transcript.items)
        return {
            "looked_up": self.looked_up,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "estimated": self.estimated,
            "limit": self.limit,
            "messages_before": before,
            "messages_after": head + len(self.pieces) if self.body is not None else before,
        }

    def fallback(self, reason: Reason) -> Shaped:
        outcome: Outcome = "unchanged" if self.body is None else "sticky"
        return replace(Shaped(self.body, outcome, reason, record=self.base), **self.counts())  # type: ignore[arg-type]


_EMPTY = Transcript("", (), (), (), (), ())


def derived_session(transcript: Transcript) -> str | None:
    """The chain hash after the second item; shorter requests have no session and need none."""
    return transcript.chain[2].hex() if len(transcript.items) >= 2 else None


def _limits(policy: Policy, window: int | None, transcript: Transcript) -> Limits:
    return limits(policy, window, transcript.max_tokens, **_caps(policy))


def _forced_limits(policy: Policy, tokens: int, window: int | None, transcript: Transcript) -> Limits:
    """``force`` ignores thresholds: sizes follow from the view itself where it is below the limit."""
    thresholds = policy.thresholds
    known = tokens if thresholds.threshold_tokens is None else min(tokens, thresholds.threshold_tokens)
    forced = replace(policy, thresholds=replace(thresholds, never=False, threshold_tokens=max(1, known)))
    return _limits(forced, window, transcript)


def _caps(policy: Policy) -> dict[str, int]:
    summarize = next((s for s in policy.strategies if isinstance(s, SummarizeOldPreserveRecent)), _DEFAULT_SUMMARY)
    clear = next((s for s in policy.strategies if isinstance(s, ClearOldToolResults)), _DEFAULT_CLEAR)
    return {
        "summary": summarize.summary_max_tokens,
        "ledger": summarize.ledger_max_tokens,
        "clear": clear.clear_at_least,
    }
