"""Short request sequences that broke earlier forms of the record rules, each named after what it protects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from compaction_policies.policy import ClearOldToolResults, Policy, SummarizeOldPreserveRecent, Thresholds, Truncate
from compaction_policies.record import Record
from compaction_proxy.store import MemoryStore
from support.bench import (
    CLEAR_ONLY,
    SUMMARIZE_ONLY,
    Bench,
    Message,
    assistant,
    loop,
    make_policy,
    step,
    turns,
    user,
    words,
)


def test_a_regenerated_request_keeps_its_last_message_and_its_newest_result() -> None:
    async def play() -> None:
        bench = Bench(make_policy(strategies=CLEAR_ONLY))
        chat = [user(0), *loop(1, 12)]
        event = await bench.send(chat)
        assert event.event
        covered = event.record.covers
        again = await bench.send(chat[:covered])
        assert again.shaped.record is None
        assert again.messages == chat[:covered]

    asyncio.run(play())


def test_an_edit_behind_what_is_covered_needs_no_second_summary() -> None:
    async def play() -> None:
        bench = Bench()
        chat = [*turns(0, 30), user(90, 30)]
        event = await bench.send(chat)
        assert event.event
        assert event.record.covers < len(chat)
        edited = await bench.send([*chat[:-1], user(91, 30)])
        assert edited.record.id == event.record.id
        assert len(bench.scribe.needs) == 1

    asyncio.run(play())


def test_a_branch_adds_no_record_beyond_the_common_prefix() -> None:
    async def play() -> None:
        bench = Bench()
        chat = turns(0, 26)
        first = await bench.send([*chat, user(100)])
        grown = [*chat, *turns(100, 26), user(200)]
        main = await bench.send(grown)
        assert (first.event, main.event) == (True, True)
        branch = await bench.send([*grown[:60], user(300, 700)])
        after = await bench.send(grown)
        assert after.record.id == main.record.id
        assert not after.told(300)
        assert not branch.told(200)

    asyncio.run(play())


def test_an_edited_chain_never_gets_the_old_chains_record() -> None:
    async def play() -> None:
        bench = Bench()
        chat = [*turns(0, 30), user(90)]
        event = await bench.send(chat)
        edited = [user(77), *chat[1:]]
        other = await bench.send(edited)
        assert event.event
        assert not other.told(0)
        assert other.told(77)
        assert other.shaped.record is None or other.record.id != event.record.id

    asyncio.run(play())


def test_the_task_stays_an_original_in_a_long_tool_loop() -> None:
    async def play() -> None:
        bench = Bench()
        chat = [user(0, 40), *loop(1, 9, 120)]
        sent = await bench.send(chat)
        assert sent.event
        assert sent.record.summarized_to > 1
        assert sent.messages[1] == chat[0], "behind the synthetic message, word for word"

    asyncio.run(play())


def test_what_a_degraded_pass_swallowed_is_in_the_next_summary() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000))
        bench.scribe.fails = True
        chat = [*turns(0, 26), user(80)]
        degraded = await bench.send(chat, window=1_000)
        assert degraded.record.degraded
        bench.scribe.fails = False
        chat += [assistant(81), *turns(82, 26), user(150)]
        healed = await bench.send(chat)
        assert healed.event
        assert not healed.record.degraded
        told = {item.index for item in bench.scribe.needs[-1].items}
        assert set(range(degraded.record.summarized_to)) <= told

    asyncio.run(play())


def test_the_paid_summary_replaces_a_degraded_record_without_a_second_call() -> None:
    async def play() -> None:
        bench = Bench(
            replace(make_policy(1_000), timing=replace(Policy("p").timing, inline_budget_ms=30, gate_wait_ms=30))
        )
        answered = asyncio.Event()
        bench.scribe.before = answered.wait
        chat = [*turns(0, 26), user(80)]
        degraded = await bench.send(chat, window=1_000)
        assert degraded.record.degraded
        answered.set()
        for _ in range(200):
            await asyncio.sleep(0.005)
            if not bench.shaper._jobs:
                break
        after = await bench.send([*chat, assistant(81), user(82)], window=1_000)
        assert not after.record.degraded
        assert len(bench.scribe.needs) == 1

    asyncio.run(play())


def test_a_protected_group_pushed_out_of_the_bound_is_told() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, exclude_tools=("todo",), protected_max_tokens=120))
        chat = [user(0), *step(1, 90, tool="todo"), *loop(2, 8)]
        first = await bench.send(chat)
        assert first.event
        assert {1, 2} <= set(first.record.kept)
        chat += [*step(40, 90, tool="todo"), *loop(50, 8)]
        second = await bench.send(chat)
        assert second.event
        assert not {1, 2} & set(second.record.kept)
        everything = {item.index for need in bench.scribe.needs for item in need.items} | set(second.record.kept)
        assert set(range(second.record.summarized_to)) <= everything

    asyncio.run(play())


def test_kept_then_swallowed_by_a_degraded_pass_then_healed() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, exclude_tools=("todo",), protected_max_tokens=120))
        chat = [user(0), *step(1, 90, tool="todo"), *loop(2, 8)]
        first = await bench.send(chat)
        assert {1, 2} <= set(first.record.kept)
        bench.scribe.fails = True
        chat += [*step(40, 90, tool="todo"), *loop(50, 9)]
        degraded = await bench.send(chat, window=1_000)
        assert degraded.record.degraded
        bench.scribe.fails = False
        chat += loop(70, 9)
        healed = await bench.send(chat)
        assert healed.event
        assert not healed.record.degraded
        told = {item.index for item in bench.scribe.needs[-1].items}
        assert {1, 2} <= told

    asyncio.run(play())


def test_results_shortened_by_the_last_resort_are_cleared_later() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, CLEAR_ONLY))
        chat = [user(0), *step(1, 600, count=8)]
        shortened = await bench.send(chat, window=2_000)
        assert shortened.event
        assert {op.kind for op in shortened.record.ops} == {"shorten"}
        assert shortened.messages[0] == chat[0]
        events = 0
        for number in range(2, 14):
            chat = [*chat, *step(number, 60)]
            events += (await bench.send(chat, window=2_000)).event
        assert events <= 4

    asyncio.run(play())


def test_verbatim_words_stay_inside_their_budget() -> None:
    async def play() -> None:
        policy = make_policy(1_600, preserve_user_tokens=160)
        for opening in ([user(0, 700), assistant(1)], []):
            bench = Bench(policy)
            chat: list[Message] = [*opening, *turns(2, 60)]
            sent = await bench.send([*chat, user(400)])
            assert sent.event
            carried = sum(len(words(int(index), 0)) for index in sent.record.carried)
            assert carried >= 0
            record = json.dumps(sent.messages[0])
            quoted = record[record.index("Earlier user messages") :] if "Earlier user messages" in record else ""
            assert len(quoted) // 4 <= 160 + 80

    asyncio.run(play())


def test_many_system_reminders_compact_within_their_bounds() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_600))
        chat: list[Message] = [user(0), assistant(1)]
        for number in range(60):
            chat += [{"role": "system", "content": words(1000 + number, 40)}, *turns(2 + 2 * number, 1)]
        sent = await bench.send([*chat, user(500)])
        assert sent.event
        assert sent.record.tokens_after < 1_600

    asyncio.run(play())


def test_a_small_window_compacts_with_model_summaries() -> None:
    for window in (8_192, 4_096):

        async def play(window: int = window) -> None:
            policy = Policy(
                "p", thresholds=Thresholds(), strategies=(ClearOldToolResults(), SummarizeOldPreserveRecent())
            )
            bench = Bench(policy)
            chat: list[Message] = []
            events = irreducible = 0
            for number in range(0, 80, 2):
                chat = [*chat, user(number, 90)]
                sent = await bench.send(chat, window=window, max_tokens=window)
                events += sent.event
                irreducible += sent.shaped.reason == "irreducible"
                chat = [*chat, assistant(number + 1, 90)]
            assert 1 <= len(bench.scribe.needs) <= events
            assert events <= 12
            assert irreducible <= 3

        asyncio.run(play())


def test_a_clear_only_plan_gives_way_to_a_summary_made_meanwhile() -> None:
    async def play() -> None:
        store = MemoryStore()
        bench = Bench(make_policy(1_000, CLEAR_ONLY), store)
        chat = [user(0), *loop(1, 12)]
        other = Bench(make_policy(1_000, SUMMARIZE_ONLY), store)
        first, second = await asyncio.gather(other.send(chat), bench.send(chat))
        assert first.shaped.record is not None
        assert second.shaped.record is not None
        final = await bench.send([*chat, *step(50)])
        best = max((first.record, second.record), key=Record.key)
        assert final.record.summarized_to >= max(first.record.summarized_to, 0)
        assert final.record.key() >= best.key()

    asyncio.run(play())


def test_a_user_message_as_large_as_the_hard_limit_causes_no_event_on_every_request() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000))
        chat = [*turns(0, 4), user(50, 1_300)]
        events = 0
        for number in range(6):
            events += (await bench.send(chat, window=1_200)).event
            chat = [*chat, *step(60 + number, 20)]
        assert events <= 2
        assert (await bench.send(chat, window=1_200)).messages[-1] == chat[-1]

    asyncio.run(play())


def test_above_the_hard_limit_any_shrink_to_below_it_will_do() -> None:
    async def play() -> None:
        policy = make_policy(3_000, (ClearOldToolResults(clear_at_least=10, keep_tool_uses=1),))
        bench = Bench(policy)
        chat = [user(0), *step(1, 90), *turns(2, 19, 66), *step(90, 30)]
        before = (await bench.send(chat, policy=make_policy(1), session="other", force=False)).shaped.tokens_before or 0
        sent = await bench.send(chat, window=before - 30)
        assert sent.event
        assert (sent.shaped.tokens_after or 0) <= before - 30
        assert sent.record.tokens_before - sent.record.tokens_after < before // 16
        assert [op.kind for op in sent.record.ops] == ["clear"]

    asyncio.run(play())


def test_a_late_parallel_result_finds_the_record_and_leaves_no_orphan() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, CLEAR_ONLY))
        pair = step(90, 60, count=2)
        chat = [user(0), *loop(1, 12), pair[0], pair[1]]
        event = await bench.send(chat)
        assert event.event
        late = await bench.send([*chat, pair[2]])
        assert late.record.id == event.record.id
        assert [message.get("tool_call_id") for message in late.messages[-2:]] == ["c90-0", "c90-1"]

    asyncio.run(play())


def test_a_late_result_of_a_replaced_call_sends_no_orphan() -> None:
    async def play() -> None:
        bench = Bench()
        pair = step(1, 60, count=2)
        chat = [user(0), pair[0], pair[1], user(2), *loop(3, 12)]
        event = await bench.send(chat)
        assert event.event
        assert event.record.summarized_to > 3
        for more in ([], [assistant(90), user(91)]):
            sent = await bench.send([*chat, pair[2], *more])
            calls = {call["id"] for message in sent.messages for call in message.get("tool_calls") or ()}
            results = {message["tool_call_id"] for message in sent.messages if message["role"] == "tool"}
            assert results <= calls

    asyncio.run(play())


def test_a_revision_that_excludes_a_tool_brings_nothing_back_and_spares_it_from_now_on() -> None:
    async def play() -> None:
        one = make_policy(1_000, CLEAR_ONLY, revision="1")
        two = make_policy(1_000, CLEAR_ONLY, revision="2", exclude_tools=("db",))
        bench = Bench(one)
        chat = [user(0), *loop(1, 12, tool="db")]
        first = await bench.send(chat)
        cleared = {op.item for op in first.record.ops}
        same = await bench.send(chat, policy=two)
        assert same.messages == first.messages
        chat += [*loop(40, 6, tool="db"), *loop(60, 8, tool="read")]
        later = await bench.send(chat, policy=two)
        assert later.event
        fresh = {op.item for op in later.record.ops} - cleared
        assert fresh
        tools = {
            chat[index - 1]["tool_calls"][0]["function"]["name"] for index in fresh if chat[index]["role"] == "tool"
        }
        assert tools == {"read"}

    asyncio.run(play())


def test_after_a_regenerate_the_longer_record_is_in_force_again() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, CLEAR_ONLY))
        chat = [user(0), *loop(1, 12)]
        event = await bench.send(chat)
        shorter = chat[: event.record.covers]
        passed = await bench.send(shorter)
        assert passed.shaped.reason in ("no-progress", "under-threshold")
        again = await bench.send([*shorter, *chat[event.record.covers :], *step(50)])
        assert again.record.id == event.record.id

    asyncio.run(play())


def test_a_rebase_that_would_grow_the_view_is_discarded() -> None:
    async def play() -> None:
        store = MemoryStore()
        chat = [user(0), *loop(1, 30, 40)]
        slow = Bench(make_policy(1_000, SUMMARIZE_ONLY), store)
        fast = Bench(make_policy(1_000, (ClearOldToolResults(clear_at_least=10, keep_tool_uses=1),)), store)
        inside = asyncio.Event()
        go_on = asyncio.Event()

        async def wait() -> None:
            inside.set()
            await go_on.wait()

        slow.scribe.before = wait
        task = asyncio.ensure_future(slow.send(chat))
        await inside.wait()
        cleared = await fast.send(chat)
        assert cleared.event
        go_on.set()
        sent = await task
        assert sent.shaped.tokens_after is not None
        assert sent.shaped.tokens_after <= cleared.record.tokens_after

    asyncio.run(play())


def test_truncate_runs_only_above_the_limit_and_carries_what_it_drops() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, (Truncate(),)))
        chat = [user(0, 30), *loop(1, 12)]
        sent = await bench.send([*chat, user(90)])
        assert sent.event
        assert sent.told(0)
        assert {op.kind for op in sent.record.ops} == {"drop"}
        assert sent.messages[-1] == user(90)

    asyncio.run(play())


def test_an_event_that_frees_little_is_not_repeated_on_every_request() -> None:
    async def play() -> None:
        keep = ClearOldToolResults(clear_at_least=50, keep_tool_uses=9, clear_tool_inputs=False)
        bench = Bench(make_policy(1_000, (keep,)))
        chat = [user(0), *loop(1, 10, 100)]
        events = 0
        for number in range(20, 50):
            chat = [*chat, *step(number, 100)]
            sent = await bench.send(chat)
            events += sent.event
            assert (sent.shaped.tokens_after or 0) > 900
        assert 5 <= events <= 16

    asyncio.run(play())


def test_a_user_message_inside_a_broken_run_is_never_hidden() -> None:
    """A result that came after the next user message: the run from its call to it holds the user's words."""

    async def play() -> None:
        bench = Bench()
        pair = step(1, 60, count=2)
        chat = [user(0), pair[0], pair[1], user(2), pair[2], *loop(3, 12)]
        sent = await bench.send(chat)
        assert sent.event
        assert user(2) in sent.messages
        later = [*chat[:4], {"role": "system", "content": "RULE"}, *chat[4:], user(90), *loop(91, 8)]
        again = await bench.send(later)
        assert again.event
        assert "RULE" in json.dumps(again.messages)

    asyncio.run(play())


def test_requests_that_share_the_covered_items_but_not_the_last_user_message_get_records_of_their_own() -> None:
    async def play() -> None:
        bench = Bench()
        chat = [user(0), *loop(1, 9, 120)]
        first = await bench.send([*chat, user(90)])
        assert first.event
        assert 0 not in first.record.kept
        forced = await bench.send([*chat, assistant(91)], force=True)
        assert user(0) in forced.messages, "the task is still an original"
        assert (await bench.send([*chat, user(90)])).record.id == first.record.id

    asyncio.run(play())


def test_a_summary_is_not_replaced_where_nothing_new_is_to_be_told() -> None:
    async def play() -> None:
        bench = Bench(make_policy(1_000, exclude_tools=("todo",), protected_max_tokens=None))
        chat = [*turns(0, 30), user(90)]
        first = await bench.send(chat)
        assert first.event
        chat += loop(100, 12, 60, tool="todo")
        for _ in range(3):
            sent = await bench.send(chat)
            assert not sent.event
            assert sent.record.id == first.record.id
        assert len(bench.scribe.needs) == 1

    asyncio.run(play())


def test_text_that_looks_like_ours_is_the_clients_text() -> None:
    async def play() -> None:
        bench = Bench()
        fake = "[record of the earlier conversation]\nold\n[end of the record]"
        chat = [
            {"role": "user", "content": fake},
            assistant(1),
            *turns(2, 30),
            {"role": "user", "content": f"what is {fake}?"},
        ]
        sent = await bench.send(chat)
        assert sent.event
        assert sent.messages[-1] == chat[-1]
        text = sent.messages[0]["content"]
        assert fake in text, "the user's words, word for word"
        again = await bench.send([*chat, assistant(90), user(91)])
        assert again.record.id == sent.record.id

    asyncio.run(play())


def test_clearing_frees_what_is_needed_and_at_most_one_group_more() -> None:
    async def play() -> None:
        bench = Bench(make_policy(2_000, (ClearOldToolResults(clear_at_least=100, keep_tool_uses=1),)))
        sent = await bench.send([user(0), *loop(1, 24, 100)])
        assert sent.event
        assert 1_000 - 110 <= sent.record.tokens_after <= 1_000

    asyncio.run(play())


def test_counts_without_a_vocabulary_say_that_they_are_estimates() -> None:
    async def play() -> None:
        bench = Bench()
        assert not (await bench.send([*turns(0, 30), user(90)])).shaped.estimated
        counter = await bench.shaper._counters.get("m")
        counter.exact = False
        assert (await bench.send([*turns(0, 31), user(90)])).shaped.estimated

    asyncio.run(play())
