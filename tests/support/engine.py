"""The record rules without a shell: one process, a list of records, and what the design says about them, as short as can be.

It stands beside the real pipeline as a model of it: both must send the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from compaction_policies.decide import Attempt, Decision, concerns, decide
from compaction_policies.dialects import openai_chat
from compaction_policies.draft import Situation
from compaction_policies.measure import Limits, Units, limits
from compaction_policies.plan import Need, NoPlan, Plan, Summary, finish, last_plan, plan
from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent
from compaction_policies.record import Record
from compaction_policies.transcript import Transcript
from compaction_policies.validate import problem
from compaction_policies.view import applies, apply, view_tokens
from compaction_proxy.tokens import characters

UNITS = Units(characters, call=0, image=60)
"""Cheap images, so that they are carried in small conversations too."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What one request became. ``base`` was in force before it, ``record`` is now; ``need`` is what a model was asked."""

    body: bytes
    transcript: Transcript
    limits: Limits
    tokens: int
    decision: Decision
    base: Record | None
    record: Record | None
    need: Need | None = None

    @property
    def event(self) -> bool:
        return self.record is not self.base


def size_limits(policy: Policy, window: int | None, transcript: Transcript) -> Limits:
    summarize = next((s for s in policy.strategies if isinstance(s, SummarizeOldPreserveRecent)), None)
    clear = next((s for s in policy.strategies if isinstance(s, ClearOldToolResults)), None)
    return limits(
        policy,
        window,
        transcript.max_tokens,
        summary=(summarize or SummarizeOldPreserveRecent()).summary_max_tokens,
        ledger=(summarize or SummarizeOldPreserveRecent()).ledger_max_tokens,
        clear=(clear or ClearOldToolResults()).clear_at_least,
    )


@dataclass(slots=True)
class Engine:
    """``write`` fulfils a need; ``None`` is a summary that failed."""

    policy: Policy
    write: Callable[[Need], Summary | None]
    window: int | None = None
    units: Units = UNITS
    records: dict[str, Record] = field(default_factory=dict)
    attempt: Attempt | None = None
    memo: openai_chat.Memo = field(default_factory=openai_chat.Memo)

    def request(self, body: bytes) -> Forwarded:
        """Raises AssertionError where a plan of ours would break a promise."""
        split = openai_chat.split(body)
        transcript = openai_chat.read(split, self.memo)
        size = size_limits(self.policy, self.window, transcript)
        known = [record for record in self.records.values() if _of_chain(record, transcript)]
        known.sort(key=Record.key, reverse=True)
        base = next((record for record in known if applies(transcript, record)), None)
        passed_over = bool(known) and known[0] is not base
        tokens = view_tokens(transcript, base, self.units)
        decision = decide(self.policy, size, tokens, transcript, base, self.attempt, passed_over=passed_over)
        record, need = base, None
        if decision.due:
            situation = Situation(transcript, self.policy, self.units, size, base, decision.source, _handle)
            record, need = self._compacted(situation, decision, tokens)
        pieces = apply(transcript, record)
        forwarded = openai_chat.assemble(split, len(transcript.head), pieces)
        return Forwarded(forwarded, transcript, size, tokens, decision, base, record, need)

    def _compacted(self, at: Situation, decision: Decision, tokens: int) -> tuple[Record | None, Need | None]:
        planned = plan(at)
        need = planned.need if isinstance(planned, Plan) else None
        made: Record | None = None
        failed = False
        if isinstance(planned, Plan):
            summary = None if planned.need is None else self.write(planned.need)
            failed = planned.need is not None and summary is None
            made = None if failed else finish(planned, summary, created_ms=0)
            failed = failed or (made is None and planned.need is not None)
        tried_before = at.limits.hard is None and concerns(self.attempt, at.transcript, at.base)
        if failed:
            self._remember(at, tokens, None)
        if made is None and (decision.above_hard or (tried_before and isinstance(planned, Plan))):
            last = last_plan(at)
            made = None if isinstance(last, NoPlan) else finish(last, None, created_ms=0)
            if made is None:
                self._remember(at, tokens, at.limits.hard)
        if made is None:
            return at.base, need
        wrong = problem(at.transcript, made, at.base, at.policy)
        assert wrong is None, wrong
        self.records[made.id] = made
        return made, need

    def _remember(self, at: Situation, tokens: int, hard: int | None) -> None:
        base = "" if at.base is None else at.base.id
        self.attempt = Attempt(len(at.transcript.items), at.transcript.chain[-1].hex(), base, tokens, hard)


def _of_chain(record: Record, transcript: Transcript) -> bool:
    return record.covers < len(transcript.chain) and transcript.chain[record.covers].hex() == record.chain


def _handle(original: bytes) -> str:
    return blake2b(original, digest_size=8).hexdigest()
