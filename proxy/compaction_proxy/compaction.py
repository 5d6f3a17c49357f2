"""One compaction, from a due decision to the record in force: plan -> fulfil -> finish -> check -> commit.

The summary job belongs to the process: a request that leaves, or whose budget ends, loses nothing but its wait. Every
way out is a :class:`Result`; a failure is a reason, never an exception.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Protocol, TypeVar

from compaction_policies.decide import Attempt, Decision, concerns, decode_attempt, encode_attempt
from compaction_policies.draft import Situation
from compaction_policies.outcomes import Outcome, Reason
from compaction_policies.plan import Need, NoPlan, Plan, Summary, finish, last_plan, plan, shrinks
from compaction_policies.record import Record
from compaction_policies.succession import rebase
from compaction_policies.transcript import Transcript
from compaction_policies.validate import problem
from compaction_policies.view import applies, view_tokens
from compaction_proxy.jobs import Jobs, wait_at_most
from compaction_proxy.store.keys import Scope
from compaction_proxy.store.records import Committed, Records

P = ParamSpec("P")
T = TypeVar("T")

JOB_SECONDS = 60.0
"""A summary job's deadline, all retries included."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Failed:
    """A summary that did not come. ``why`` names the cause without any message text."""

    why: str


class Summarizer(Protocol):
    """Fulfils a need with a model: a summary, or why there is none. Never raises."""

    async def write(self, need: Need) -> Summary | Failed: ...


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a compaction of one request needs.

    Args:
        passed: ids of records that could not be applied to it.
        boundaries: ends of its groups.
        tokens: what the view counts.
        attempt: what is remembered of an earlier failure.
    """

    situation: Situation
    scope: Scope
    passed: tuple[str, ...]
    boundaries: tuple[int, ...]
    tokens: int
    attempt: Attempt | None
    summarizer: Summarizer

    @property
    def base(self) -> Record | None:
        """The active record, applied to this request."""
        return self.situation.base

    @property
    def transcript(self) -> Transcript:
        return self.situation.transcript


@dataclass(frozen=True, slots=True)
class Result:
    """The record to apply, what that makes of the request, and why. ``event`` where this work changed the active record."""

    record: Record | None
    reason: Reason
    event: bool = False
    detail: str = ""

    @property
    def outcome(self) -> Outcome:
        if self.event:
            return "compacted"
        return "unchanged" if self.record is None else "sticky"


@dataclass(slots=True)
class Flight:
    """A job's progress: ``elsewhere`` while another replica holds the lock."""

    elsewhere: bool = False


class Threads(Protocol):
    """Runs a function in a worker thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class Compactor:
    """Runs compactions, one flight for each plan of a conversation."""

    def __init__(self, records: Records, jobs: Jobs[Result], threads: Threads) -> None:
        self._records = records
        self._jobs = jobs
        self._threads = threads
        self._flights: dict[object, Flight] = {}

    async def compact(self, work: Work, decision: Decision) -> Result:
        """Compact now, or say why not. Waits at most for the policy's budgets."""
        planned = await self._thread(plan, work.situation)
        if isinstance(planned, NoPlan):
            if decision.above_hard:
                return await self._ladder(work, decision, planned.reason)
            return Result(work.base, planned.reason)
        if planned.need is None:
            result = await self._conclude(work, planned, None, decision.reason)
        else:
            result = await self._summarized(work, planned, planned.need, decision)
        if result.event or result.record is not work.base:
            return result
        if decision.above_hard or (result.reason != "gate-timeout" and self._failed_before(work)):
            return await self._ladder(work, decision, result.reason)
        return result

    # ------------------------------------------------------------ with a model

    async def _summarized(self, work: Work, planned: Plan, need: Need, decision: Decision) -> Result:
        key = (work.scope, planned.chain, planned.cut, work.base.id if work.base else "")
        joined = self._jobs.find(key) is not None
        flight = self._flights.setdefault(key, Flight())
        task = self._jobs.start(key, lambda: self._job(work, planned, need, decision, flight))
        if not joined:
            task.add_done_callback(lambda _: self._flights.pop(key, None))
        timing = work.situation.policy.timing
        gate, inline = timing.gate_wait_ms / 1000, timing.inline_budget_ms / 1000
        done = await wait_at_most(task, gate if joined else min(gate, inline))
        if not done and not joined and not flight.elsewhere:
            done = await wait_at_most(task, max(0.0, inline - gate))
        if not done:
            return Result(work.base, "gate-timeout")
        result = task.result()
        if joined and result.event:
            return Result(result.record, "sticky")
        return result

    async def _job(self, work: Work, planned: Plan, need: Need, decision: Decision, flight: Flight) -> Result:
        """One replica writes the summary; the others wait for its record, and take over when a dead one's lock expires."""
        while True:
            async with self._records.lock(work.scope, planned.chain) as lock:
                current, attempt = await self._current(work)
                if current is not None and (work.base is None or current.id != work.base.id):
                    return Result(current, "sticky")
                if flight.elsewhere and attempt != work.attempt and concerns(attempt, work.transcript, work.base):
                    return Result(work.base, "summarizer-failed", detail="on another replica")
                if lock.held:
                    return await self._written(work, planned, need, decision)
            flight.elsewhere = True
            await asyncio.sleep(_POLL_SECONDS)

    async def _written(self, work: Work, planned: Plan, need: Need, decision: Decision) -> Result:
        try:
            async with asyncio.timeout(JOB_SECONDS):
                summary = await work.summarizer.write(need)
        except TimeoutError:
            summary = Failed("deadline")
        if isinstance(summary, Failed):
            await self._remember(work)
            return Result(work.base, "summarizer-failed", detail=summary.why)
        result = await self._conclude(work, planned, summary, decision.reason)
        if not result.event and result.record is work.base:
            await self._remember(work)
        return result

    async def _current(self, work: Work) -> tuple[Record | None, Attempt | None]:
        """The record that is in force for this chain now, and what is remembered of failures."""
        found = await self._records.look_up(work.scope, work.transcript.chain, work.boundaries)
        for entry in found.candidates:
            record = await self._records.record(work.scope, work.transcript.chain, entry)
            if record is not None and applies(work.transcript, record):
                return record, decode_attempt(found.attempt)
        return None, decode_attempt(found.attempt)

    # ------------------------------------------------------------ without one

    async def _ladder(self, work: Work, decision: Decision, reason: Reason) -> Result:
        """The rungs below a summary: clear harder, extract, drop, shorten; committed as degraded. Else the form last sent."""
        planned = await self._thread(last_plan, work.situation)
        if isinstance(planned, Plan):
            result = await self._conclude(work, planned, None, "degraded")
            if result.event or result.record is not work.base:
                return Result(result.record, result.reason, event=result.event, detail=reason)
        await self._remember(work, hard=work.situation.limits.hard)
        return Result(work.base, reason)

    def _failed_before(self, work: Work) -> bool:
        """Where no window is known, the second failed attempt takes the ladder."""
        return work.situation.limits.hard is None and concerns(work.attempt, work.transcript, work.base)

    async def _remember(self, work: Work, hard: int | None = None) -> None:
        attempt = Attempt(
            items=len(work.transcript.items),
            chain=work.transcript.chain[-1].hex(),
            base="" if work.base is None else work.base.id,
            left=work.tokens,
            hard=hard,
        )
        await self._records.put_attempt(work.scope, work.transcript.chain, encode_attempt(attempt))

    # ------------------------------------------------------------ finishing

    async def _conclude(self, work: Work, planned: Plan, summary: Summary | None, reason: Reason) -> Result:
        record = await self._thread(finish, planned, summary, created_ms=int(time.time() * 1000))
        if record is None:
            return Result(
                work.base, "summarizer-failed" if summary else "below-reclaim-floor", detail="does not shrink"
            )
        wrong = await self._thread(problem, work.transcript, record, work.base, work.situation.policy)
        if wrong is not None:
            return Result(work.base, "invariant-failed", detail=wrong)
        if work.situation.limits.limit is not None and planned.originals:
            await self._records.put_originals(dict(planned.originals))
        return await self._commit(work, planned, record, reason)

    async def _commit(self, work: Work, planned: Plan, record: Record, reason: Reason) -> Result:
        """Compare-and-set on the chain's active record; where another came first, rebase on it or give way to it."""
        active = work.base
        for _ in range(3):
            reply = await self._records.commit(
                work.scope,
                record,
                work.transcript.chain,
                work.boundaries,
                "" if active is None else active.id,
                work.passed,
            )
            if isinstance(reply, Committed):
                if not applies(work.transcript, reply.record):
                    return Result(work.base, "no-progress", detail="discarded")
                return Result(reply.record, reason, event=True)
            active = reply.best
            if not applies(work.transcript, active):
                return Result(work.base, "no-progress", detail="discarded")
            if active.id == record.id:
                return Result(active, "sticky")
            rebased = rebase(record, active, work.transcript)
            if rebased is None:
                return Result(active, "sticky", detail="discarded")
            before, after = (view_tokens(work.transcript, each, work.situation.units) for each in (active, rebased))
            if not shrinks(rebased, active, before, after, work.situation.limits, planned.goal):
                return Result(active, "sticky", detail="discarded")
            record = replace(rebased, tokens_before=before, tokens_after=after)
        return Result(active, "sticky", detail="discarded")

    async def _thread(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await self._threads(functools.partial(work, *args, **named))
