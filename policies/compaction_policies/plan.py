"""Plans: what to keep, clear, summarize, drop, and what that needs. Making one is pure; so is turning it into a record.

A plan lists what it *needs* (a summary); the shell fulfils it; :func:`finish` is total: a summary that never came is the
caller's to judge (design section 9), not an exception here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from compaction_policies.carry import Carried, carried_candidates, carry
from compaction_policies.draft import Draft, Situation
from compaction_policies.extractive import extractive
from compaction_policies.frame import Frame, encode_message, render
from compaction_policies.ledger import ledger
from compaction_policies.measure import Count, Limits
from compaction_policies.outcomes import Reason
from compaction_policies.policy import ClearOldToolResults, SummarizeOldPreserveRecent, Truncate
from compaction_policies.prompts import TEMPLATE_VERSION
from compaction_policies.record import MediaRef, Op, Record, Segment, record_id
from compaction_policies.strategies.clear import clear
from compaction_policies.strategies.summarize import FRAME_TOKENS, summarize, synthetic_estimate
from compaction_policies.strategies.truncate import shorten_newest, truncate
from compaction_policies.succession import follows, heals, short_fingerprints, sort_ops
from compaction_policies.transcript import Item
from compaction_policies.view import view_tokens

Goal = Literal["floor", "shrink", "hard"]
"""What a pass must reach: free the reclaim floor, shrink at all (forced), or get below the hard limit."""


@dataclass(frozen=True, slots=True)
class Need:
    """The summary that a plan waits for: of these items, on top of ``anchor`` (the summary so far, or empty)."""

    items: tuple[Item, ...]
    anchor: str
    max_tokens: int
    strategy: SummarizeOldPreserveRecent
    count: Count


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module docstring. ``need`` is ``None`` where no model is asked."""

    situation: Situation
    covers: int
    cut: int
    kept: tuple[int, ...]
    ops: tuple[Op, ...]
    need: Need | None
    summarize: SummarizeOldPreserveRecent | None
    preserve: int | Literal["all"]
    constraints: tuple[str, ...]
    uncounted: int
    strategy: str
    before: int
    goal: Goal
    degraded: bool
    originals: tuple[tuple[str, bytes], ...]

    @property
    def chain(self) -> bytes:
        return self.situation.transcript.chain[self.covers]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Nothing can be done, and why."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Summary:
    """What a model wrote, and what that cost."""

    text: str
    model: str
    tokens_in: int = 0
    tokens_out: int = 0


def plan(situation: Situation) -> Plan | NoPlan:
    """The policy's strategies in order until the target is met."""
    limits, base = situation.limits, situation.base
    draft = Draft.start(situation)
    before = draft.tokens()
    forced = situation.source == "manual"
    for strategy in situation.policy.strategies:
        if draft.tokens() <= draft.limits.target:
            break
        if isinstance(strategy, ClearOldToolResults):
            clear(draft, strategy, at_least=1 if forced else limits.clear_at_least)
        elif isinstance(strategy, SummarizeOldPreserveRecent):
            summarize(draft, strategy, forced=forced)
        elif isinstance(strategy, Truncate) and draft.tokens() > (limits.limit or 0):
            truncate(draft, limits.target, _with_synthetic, strategy)
    if not draft.used:
        return NoPlan("irreducible" if draft.refused else "below-reclaim-floor")
    above_hard = limits.hard is not None and before > limits.hard
    goal: Goal = "shrink" if forced else "hard" if above_hard else "floor"
    if not _reached(draft, before, goal) and not (base is not None and base.degraded and draft.summarize):
        return NoPlan("irreducible" if above_hard else "below-reclaim-floor")
    return _planned(situation, draft, before, goal, degraded=False)


def last_plan(situation: Situation) -> Plan | NoPlan:
    """Rungs (b) and (c) of the ladder, for a view above the hard limit when no summary came: clear all but the newest
    result, then an extractive summary, then drop the oldest groups and shorten the newest results."""
    limits, policy = situation.limits, situation.policy
    draft = Draft.start(situation)
    before = draft.tokens()
    hard = limits.hard
    goal = min(limit - limits.rearm for limit in (limits.limit, hard) if limit is not None)
    clearing = next((s for s in policy.strategies if isinstance(s, ClearOldToolResults)), ClearOldToolResults())
    clear(draft, clearing, keep_tool_uses=1, at_least=1)
    if draft.tokens() > goal:
        found = next((s for s in policy.strategies if isinstance(s, SummarizeOldPreserveRecent)), None)
        summarize(draft, found or SummarizeOldPreserveRecent(), forced=True)
    if hard is not None and draft.tokens() > hard and policy.last_resort == "truncate":
        truncate(draft, limits.target, _with_synthetic, Truncate())
        for size in (goal, hard):
            if draft.tokens() > hard:
                shorten_newest(draft, size)
    still_too_large = hard is not None and draft.tokens() > hard
    if not draft.used or still_too_large or draft.tokens() >= before:
        return NoPlan("irreducible")
    return _planned(situation, draft, before, "hard", degraded=True)


def finish(plan: Plan, summary: Summary | None, *, created_ms: int) -> Record | None:
    """The record of an executed plan, or ``None`` where it does not reach its goal or does not follow its base."""
    transcript, base = plan.situation.transcript, plan.situation.base
    gone = _gone(plan)
    body, anchor, told = _told(plan, summary, gone)
    listed = _ledger(plan, gone)
    candidates = carried_candidates(transcript, gone, plan.preserve)
    carried, counted = carry(transcript, candidates, plan.situation.limits.carried, plan.situation.units)
    derived = _derived(plan, gone)
    synthetic: tuple[Segment, ...] = ()
    synthetic_tokens = 0
    if plan.summarize is None and base is not None and not _drops_words(plan):
        synthetic, synthetic_tokens = base.synthetic, base.synthetic_tokens
        carried_now = base.carried
    else:
        carried_now = tuple(entry.index for entry in carried)
        if plan.cut or carried or plan.constraints:
            synthetic, synthetic_tokens = _synthetic(plan, body, listed, carried, counted, derived=derived)
    generation = 1 if base is None else base.generation + 1
    parent = "" if base is None else base.id
    record = Record(
        id=record_id(
            plan.situation.policy.name,
            plan.situation.policy.epoch,
            parent,
            plan.chain,
            plan.cut,
            plan.ops,
            plan.kept,
            degraded=plan.degraded,
        ),
        policy=plan.situation.policy.name,
        revision=plan.situation.policy.revision,
        epoch=plan.situation.policy.epoch,
        dialect=transcript.dialect,
        parent=parent,
        generation=generation,
        chain=plan.chain.hex(),
        covers=plan.covers,
        summarized_to=plan.cut,
        ops=plan.ops,
        kept=plan.kept,
        told=told,
        summary=anchor,
        body=body,
        ledger=listed,
        synthetic=synthetic,
        synthetic_tokens=synthetic_tokens,
        degraded=plan.degraded,
        trust="derived" if derived else "trusted",
        source=plan.situation.source,
        strategy=plan.strategy,
        template=TEMPLATE_VERSION,
        carried=carried_now,
        pinned=plan.constraints,
        fingerprints=short_fingerprints(transcript, plan.covers),
        tokens_before=plan.before,
        tokens_after=0,
        summarizer_model="" if summary is None else summary.model,
        summarizer_tokens_in=0 if summary is None else summary.tokens_in,
        summarizer_tokens_out=0 if summary is None else summary.tokens_out,
        created_ms=created_ms,
    )
    after = view_tokens(transcript, record, plan.situation.units)
    record = replace(record, tokens_after=after)
    if base is not None and not follows(record, base):
        return None
    return record if shrinks(record, base, plan.before, after, plan.situation.limits, plan.goal) else None


def shrinks(record: Record, base: Record | None, before: int, after: int, limits: Limits, goal: Goal) -> bool:
    """The shrink floor: a pass that does not reach it is a failure, not a success."""
    if base is not None and heals(record, base):
        return limits.hard is None or after <= max(limits.hard, before)
    if after >= before:
        return False
    if goal == "hard":
        return limits.hard is None or after <= limits.hard
    return goal == "shrink" or before - after >= limits.min_reclaim


# ---------------------------------------------------------------- making a plan


def _reached(draft: Draft, before: int, goal: Goal) -> bool:
    after = draft.tokens()
    if after >= before:
        return False
    if goal == "hard":
        return draft.limits.hard is None or after <= draft.limits.hard
    return goal == "shrink" or before - after >= draft.limits.min_reclaim


def _planned(situation: Situation, draft: Draft, before: int, goal: Goal, *, degraded: bool) -> Plan:
    transcript, base = draft.transcript, draft.base
    ops = sort_ops(draft.ops.values())
    gone = [index for index in range(draft.cut) if index not in draft.kept]
    constraints, uncounted = _constraints(draft)
    need: Need | None = None
    if draft.summarize is not None and draft.summarize.summarizer == "model" and not degraded:
        known = _indices(base.told) if base is not None else frozenset()
        span = tuple(transcript.items[index] for index in gone if index not in known)
        need = Need(
            span, "" if base is None else base.summary, draft.limits.summary, draft.summarize, draft.units.count
        )
    return Plan(
        situation=situation,
        covers=_covers(draft, ops),
        cut=draft.cut,
        kept=tuple(sorted(draft.kept)),
        ops=ops,
        need=need,
        summarize=draft.summarize,
        preserve=draft.preserve,
        constraints=constraints,
        uncounted=uncounted,
        strategy="+".join(dict.fromkeys(draft.used)),
        before=before,
        goal=goal,
        degraded=degraded,
        originals=_originals(draft, ops),
    )


def _covers(draft: Draft, ops: Sequence[Op]) -> int:
    """C is minimal: the end of the last group with an op, never below S or the parent's C."""
    ends = [draft.transcript.group_at(op.item).end for op in ops]
    return max([draft.cut, 0 if draft.base is None else draft.base.covers, *ends])


def _constraints(draft: Draft) -> tuple[tuple[str, ...], int]:
    """The policy's constraints, then the words of system messages that are no longer originals."""
    shield = draft.protected(draft.cut, () if draft.summarize is None else draft.summarize.exclude_tools)
    dropped = [op.item for op in draft.ops.values() if op.kind == "drop"]
    system = [
        *shield.constraints,
        *(index for index in sorted(dropped) if draft.transcript.items[index].role == "system"),
    ]
    words = [draft.transcript.items[index].text for index in system]
    return (*draft.policy.pins.constraints, *words), shield.uncounted


def _originals(draft: Draft, ops: Sequence[Op]) -> tuple[tuple[str, bytes], ...]:
    """The values that this plan replaces and its base did not: handle and bytes."""
    originals: dict[str, bytes] = {}
    for op in ops:
        part = draft.transcript.items[op.item].part(op.part)
        if part is None or (draft.base is not None and draft.base.op_at(op.item, op.part) is not None):
            continue
        value = draft.transcript.items[op.item].raw[part.start : part.end]
        originals[draft.handle(value)] = value
    return tuple(originals.items())


def _with_synthetic(draft: Draft) -> int:
    """What the synthetic message counts once the dropped words are carried."""
    strategy = draft.summarize
    if strategy is not None:
        return synthetic_estimate(draft, strategy, draft.cut)
    body = 0 if draft.base is None else draft.units.count(draft.base.body) + draft.units.count(draft.base.ledger)
    carried, _ = draft.carried(sorted(draft.gone))
    constraints, _ = _constraints(draft)
    words = sum(draft.units.count(line) + 2 for line in constraints)
    return FRAME_TOKENS + body + words + sum(entry.tokens for entry in carried)


# ---------------------------------------------------------------- making a record


def _gone(plan: Plan) -> list[int]:
    kept = set(plan.kept)
    dropped = {op.item for op in plan.ops if op.kind == "drop"}
    return sorted({index for index in range(plan.cut) if index not in kept} | dropped)


def _told(plan: Plan, summary: Summary | None, gone: Sequence[int]) -> tuple[str, str, tuple[tuple[int, int], ...]]:
    """``(what the message shows, the anchor, the items that the anchor stands for)``."""
    base = plan.situation.base
    anchor, told = ("", ()) if base is None else (base.summary, base.told)
    replaced = [index for index in gone if index < plan.cut]
    if plan.summarize is None:
        return "" if base is None else base.body, anchor, told
    if summary is not None:
        return summary.text, summary.text, _ranges(replaced)
    items = [plan.situation.transcript.items[index] for index in replaced]
    if not plan.degraded:
        text = extractive(items, plan.situation.limits.summary, plan.situation.units.count)
        return text, text, _ranges(replaced)
    known = _indices(told)
    fresh = [item for item in items if item.index not in known]
    room = max(plan.situation.limits.summary // 2, plan.situation.limits.summary - plan.situation.units.count(anchor))
    text = extractive(fresh, room, plan.situation.units.count)
    return f"{anchor}\n\n{text}" if anchor else text, anchor, told


def _ledger(plan: Plan, gone: Sequence[int]) -> str:
    if plan.summarize is None:
        return "" if plan.situation.base is None else plan.situation.base.ledger
    if not plan.summarize.ledger:
        return ""
    items = [plan.situation.transcript.items[index] for index in gone]
    return ledger(items, plan.situation.limits.ledger, plan.situation.units.count)


def _derived(plan: Plan, gone: Sequence[int]) -> bool:
    """Tool results are untrusted, and so is whatever was made from them, for as long as the chain lasts."""
    if plan.situation.base is not None and plan.situation.base.trust == "derived":
        return True
    return any(plan.situation.transcript.items[index].role in ("tool", "other") for index in gone)


def _drops_words(plan: Plan) -> bool:
    old = set() if plan.situation.base is None else {op.item for op in plan.situation.base.ops if op.kind == "drop"}
    fresh = {op.item for op in plan.ops if op.kind == "drop"} - old
    return any(plan.situation.transcript.items[index].role in ("user", "system") for index in fresh)


def _synthetic(
    plan: Plan, body: str, listed: str, carried: Sequence[Carried], counted: int, *, derived: bool
) -> tuple[tuple[Segment, ...], int]:
    shown = render(
        Frame(
            summary=body,
            ledger=listed,
            derived=derived,
            pinned=plan.constraints,
            pinned_uncounted=plan.uncounted,
            carried=tuple(carried),
            carried_uncounted=counted,
        ),
        plan.situation.transcript.items,
        media=plan.situation.policy.summary_role == "user",
    )
    tokens = plan.situation.units.message
    for segment in shown:
        tokens += plan.situation.units.count(segment) if isinstance(segment, str) else _media_tokens(plan, segment)
    return encode_message(shown, plan.situation.policy.summary_role), tokens


def _media_tokens(plan: Plan, ref: MediaRef) -> int:
    media = next(media for media in plan.situation.transcript.items[ref.item].media if media.start == ref.start)
    return plan.situation.units.image if media.kind == "image" else plan.situation.units.media


def _indices(ranges: Sequence[tuple[int, int]]) -> frozenset[int]:
    return frozenset(index for start, end in ranges for index in range(start, end))


def _ranges(indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sorted indices as half-open ranges."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)
