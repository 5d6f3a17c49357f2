"""The promises as properties: whatever is said, under whatever policy, request by request.

The judge reads the forwarded bytes with tools of its own and asks the core only which items a record hides.
``PROPERTY_EXAMPLES`` makes it longer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tessera
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from compaction_policies.carry import carried_candidates
from compaction_policies.dialects import openai_chat
from compaction_policies.plan import Need, Summary
from compaction_policies.policy import (
    ClearOldToolResults,
    Pins,
    Policy,
    SummarizeOldPreserveRecent,
    Thresholds,
    Truncate,
    matches_tool,
)
from compaction_policies.record import Record, decode_record, encode_record
from compaction_policies.succession import follows, rebase
from compaction_policies.view import applies, hidden, view_tokens
from compaction_proxy.shaping import Conversation
from support import corpus
from support.bench import MARK, Bench, Message, loop, step, user
from support.conversations import conversations, raw_body, requests
from support.engine import UNITS, Engine, Forwarded

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "12"))
QUICK = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="PROPERTY_EXAMPLES" not in os.environ,
    phases=[Phase.generate, Phase.shrink] if "PROPERTY_EXAMPLES" in os.environ else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")
CLEAR = ClearOldToolResults(clear_at_least=100, keep_tool_uses=2)
SUMMARIZE = SummarizeOldPreserveRecent(preserve_recent_tokens=600, preserve_recent_turns=1)
POLICIES = {
    "balanced": Policy("p", strategies=(CLEAR, SUMMARIZE)),
    "clear": Policy("p", strategies=(replace(CLEAR, keep_errors=False, preview_chars=40, clear_tool_inputs=("r*",)),)),
    "summarize": Policy("p", strategies=(replace(SUMMARIZE, ledger=False),), pins=Pins(("never touch ticket 7",))),
    "spare": Policy(
        "p", strategies=(CLEAR, SUMMARIZE, Truncate()), exclude_tools=("todo_*", "mcp__*"), protected_max_tokens=None
    ),
    "bounded": Policy("p", strategies=(CLEAR, SUMMARIZE), exclude_tools=("todo_*",), preserve_user_tokens=150),
    "newest": Policy("p", strategies=(SUMMARIZE, Truncate()), preserve_user_messages=2, summary_role="assistant"),
    "extractive": Policy("p", strategies=(CLEAR, replace(SUMMARIZE, summarizer="extractive"))),
    "truncate": Policy("p", strategies=(Truncate(),), exclude_tools=("grep",)),
    "forward": Policy("p", strategies=(CLEAR,), last_resort="forward", pre_step=False),
}


def policy(name: str, limit: int) -> Policy:
    chosen = POLICIES[name]
    return replace(chosen, thresholds=Thresholds(threshold_tokens=limit, threshold_ratio=None, min_reclaim_tokens=100))


def write(need: Need) -> Summary:
    """A summary that fills its room and names what it was told."""
    told = MARK.findall(" ".join([need.anchor, *(item.text for item in need.items)]))
    return Summary(("## State\n" + " ".join(dict.fromkeys(told)))[: need.max_tokens * 4], "m")


def pieces_of(body: bytes) -> tuple[bytes, list[bytes], bytes]:
    """What stands before the messages, each message's bytes, and what stands behind: by the standard library alone."""
    text = body.decode()
    at = text.index('"messages":') + len('"messages":')
    while text[at] != "[":
        at += 1
    opening, at = text[: at + 1], at + 1
    found = []
    while True:
        while text[at] in " ,\n":
            at += 1
        if text[at] == "]":
            return opening.encode(), found, text[at:].encode()
        _, end = json.JSONDecoder().raw_decode(text, at)
        found.append(text[at:end].encode())
        at = end


class Judge:
    """Holds one conversation's requests against each other.

    Args:
        whole: nothing of it is broken, and it only grows: a record in force stays found.
        edited: the policy changes on the way: what an older revision did is not this one's.
    """

    def __init__(self, chosen: Policy, *, whole: bool, edited: bool = False) -> None:
        self.policy = chosen
        self.whole = whole
        self.edited = edited
        self.made: dict[str, list[bytes]] = {}
        self.told: dict[str, set[int]] = {}
        self.last: tuple[Forwarded, list[bytes]] | None = None
        self.events = 0
        self.memo = openai_chat.Memo()

    def see(self, sent: list[Message], body: bytes, raws: list[bytes], got: Forwarded) -> None:
        opening, forwarded, rest = pieces_of(got.body)
        assert (opening, rest) == (pieces_of(body)[0], pieces_of(body)[2])
        if got.record is None:
            assert got.body == body
        else:
            covered = raws[len(got.transcript.head) :][: got.record.covers]
            assert self.made.setdefault(got.record.id, covered) == covered, "a record of another conversation"
        head = len(got.transcript.head)
        assert forwarded[:head] == raws[:head]
        self.kept(got, raws[head:], forwarded[head:])
        self.valid(sent, got, [json.loads(raw) for raw in forwarded])
        self.counted(got)
        self.steady(got, forwarded[head:])
        if got.event:
            self.events += 1
            self.event(got)
        self.last = (got, forwarded[head:])

    def kept(self, got: Forwarded, raws: list[bytes], forwarded: list[bytes]) -> None:
        """P2, P4, P11: one new message at most, in front; all else the client's own bytes, in order, but for listed edits."""
        items, record = got.transcript.items, got.record
        gone = frozenset() if record is None else hidden(record)
        shown = [index for index in range(len(raws)) if index not in gone]
        new = len(forwarded) - len(shown)
        assert new in (0, 1)
        if new:
            self.synthetic(got, json.loads(forwarded[0]))
        last_user = got.transcript.last_user
        newest = got.transcript.groups[-1]
        for group in got.transcript.groups:
            assert len({index in gone for index in range(group.start, group.end)}) == 1, "half a group survives"
        assert shown[-1] == len(raws) - 1
        assert last_user is None or last_user in shown
        for index, raw in zip(shown, forwarded[new:], strict=True):
            if raw == raws[index]:
                continue
            assert record is not None
            assert index != last_user
            assert index < record.covers
            assert items[index].role in ("tool", "assistant")
            op = record.op_at(index, "content")
            last_resort = op is not None and op.kind == "shorten"
            assert last_resort or index not in newest
            if items[index].role == "tool" and not last_resort and not self.edited:
                assert not matches_tool(items[index].call_name, self.policy.exclude_tools), "an excluded result changed"
            edited(json.loads(raws[index]), json.loads(raw))

    def synthetic(self, got: Forwarded, message: Message) -> None:
        """P4: the user's words within the budget, the pins, and nothing of another conversation."""
        assert set(message) == {"role", "content"}
        assert message["role"] == self.policy.summary_role or self.edited
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        said = "\n".join(texts)
        assert self.edited or all(line in said for line in self.policy.pins.constraints)
        record, items = got.record, got.transcript.items
        assert record is not None
        known = {mark for item in items for mark in MARK.findall(item.text + "".join(c.arguments for c in item.calls))}
        assert set(MARK.findall(said)) <= known, "a stranger's words"
        users = carried_candidates(got.transcript, sorted(hidden(record)), self.policy.preserve_user_messages)
        sizes = [UNITS.item(items[index]) + 8 for index in users]
        budget = got.limits.carried
        if users and not self.edited and sizes[0] <= budget // 2 and sum(sizes) <= budget:
            assert all(items[index].text in said for index in record.carried)
            if record.generation == 1 or got.event:
                assert set(users) <= set(record.carried), "a user's words were lost within the budget"

    def valid(self, sent: list[Message], got: Forwarded, forwarded: list[Message]) -> None:
        """P2: valid in, valid out, by two judges that know nothing of the core."""
        if pairs_ok(sent):
            assert pairs_ok(forwarded)
            assert not fatal(forwarded)
        for message in forwarded:
            assert message.get("role")

    def counted(self, got: Forwarded) -> None:
        """What the core says it counts is what the forwarded body counts when it is read anew."""
        again = openai_chat.read(openai_chat.split(got.body), self.memo)
        real, said = view_tokens(again, None, UNITS), view_tokens(got.transcript, got.record, UNITS)
        pieces = 0 if got.record is None else len(got.record.synthetic)
        assert abs(real - said) <= 2 + 2 * pieces, (real, said)

    def steady(self, got: Forwarded, forwarded: list[bytes]) -> None:
        """P5: between two events the old prefix, and what is new behind it."""
        if self.last is None:
            return
        before, shown = self.last
        if self.whole:
            assert got.base is before.record, "a record in force was not found again"
        if got.record is before.record:
            assert forwarded[: len(shown)] == shown

    def event(self, got: Forwarded) -> None:
        """P7: strictly further, enough smaller, armed again, and nothing neither kept nor told."""
        base, new, size = got.base, got.record, got.limits
        assert new is not None
        assert new.covers >= new.summarized_to
        assert decode_record(encode_record(new)) == new
        healed = base is not None and base.degraded and not new.degraded
        if base is not None:
            assert follows(new, base)
            assert not follows(base, new)
            assert new.generation == base.generation + 1
            if not got.decision.above_hard:
                assert got.tokens >= base.tokens_after + size.rearm
        if not healed:
            floor = 1 if got.decision.above_hard or new.degraded else size.min_reclaim
            assert got.tokens - new.tokens_after >= floor
        if got.decision.above_hard and not healed:
            assert size.hard is not None
            assert new.tokens_after <= size.hard
        for op in new.ops:
            whole = got.transcript.group_at(op.item).whole
            assert whole or op.kind == "drop" or (base is not None and base.op_at(op.item, op.part) is not None)
        told = self.told.get("" if base is None else base.id, set())
        extracted = got.need is None and not new.degraded and new.summary != ("" if base is None else base.summary)
        self.told[new.id] = set(range(new.summarized_to)) - set(new.kept) if extracted else told
        if got.need is not None and not new.degraded:
            asked = {item.index for item in got.need.items}
            assert not asked & told, "told twice"
            assert asked | told | set(new.kept) >= set(range(new.summarized_to)), "neither kept nor told"
            self.told[new.id] = told | asked
            assert new.tokens_after <= (size.limit or 0), "a summary that does not get below the limit"


def edited(before: Message, after: Message) -> None:
    """Only values were replaced: the content, or arguments that still parse."""
    assert list(before) == list(after)
    for key in before:
        if key == "content":
            assert type(after[key]) is type(before[key])
            assert after[key] or not before[key]
        elif key == "tool_calls":
            for old, new in zip(before[key], after[key], strict=True):
                inner, fresh = old["function"], new["function"]
                assert {**new, "function": None} == {**old, "function": None}
                assert {**fresh, "arguments": None} == {**inner, "arguments": None}
                if parses(inner["arguments"]):
                    assert list(json.loads(fresh["arguments"])) == list(json.loads(inner["arguments"]))
                else:
                    assert fresh == inner
        else:
            assert before[key] == after[key]


def parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def pairs_ok(messages: Sequence[Message]) -> bool:
    waiting: list[str] = []
    for message in messages:
        if message["role"] in ("tool", "function"):
            if message.get("tool_call_id") not in waiting:
                return False
            waiting.remove(message["tool_call_id"])
            continue
        if waiting or message.get("function_call"):
            return False
        waiting = [call["id"] for call in message.get("tool_calls") or ()]
    return not waiting


def fatal(messages: list[Message]) -> list[str]:
    """What an independent linter finds, ids made unique: it looks across the whole array where providers look at neighbours."""
    renamed: list[Message] = []
    for at, message in enumerate(messages):
        message = dict(message)
        if message["role"] == "tool":
            owner = max(place for place in range(at) if messages[place].get("tool_calls"))
            message["tool_call_id"] = f"{owner}-{message['tool_call_id']}"
        if message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": f"{at}-{call['id']}"} for call in message["tool_calls"]]
        renamed.append(message)
    return [str(found) for found in tessera.inspect(renamed, adapter="openai").fatal]


def play(
    messages: list[Message],
    engine: Engine,
    judge: Judge,
    *,
    spaced: bool = False,
    ascii_only: bool = True,
    policies: Sequence[Policy] = (),
    **fields: Any,
) -> None:
    """Every request of a conversation, judged. The system prompt tells the time, as real ones do."""
    judge.last = None
    for number, sent in enumerate(requests(messages)):
        if policies:
            engine.policy = judge.policy = policies[number % len(policies)]
        if sent[0]["role"] == "system":
            sent = [{**sent[0], "content": f"You are an agent. It is 10:{len(sent):02}."}, *sent[1:]]
        body, raws = raw_body(sent, spaced=spaced, ascii_only=ascii_only, temperature=0.10, **fields)
        judge.see(sent, body, raws, engine.request(body))


WINDOWS = st.sampled_from([None, None, 1_600, 2_400, 4_096])


@pytest.mark.parametrize("name", POLICIES)
@QUICK
@given(
    messages=conversations(),
    limit=st.sampled_from([600, 1_000, 2_500]),
    window=WINDOWS,
    max_tokens=st.sampled_from([0, 300, 4_096]),
    spaced=st.booleans(),
    ascii_only=st.booleans(),
)
def test_the_promises_hold_for_what_clients_send(
    name: str,
    messages: list[Message],
    limit: int,
    window: int | None,
    max_tokens: int,
    spaced: bool,
    ascii_only: bool,
) -> None:
    chosen = policy(name, limit)
    engine, judge = Engine(chosen, write, window), Judge(chosen, whole=True)
    play(messages, engine, judge, spaced=spaced, ascii_only=ascii_only, max_tokens=max_tokens)


@pytest.mark.parametrize("name", POLICIES)
@QUICK
@given(messages=conversations(broken=True), limit=st.sampled_from([600, 1_000]), window=WINDOWS)
def test_the_promises_hold_for_arrays_that_arrive_broken(
    name: str, messages: list[Message], limit: int, window: int | None
) -> None:
    chosen = policy(name, limit)
    play(messages, Engine(chosen, write, window), Judge(chosen, whole=False))


@QUICK
@given(messages=conversations(broken=True), fails=st.lists(st.booleans(), min_size=1, max_size=8), window=WINDOWS)
def test_the_promises_hold_while_summaries_fail(messages: list[Message], fails: list[bool], window: int | None) -> None:
    chosen, calls = policy("balanced", 800), itertools.cycle(fails)
    engine = Engine(chosen, lambda need: None if next(calls) else write(need), window)
    play(messages, engine, Judge(chosen, whole=False))


@QUICK
@given(
    messages=conversations(),
    names=st.lists(st.sampled_from(sorted(POLICIES)), min_size=2, max_size=3),
    limits=st.lists(st.sampled_from([600, 800, 1_200]), min_size=2, max_size=2),
    window=WINDOWS,
)
def test_the_promises_hold_while_the_policy_is_edited(
    messages: list[Message], names: list[str], limits: list[int], window: int | None
) -> None:
    """Two or three revisions take turns, as on replicas that reload at different times: a record stays in force."""
    policies = [
        replace(policy(name, limits[at % 2]), revision=f"{at}") for at, name in enumerate([*names, *reversed(names)])
    ]
    engine, judge = Engine(policies[0], write, window), Judge(policies[0], whole=True, edited=True)
    play(messages, engine, judge, policies=policies)


@QUICK
@given(messages=conversations(most=26), name=st.sampled_from(sorted(POLICIES)), late=st.floats(0, 1))
def test_regenerated_requests_and_late_results_break_nothing(messages: list[Message], name: str, late: float) -> None:
    """Every earlier request again, newest first; then a result that was missing all the time arrives."""
    chosen = policy(name, 700)
    engine, judge = Engine(chosen, write), Judge(chosen, whole=False)
    results = [at for at, message in enumerate(messages) if message["role"] == "tool"]
    if not results:
        return
    missing = results[int(late * (len(results) - 1))]
    without = [*messages[:missing], *messages[missing + 1 :]]
    play(without, engine, judge)
    for sent in reversed(list(requests(without))):
        judge.last = None
        body, raws = raw_body(sent, spaced=False, ascii_only=True, temperature=0.10)
        judge.see(sent, body, raws, engine.request(body))
    judge.last = None
    for sent in ([*without, messages[missing]], [*without, messages[missing], user(99_999)]):
        body, raws = raw_body(sent, spaced=False, ascii_only=True, temperature=0.10)
        judge.see(sent, body, raws, engine.request(body))


@QUICK
@given(
    messages=conversations(most=26, broken=True),
    name=st.sampled_from(sorted(POLICIES)),
    places=st.lists(st.floats(0.3, 0.99), min_size=1, max_size=2),
)
def test_an_edited_conversation_never_gets_a_strangers_record(
    messages: list[Message], name: str, places: list[float]
) -> None:
    """Each branch differs in one message; whatever is applied was made from exactly the words that it stands for."""
    chosen = policy(name, 700)
    engine, judge = Engine(chosen, write), Judge(chosen, whole=False)
    play(messages, engine, judge)
    for number, place in enumerate(places):
        at = int(place * len(messages))
        changed = {**messages[at], "content": f"edited {number}"}
        play([*messages[:at], changed, *messages[at + 1 :]], engine, judge)


def test_a_regenerated_request_keeps_the_arguments_of_its_newest_call() -> None:
    """Its result was too short to be cleared, so that the record holds nothing but shorter arguments there."""
    arguments = json.dumps({"path": "a.py", "content": "x" * 2_000})
    chat = [user(0), *loop(1, 6, 300), *step(7, 1, arguments=arguments), *loop(8, 2, 300)]
    engine = Engine(policy("clear", 1_500), write)
    engine.policy = replace(engine.policy, strategies=(CLEAR,))
    record = engine.request(raw_body(chat, spaced=False, ascii_only=True)[0]).record
    assert record is not None
    assert [(op.item, op.part) for op in record.ops][-1] == (13, "call.0")
    again = chat[: record.covers]
    assert (
        json.loads(engine.request(raw_body(again, spaced=False, ascii_only=True)[0]).body)["messages"][-2:]
        == again[-2:]
    )


@QUICK
@given(
    messages=conversations(),
    first=st.sampled_from(sorted(POLICIES)),
    second=st.sampled_from(sorted(POLICIES)),
    share=st.floats(0.5, 1.0),
)
def test_two_plans_made_at_once_end_as_one_valid_record(
    messages: list[Message], first: str, second: str, share: float
) -> None:
    """The later commit is rebased on the one that came first, or gives way."""
    asked = list(requests(messages))
    long, short = asked[-1], asked[int(share * (len(asked) - 1))]
    made = [
        Engine(policy(name, 600), write).request(raw_body(sent, spaced=False, ascii_only=True)[0])
        for name, sent in ((first, short), (second, long))
    ]
    active, new, transcript = made[0].record, made[1].record, made[1].transcript
    if active is None or new is None or active.id == new.id or not applies(transcript, active):
        return
    rebased = rebase(new, active, transcript)
    if rebased is None:
        return
    assert follows(rebased, active)
    body, raws = raw_body(long, spaced=False, ascii_only=True)
    engine, judge = Engine(policy(second, 100_000), write), Judge(policy(second, 600), whole=False, edited=True)
    engine.records = {rebased.id: rebased}
    got = engine.request(body)
    assert got.record is rebased, "a rebased record does not apply"
    judge.see(long, body, raws, got)


@QUICK
@given(messages=conversations(broken=True), name=st.sampled_from(sorted(POLICIES)), window=WINDOWS)
def test_the_pipeline_sends_what_the_model_of_it_sends(messages: list[Message], name: str, window: int | None) -> None:
    """And so a second run of everything, through a store and JSON, gives the same bytes."""
    chosen = policy(name, 900)
    plain = tuple(
        replace(strategy, externalize=False) if isinstance(strategy, ClearOldToolResults) else strategy
        for strategy in chosen.strategies
    )
    engine = Engine(replace(chosen, strategies=plain), write, window, replace(UNITS, image=1_200))
    bench = Bench(engine.policy)

    async def both() -> None:
        for sent in requests(messages):
            body, _ = raw_body(sent, spaced=True, ascii_only=True, pad="x" * 1_024)
            shaped = await bench.shaper.shape(
                Conversation(
                    body=body,
                    model="m",
                    policy=engine.policy,
                    force=False,
                    tenant="t",
                    session="s",
                    window=window,
                    tenant_secret=b"k",
                    summarizer=Written(),
                )
            )
            modelled = engine.request(body)
            assert (shaped.body or body) == modelled.body, (shaped.reason, modelled.decision)
            assert shaped.event == modelled.event
            assert identity(shaped.record) == identity(modelled.record)

    asyncio.run(both())


class Written:
    async def write(self, need: Need) -> Summary:
        return write(need)


def identity(record: Record | None) -> str:
    return "" if record is None else record.id


@pytest.mark.parametrize("conversation", corpus.conversations(), ids=lambda conversation: conversation["id"])
def test_the_promises_hold_for_recorded_conversations(conversation: dict[str, Any]) -> None:
    limit = 12_000 if len(json.dumps(conversation)) > 100_000 else 1_500
    judge = Judge(policy("balanced", limit), whole=True)
    engine = Engine(judge.policy, write)
    asked = list(corpus.requests_of(conversation))
    for _, fields in asked[:: 1 + len(asked) // 60]:
        body, raws = raw_body(fields["messages"], spaced=True, ascii_only=False)
        judge.see(fields["messages"], body, raws, engine.request(body))
    assert judge.last is not None
    got = judge.last[0]
    assert judge.events or got.tokens <= limit or UNITS.fixed(got.transcript) > limit // 2
