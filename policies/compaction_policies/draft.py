"""A plan in the making: the view as the strategies so far leave it, and the few moves that they have.

The draft starts from the active record and only goes further. It is the one mutable value of the core and never leaves
:mod:`compaction_policies.plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from compaction_policies.carry import Carried, carried_candidates, carry
from compaction_policies.measure import Limits, Units
from compaction_policies.outcomes import Source
from compaction_policies.policy import Policy, SummarizeOldPreserveRecent
from compaction_policies.protect import Protected, protected
from compaction_policies.record import STRENGTH, Op, OpKind, Record
from compaction_policies.transcript import Item, Part, Transcript
from compaction_policies.view import hidden, value_text

Handle = Callable[[bytes], str]
"""The handle under which a replaced original is stored: a keyed hash of tenant and bytes."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a plan is made for.

    Args:
        base: the active record of this chain, applicable to this request.
        source: ``manual`` ignores thresholds and floors, and still only shrinks.
        handle: names a replaced original.
    """

    transcript: Transcript
    policy: Policy
    units: Units
    limits: Limits
    base: Record | None
    source: Source
    handle: Handle


@dataclass(slots=True)
class Draft:
    """See the module docstring. ``sizes`` are the items as the view shows them now; ``original`` as the client sent them."""

    transcript: Transcript
    policy: Policy
    units: Units
    limits: Limits
    base: Record | None
    handle: Handle
    cut: int = 0
    kept: frozenset[int] = frozenset()
    ops: dict[tuple[int, str], Op] = field(default_factory=dict)
    original: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    fixed: int = 0
    synthetic: int = 0
    summarize: SummarizeOldPreserveRecent | None = None
    preserve: int | Literal["all"] = "all"
    used: list[str] = field(default_factory=list)
    refused: str = ""

    @classmethod
    def start(cls, at: Situation) -> Draft:
        transcript, units, base = at.transcript, at.units, at.base
        draft = cls(transcript, at.policy, units, at.limits, base, at.handle, preserve=at.policy.preserve_user_messages)
        draft.original = [units.item(item) for item in transcript.items]
        draft.sizes = list(draft.original)
        draft.fixed = units.fixed(transcript)
        if base is not None:
            draft.cut = base.summarized_to
            draft.kept = frozenset(base.kept)
            draft.gone = set(hidden(base))
            draft.synthetic = base.synthetic_tokens
            for op in base.ops:
                draft.put(op)
        return draft

    # ------------------------------------------------------------ reading

    def tokens(self) -> int:
        """The view: head, schemas, synthetic message, and what stays."""
        gone = self.gone
        return self.fixed + self.synthetic + sum(size for at, size in enumerate(self.sizes) if at not in gone)

    @property
    def newest(self) -> int:
        """Where the newest group starts."""
        return self.transcript.groups[-1].start

    def protected(self, before: int, also_excluded: tuple[str, ...] = ()) -> Protected:
        """What must stay of the items before a group boundary."""
        patterns = (*self.policy.exclude_tools, *also_excluded)
        return protected(self.transcript, patterns, self.base, before, self.sizes, self.limits.protected)

    def kind_at(self, item: int, part: str) -> str:
        op = self.ops.get((item, part)) or self.ops.get((item, "*"))
        return op.kind if op is not None else "keep"

    def gain(self, item: Item, part: Part, value: bytes) -> int:
        """Tokens that come free if ``value`` replaces a part as the view shows it now."""
        return self._part_size(item, part) - self.units.count(value_text(value))

    def carried(self, gone: Sequence[int]) -> tuple[tuple[Carried, ...], int]:
        candidates = carried_candidates(self.transcript, gone, self.preserve)
        return carry(self.transcript, candidates, self.limits.carried, self.units)

    # ------------------------------------------------------------ moving

    def edit(self, item: Item, part: Part, kind: OpKind, value: bytes) -> None:
        self.put(Op(item.index, part.key, kind, value))

    def put(self, op: Op) -> None:
        """Add an op, or make one stronger; the item's size follows."""
        if op.kind == "drop":
            for key in [key for key in self.ops if key[0] == op.item]:
                del self.ops[key]
            self.ops[(op.item, "*")] = op
            self.gone.add(op.item)
            return
        old = self.ops.get((op.item, op.part))
        if old is not None and STRENGTH[old.kind] > STRENGTH[op.kind]:
            return
        item = self.transcript.items[op.item]
        part = item.part(op.part)
        if part is not None:
            self.sizes[op.item] -= self._part_size(item, part) - self.units.count(value_text(op.value))
        self.ops[(op.item, op.part)] = op

    def move_cut(self, cut: int, kept: frozenset[int], synthetic: int) -> None:
        """Everything before ``cut`` but ``kept`` is replaced by a synthetic message of that many tokens."""
        self.cut, self.kept, self.synthetic = cut, kept, synthetic
        for key in [key for key in self.ops if key[0] < cut and (key[0] not in kept or key[1] == "*")]:
            del self.ops[key]
        dropped = {op.item for op in self.ops.values() if op.kind == "drop"}
        self.gone = {index for index in range(cut) if index not in kept} | dropped

    def _part_size(self, item: Item, part: Part) -> int:
        op = self.ops.get((item.index, part.key))
        return self.units.part(item, part) if op is None else self.units.count(value_text(op.value))
