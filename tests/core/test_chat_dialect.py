"""OpenAI chat arrays: identity, groups, and bytes that come back as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_policies import wire
from compaction_policies.dialects import openai_chat
from compaction_policies.transcript import Transcript
from support.bench import Message, assistant, step, user


def read(messages: list[Any], **more: Any) -> Transcript:
    return read_bytes(json.dumps({"model": "m", "messages": messages, **more}).encode())


def read_bytes(body: bytes) -> Transcript:
    return openai_chat.read(openai_chat.split(body), openai_chat.Memo())


def call(arguments: str, call_id: str = "c", name: str = "f", **more: Any) -> Message:
    inner = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": inner}],
        **more,
    }


def result(call_id: str = "c", content: Any = "r", **more: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


BASE = [user(0), call('{"a": 1, "b": [0.1, "x"]}'), result(), {"role": "assistant", "content": "done"}]
SAME: dict[str, list[Message]] = {
    "a string is one text part": [
        {"role": "user", "content": [{"type": "text", "text": BASE[0]["content"]}]},
        *BASE[1:],
    ],
    "cache marks": [
        {
            "role": "user",
            "content": [{"type": "text", "text": BASE[0]["content"], "cache_control": {"type": "ephemeral"}}],
            "cache_control": {},
        },
        *BASE[1:],
    ],
    "null, missing, empty content": [BASE[0], {**BASE[1], "content": ""}, *BASE[2:]],
    "an empty list of parts": [BASE[0], {**BASE[1], "content": []}, *BASE[2:]],
    "an empty text part": [BASE[0], {**BASE[1], "content": [{"type": "text", "text": ""}]}, *BASE[2:]],
    "no content at all": [BASE[0], {key: value for key, value in BASE[1].items() if key != "content"}, *BASE[2:]],
    "key order": [dict(reversed(message.items())) for message in BASE],
    "arguments written again": [BASE[0], call('{"b":[0.10,"x"],"a":1.0}'), *BASE[2:]],
    "renamed ids": [BASE[0], call('{"a": 1, "b": [0.1, "x"]}', "other"), result("other"), BASE[3]],
    "reasoning": [
        BASE[0],
        {**BASE[1], "reasoning_content": "hm", "reasoning": "hm"},
        BASE[2],
        {**BASE[3], "reasoning_content": ""},
    ],
    "thinking parts": [
        *BASE[:3],
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "done"}],
        },
    ],
    "unknown keys": [{**message, "__copilotMessageSource": 1, "x": None} for message in BASE],
    "refusal null": [*BASE[:3], {**BASE[3], "refusal": None}],
    "a name on the result": [BASE[0], BASE[1], {**BASE[2], "name": "f"}, BASE[3]],
    "a call index": [
        BASE[0],
        {**BASE[1], "tool_calls": [{**BASE[1]["tool_calls"][0], "index": 0, "extra_content": {}}]},
        *BASE[2:],
    ],
}
DIFFERENT: dict[str, list[Message]] = {
    "another text": [user(1), *BASE[1:]],
    "another role": [{**BASE[0], "role": "assistant"}, *BASE[1:]],
    "a name": [{**BASE[0], "name": "bob"}, *BASE[1:]],
    "two parts for one": [
        {
            "role": "user",
            "content": [{"type": "text", "text": part} for part in (BASE[0]["content"][:3], BASE[0]["content"][3:])],
        },
        *BASE[1:],
    ],
    "another number": [BASE[0], call('{"a": 2, "b": [0.1, "x"]}'), *BASE[2:]],
    "the twentieth digit": [BASE[0], call('{"a": 12345678901234567891, "b": [0.1, "x"]}'), *BASE[2:]],
    "another tool": [BASE[0], call('{"a": 1, "b": [0.1, "x"]}', name="g"), *BASE[2:]],
    "another result": [*BASE[:2], result(content="q"), BASE[3]],
    "one message less": BASE[:3],
    "a refusal": [*BASE[:3], {"role": "assistant", "refusal": "done"}],
    "an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        *BASE[1:],
    ],
}


@pytest.mark.parametrize("how", SAME)
def test_what_means_the_same_has_the_same_chain(how: str) -> None:
    assert read(SAME[how]).chain == read(BASE).chain


@pytest.mark.parametrize("how", DIFFERENT)
def test_what_differs_has_another_chain(how: str) -> None:
    assert read(DIFFERENT[how]).chain[-1] != read(BASE).chain[-1]


def test_numbers_are_compared_by_value_at_any_size() -> None:
    def chain(number: str) -> bytes:
        return read([user(0), call(f'{{"n": {number}}}')]).chain[-1]

    assert chain("1") == chain("1.0") == chain("10e-1") == chain("1.00")
    assert chain("1e400") == chain("10e399")
    assert chain("-0") == chain("0")
    digits = "1234567890" * 6
    assert chain(digits + "1") != chain(digits + "2")
    assert chain("0.1") != chain('"0.1"')


def test_which_call_a_result_answers_is_part_of_its_identity() -> None:
    calls = step(1, 5, count=2)[0]
    one = [user(0), calls, result("c1-0", "x"), result("c1-1", "x")]
    two = [user(0), calls, result("c1-1", "x"), result("c1-0", "x")]
    assert read(one).chain[-1] != read(two).chain[-1]


PAIRS: dict[str, tuple[list[Message], list[Message]]] = {
    "a custom tool and a function": (
        [user(0), call("abc")],
        [
            user(0),
            {**call("abc"), "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "abc"}}]},
        ],
    ),
    "a number and what stands for one inside": (
        [user(0), call('{"a": 1}')],
        [user(0), call('{"a": {"\\u0000number": "1e0"}}')],
    ),
    "a late result of one call and of another": (
        [user(0), call("{}", "a"), user(1), call("{}", "b"), result("a")],
        [user(0), call("{}", "a"), user(1), call("{}", "b"), result("b")],
    ),
    "a list among the parts": (
        [{"role": "user", "content": [["text", "x"]]}],
        [{"role": "user", "content": "x"}],
    ),
    "arguments that are text and that are JSON": ([user(0), call('"a"')], [user(0), call("a")]),
}


@pytest.mark.parametrize("how", PAIRS)
def test_what_is_only_alike_has_another_chain(how: str) -> None:
    one, two = PAIRS[how]
    assert read(one).chain[-1] != read(two).chain[-1]


def test_numbers_inside_unknown_parts_are_exact() -> None:
    def chain(number: str) -> bytes:
        part = b'{"type": "chart", "n": ' + number.encode() + b"}"
        return read_bytes(b'{"messages": [{"role": "user", "content": [' + part + b"]}]}").chain[-1]

    assert chain("1e400") != chain("1e401")
    assert chain("12345678901234567890123") != chain("12345678901234567890124")
    assert chain("0.10") == chain("0.1")


WORDS = st.sampled_from(["", "a", "b", "1", "1.0", '"a"', "\x00"])
SAID = st.one_of(st.none(), WORDS, st.lists(st.builds(lambda text: {"type": "text", "text": text}, WORDS), max_size=2))
CALLS = st.lists(
    st.builds(lambda name, arguments: {"name": name, "arguments": arguments}, st.sampled_from("fg"), WORDS), max_size=2
)
SHORT = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), SAID, CALLS), min_size=1, max_size=3)


def meaning(messages: list[Any]) -> list[Any]:
    """What messages say, by another way than the dialect's: texts in order, calls with their values."""
    said = []
    for role, content, calls in messages:
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        said.append((role, texts if texts != [""] else [], [(c["name"], value(c["arguments"])) for c in calls]))
    return said


def value(arguments: str) -> Any:
    try:
        return ("json", type(loaded := json.loads(arguments)) is str, loaded)
    except ValueError:
        return ("text", arguments)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(SHORT, SHORT)
def test_two_arrays_share_a_chain_exactly_where_they_say_the_same(one: list[Any], two: list[Any]) -> None:
    def chain(messages: list[Any]) -> bytes:
        return read(
            [
                {"role": role, "content": content}
                | ({"tool_calls": [{"id": f"c{at}", "function": c} for at, c in enumerate(calls)]} if calls else {})
                for role, content, calls in messages
            ]
        ).chain[-1]

    assert (chain(one) == chain(two)) == (meaning(one) == meaning(two))


def test_the_head_is_no_part_of_the_chain() -> None:
    one = read([{"role": "system", "content": "12:00"}, {"role": "developer", "content": "x"}, *BASE])
    two = read([{"role": "system", "content": "12:01"}, *BASE])
    assert one.chain == two.chain
    assert (len(one.head), len(two.head)) == (2, 1)
    assert [item.role for item in read([*BASE, {"role": "system", "content": "later"}]).items][-1] == "system"


def spans(messages: list[Message]) -> list[tuple[int, int, bool]]:
    return [(group.start, group.end, group.whole) for group in read(messages).groups]


def test_groups_hold_a_call_and_all_its_results() -> None:
    pair = step(1, 5, count=2)
    assert spans([user(0), *pair, assistant(2)]) == [(0, 1, True), (1, 4, True), (4, 5, True)]
    assert spans([user(0), pair[0], pair[2], pair[1]]) == [(0, 1, True), (1, 4, True)], "in any order"
    assert spans([user(0), pair[0], pair[1]]) == [(0, 1, True), (1, 3, False)], "half answered"
    assert spans([user(0), pair[0], user(3)]) == [(0, 1, True), (1, 2, False), (2, 3, True)], "aborted"
    assert spans([user(0), pair[0], pair[1], user(3), pair[2]]) == [(0, 1, True), (1, 5, False)], "answered too late"
    assert spans([user(0), result("nobody"), user(1)]) == [(0, 1, True), (1, 2, False), (2, 3, True)], "an orphan"
    again = [user(0), call("{}", "call_0"), result("call_0"), call("{}", "call_0"), result("call_0")]
    assert spans(again) == [(0, 1, True), (1, 3, True), (3, 5, True)], "ids repeat in real sessions"
    pending = [user(0), call("{}"), result(content="pending"), assistant(1), user(2), result(content="done")]
    assert spans(pending) == [(0, 1, True), (1, 6, False)], "a pending answer and a final one"


def test_legacy_function_calls_are_groups_too() -> None:
    legacy = [
        user(0),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    transcript = read([*legacy, user(1)])
    assert [(group.start, group.end, group.whole) for group in transcript.groups] == [
        (0, 1, True),
        (1, 3, True),
        (3, 4, True),
    ]
    assert transcript.items[2].call_name == "f"


@pytest.mark.parametrize(
    ("content", "failed"),
    [
        ("Error: no such file", True),
        ("Traceback (most recent call last):\n", True),
        ('{"error": "boom"}', True),
        ('{"error": null}', False),
        ("all errors fixed", False),
        ("ok", False),
    ],
)
def test_results_that_report_an_error_are_known(content: str, failed: bool) -> None:
    assert read([user(0), call("{}"), result(content=content)]).items[2].error is failed


@pytest.mark.parametrize(
    "messages",
    [
        [1],
        ["x"],
        [{"content": "no role"}],
        [{"role": 3}],
        [{"role": "user", "content": 5}],
        [{"role": "assistant", "tool_calls": {}}],
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [{"role": "assistant", "tool_calls": ["x"]}],
    ],
)
def test_arrays_that_the_dialect_does_not_know_are_unreadable(messages: list[Any]) -> None:
    with pytest.raises(wire.Unreadable):
        read(messages)


TEXT = st.text(max_size=12)
MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, TEXT),
        st.builds(
            lambda text, more: {"content": [{"type": "text", "text": text}], "role": "assistant", **more},
            TEXT,
            st.dictionaries(st.sampled_from(["x", "y"]), TEXT),
        ),
        st.builds(lambda text: {"role": "system", "content": text}, TEXT),
    ),
    max_size=6,
)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(MESSAGES, st.sampled_from([None, 1, 2]), st.booleans())
def test_all_pieces_untouched_give_the_body_byte_for_byte(
    messages: list[Message], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps({"a": 1, "messages": messages, "z": [1.50]}, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    try:
        request = openai_chat.split(body)
    except wire.Unreadable:
        return
    transcript = openai_chat.read(request, openai_chat.Memo())
    head = len(transcript.head)
    assert openai_chat.assemble(request, head, range(len(transcript.items))) == body
    without_first = openai_chat.assemble(request, head, range(1, len(transcript.items)))
    assert json.loads(without_first)["messages"] == [*messages[:head], *messages[head + 1 :]]


def test_the_memo_is_bounded_and_parses_a_message_once() -> None:
    memo = openai_chat.Memo(max_bytes=30_000)
    request = openai_chat.split(json.dumps({"messages": [user(number, 20) for number in range(50)]}).encode())
    assert openai_chat.unknown_bytes(request, memo) > 0
    openai_chat.read(request, memo)
    assert memo._bytes <= 30_000
    small = openai_chat.split(json.dumps({"messages": [user(1)]}).encode())
    openai_chat.read(small, memo)
    assert openai_chat.unknown_bytes(small, memo) == 0


def test_output_limits_tools_and_schemas_are_seen() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "description": "x" * 100}},
        {"type": "custom", "custom": {"name": "g"}},
    ]
    transcript = read(BASE, tools=tools, max_completion_tokens=7, max_tokens=9, response_format={"type": "json_object"})
    assert transcript.tool_names == {"f", "g"}
    assert transcript.max_tokens == 7
    assert len(transcript.schemas) == 2


@pytest.mark.parametrize(
    "content", [[{"type": []}], [{"type": {}}, 5, None, {}], [[]], [{"type": "image_url", "image_url": [1]}]]
)
def test_strange_parts_are_opaque(content: Any) -> None:
    transcript = read([{"role": "user", "content": content}, assistant(1)])
    assert len(transcript.items) == 2
    assert transcript.chain != read([{"role": "user", "content": "x"}, assistant(1)]).chain
