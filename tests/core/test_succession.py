"""Which record may follow which: each rule once, and what a rebase makes of two."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from compaction_policies.dialects import openai_chat
from compaction_policies.measure import Limits
from compaction_policies.plan import shrinks
from compaction_policies.record import Op, Record, decode_record, encode_record
from compaction_policies.succession import follows, heals, rebase
from compaction_policies.transcript import Transcript
from support.bench import Bench, loop, make_policy, turns, user

CHAT: Transcript = openai_chat.read(
    openai_chat.split(json.dumps({"messages": [user(0), *loop(1, 12), user(90)]}).encode()), openai_chat.Memo()
)


def clear(item: int, kind: Any = "clear") -> Op:
    return Op(item, "content", kind, b'"x"')


def record(**given: Any) -> Record:
    known: dict[str, Any] = {
        "id": "r", "policy": "p", "revision": "", "epoch": 0, "dialect": "d", "parent": "", "generation": 1, "chain": "",
        "covers": 9, "summarized_to": 3, "ops": (), "kept": (), "told": (), "summary": "", "body": "", "ledger": "",
        "synthetic": (), "synthetic_tokens": 0, "degraded": False, "trust": "derived", "source": "auto-trigger",
        "strategy": "s", "template": "t", "carried": (), "pinned": (), "fingerprints": (), "tokens_before": 9, "tokens_after": 5,
    }  # fmt: skip
    return Record(**{**known, **given})


OLD = record(ops=(clear(4), clear(6, "shorten")), kept=(1, 2))
FOLLOWS = {
    "further in C": (replace(OLD, covers=11), True),
    "further in S": (replace(OLD, summarized_to=5, ops=(clear(6, "shorten"),), kept=(1,)), True),
    "a stronger op": (replace(OLD, ops=(clear(4), clear(6))), True),
    "another op": (replace(OLD, ops=(*OLD.ops, clear(8))), True),
    "dropped for shortened": (replace(OLD, ops=(clear(4), Op(6, "*", "drop"))), True),
    "nothing new": (OLD, False),
    "C falls": (replace(OLD, covers=8, summarized_to=5), False),
    "S falls": (replace(OLD, covers=12, summarized_to=2), False),
    "an op is missing": (replace(OLD, covers=11, ops=(clear(4),)), False),
    "an op is weaker": (replace(OLD, covers=11, ops=(clear(4, "shorten"), clear(6, "shorten"))), False),
    "a kept item more": (replace(OLD, covers=11, kept=(0, 1, 2)), False),
    "a kept item behind the old cut": (replace(OLD, summarized_to=5, ops=(clear(6, "shorten"),), kept=(1, 4)), False),
}


@pytest.mark.parametrize("how", FOLLOWS)
def test_a_record_follows_only_if_it_goes_further_and_brings_nothing_back(how: str) -> None:
    new, allowed = FOLLOWS[how]
    if how == "a kept item behind the old cut":
        allowed = True  # item 4 was an original behind S; it is kept from now on, its clear op is gone with it
        new = replace(new, ops=(clear(4), clear(6, "shorten")))
    assert follows(new, OLD) is allowed


def test_a_full_summary_heals_a_degraded_record_in_place() -> None:
    degraded = replace(OLD, degraded=True)
    whole = replace(OLD, body="summary", summary="summary")
    assert heals(whole, degraded)
    assert follows(whole, degraded)
    assert not heals(replace(whole, degraded=True), degraded)
    assert not heals(whole, OLD)
    assert not heals(replace(whole, summarized_to=2), degraded)


def test_a_rebase_keeps_the_synthetic_message_and_the_stronger_of_both_ops() -> None:
    summary = record(id="new", covers=5, summarized_to=5, body="s", synthetic=(b"m",), ops=())
    active = record(
        id="active", generation=4, covers=11, summarized_to=3, ops=(clear(4), clear(7), clear(10, "shorten"))
    )
    made = rebase(summary, active, CHAT)
    assert made is not None
    assert (made.parent, made.generation, made.covers, made.summarized_to) == ("active", 5, 11, 5)
    assert made.ops == (clear(7), clear(10, "shorten"))
    assert made.synthetic == (b"m",)
    assert made.chain == CHAT.chain[11].hex()
    assert made.id not in ("new", "active")
    assert len(made.fingerprints) == 11


def test_a_rebase_never_lets_the_cut_fall_nor_keeps_what_was_swallowed() -> None:
    active = record(id="active", covers=11, summarized_to=7, kept=(1,))
    assert rebase(record(covers=9, summarized_to=0, ops=(clear(8),)), active, CHAT) is None
    assert rebase(record(covers=9, summarized_to=8, kept=(2,)), active, CHAT) is None
    assert rebase(record(covers=9, summarized_to=7), replace(active, covers=99), CHAT) is None


async def test_records_survive_the_store_and_junk_is_a_miss() -> None:
    bench = Bench(make_policy(1_000))
    made = (await bench.send([*turns(0, 30), {"role": "user", "content": "lone \ud83c"}, user(90)])).record
    assert decode_record(encode_record(made)) == made
    stored = json.loads(encode_record(made))
    assert decode_record(json.dumps({**stored, "added_later": 1}).encode()) == made, "read tolerantly"
    for junk in (
        b"",
        b"null",
        b'{"v":0,"junk":true}',
        b"\xff",
        json.dumps({**stored, "v": 99}).encode(),
        json.dumps({**stored, "covers": "x"}).encode(),
    ):
        assert decode_record(junk) is None


LIMITS = Limits(limit=1_000, hard=1_500, target=500, rearm=125, min_reclaim=60)


@pytest.mark.parametrize(
    ("before", "after", "goal", "enough"),
    [
        (1_200, 1_100, "floor", True),
        (1_200, 1_141, "floor", False),
        (1_200, 1_199, "shrink", True),
        (1_200, 1_200, "shrink", False),
        (1_600, 1_499, "hard", True),
        (1_600, 1_501, "hard", False),
    ],
)
def test_a_pass_that_does_not_reach_its_goal_is_a_failure(before: int, after: int, goal: Any, enough: bool) -> None:
    assert shrinks(OLD, None, before, after, LIMITS, goal) is enough


def test_healing_needs_no_floor_but_never_passes_the_hard_limit() -> None:
    whole, degraded = replace(OLD, body="summary"), replace(OLD, degraded=True)
    assert shrinks(whole, degraded, 900, 950, LIMITS, "floor")
    assert not shrinks(whole, degraded, 900, 1_501, LIMITS, "floor")
